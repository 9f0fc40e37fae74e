"""Makes plain ``optim.bwd_hook=true`` legal in verl: its own ``optim/fsdp.yaml``, read when asked for, plus our keys.

Knows Hydra and where verl keeps that file; nothing of optimizers or engines.
"""

from pathlib import Path

import verl
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

PROVIDER = "bwdfuse"
CONFIG = "optim/fsdp"

#: Options outside ``optim`` that decide whether stepping inside backward can be honoured. They travel with the
#: optimizer's own settings as interpolations, so that its config class sees what the user finally set.
SURROUNDINGS = (
    "data.micro_batch_size_per_gpu",
    "data.train_batch_size",
    "data.use_dynamic_bsz",
    "engine.mixed_precision",
    "engine.model_dtype",
    "engine.offload_policy",
    "engine.param_offload",
    "engine.qat.enable",
    "engine.strategy",
    "engine.ulysses_sequence_parallel_size",
    "engine.use_orig_params",
    "model.enable_activation_offload",
    "model.enable_gradient_checkpointing",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
)


def verl_config_dir() -> Path:
    return Path(verl.__file__).parent / "trainer" / "config"


def with_bwd_hook(stock: DictConfig) -> DictConfig:
    """verl's ``optim/fsdp.yaml`` with our keys. Off unless the user says otherwise."""
    surroundings = {name: f"${{oc.select:{name},null}}" for name in SURROUNDINGS}
    # Where the optimizer's settings sit: null at the top (SFT), an actor's or critic's class elsewhere.
    surroundings["parent"] = "${oc.select:..._target_,null}"
    ours = {
        "_target_": "bwdfuse.trainers.verl.optimizer_config",
        # Step every parameter inside backward, as soon as its gradient is complete
        "bwd_hook": False,
        # A gradient that is not finite: skip (leave that parameter as it is), raise, or off
        "nonfinite": "skip",
        "bwd_hook_facts": {"stock_target": stock["_target_"], **surroundings},
    }
    merged = OmegaConf.merge(stock, ours)
    assert isinstance(merged, DictConfig)
    return merged


class BwdFuseConfigSource(ConfigSource):
    """Serves one config, :data:`CONFIG`, and steps aside where verl does not have it."""

    @staticmethod
    def scheme() -> str:
        return "bwdfuse-verl"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", "optim")

    def is_config(self, config_path: str) -> bool:
        return config_path.removesuffix(".yaml") == CONFIG and self._file().is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "" and results_filter in (None, ObjectType.GROUP):
            return ["optim"]
        if config_path == "optim" and results_filter in (None, ObjectType.CONFIG) and self.is_config(CONFIG):
            return ["fsdp"]
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_config(config_path):
            raise ConfigLoadError(f"{self.full_path()} does not serve '{config_path}'")
        text = self._file().read_text(encoding="utf-8")
        stock = OmegaConf.create(text)
        assert isinstance(stock, DictConfig)
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=with_bwd_hook(stock),
            header=self._get_header_dict(text),
        )

    @staticmethod
    def _file() -> Path:
        return verl_config_dir() / f"{CONFIG}.yaml"


class BwdFuseSearchPath(SearchPathPlugin):
    """Puts our source right before verl's own directory, so that a user's directory before it still wins."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        path = f"{BwdFuseConfigSource.scheme()}://"
        for element in search_path.get_path():
            if _is_verl(element.path):
                search_path.prepend(PROVIDER, path, anchor=SearchPathQuery(path=element.path))
                return
        # verl's directory may still come through hydra.searchpath, which Hydra appends after us.
        search_path.append(PROVIDER, path)


def _is_verl(path: str | None) -> bool:
    if path is None:
        return False
    if path.startswith("pkg://"):
        return path.removeprefix("pkg://").replace("/", ".") == "verl.trainer.config"
    return Path(path.removeprefix("file://")).resolve() == verl_config_dir().resolve()
