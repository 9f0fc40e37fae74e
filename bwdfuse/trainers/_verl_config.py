"""verl's optimizer settings with ``bwd_hook`` on: what verl says of this run, and the check before data and model load.

Knows verl's option names. Nothing of engines, except that one has to be registered.
"""

import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import verl
from verl.utils.device import get_device_name
from verl.workers.config import FSDPOptimizerConfig

from bwdfuse import validate
from bwdfuse._native import native
from bwdfuse.config import BwdHookConfig
from bwdfuse.errors import ConfigError
from bwdfuse.trainers.facts import Batch, Option, Sharding, TrainerFacts

VERL_FLOOR = "0.9"

#: verl's spellings of the storage formats there are kernels for.
DTYPES = ("bf16", "bfloat16", "fp32", "float32", 32, "32", None)

#: engine.strategy in verl -> how it spreads the model.
SHARDINGS: dict[object, Sharding] = {"fsdp": "fsdp1", "fsdp2": "fsdp2"}


class VerlConfigError(ConfigError):
    """A ConfigError that stays readable where Hydra shows an exception's repr on one line."""

    def __repr__(self) -> str:
        return str(self)


@dataclass
class BwdHookOptimizerConfig(FSDPOptimizerConfig):
    """verl's FSDP optimizer settings for a run whose parameters are stepped inside backward.

    Building it checks everything (verl does so before it loads data and model), names bwdfuse as the optimizer's module
    and registers the engine. It must not be built with ``bwd_hook=False``: verl's own class is right there.

    Args:
        bwd_hook: Must be True.
        nonfinite: What to do with a gradient that is not finite: skip (leave that parameter as it is), raise, or off.
        bwd_hook_facts: Settings outside ``optim`` by their full name.
    """

    bwd_hook: bool = True
    nonfinite: str = "skip"
    bwd_hook_facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.facts = trainer_facts(self, self.bwd_hook_facts)
        # YAML reads a plain `off` as false
        self.hook_config = BwdHookConfig(self.bwd_hook, "off" if self.nonfinite is False else self.nonfinite)
        self._check(self.facts)
        # From here on verl's own code builds our optimizer from these settings. `clip_grad` is None, so an engine that
        # is not ours cannot step with them: its optimizer_step() insists on a number.
        options = {**(self.override_optimizer_config or {}), "nonfinite": self.hook_config.nonfinite}
        self.__dict__.update(optimizer_impl="bwdfuse.optim", override_optimizer_config=options)
        self._install_engine()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arriving in another process, as in verl's Ray trainer, it needs the engine there too."""
        self.__dict__.update(state)
        self._install_engine()

    def check_ranks(self, ranks: int) -> None:
        """Checks again with the data-parallel size that the engine found."""
        batch = self.facts.batch
        assert batch is not None
        self._check(replace(self.facts, batch=replace(batch, ranks=ranks)))

    def _check(self, facts: TrainerFacts) -> None:
        try:
            validate.check(self.hook_config, facts)
        except ConfigError as error:
            raise VerlConfigError(str(error)) from None

    @staticmethod
    def _install_engine() -> None:
        from bwdfuse.trainers import _verl_engine

        _verl_engine.install()


def trainer_facts(optim: FSDPOptimizerConfig, around: dict[str, Any]) -> TrainerFacts:
    """What verl says of this run.

    Args:
        optim: The optimizer's settings.
        around: Settings outside ``optim`` by their full name.
    """

    def option(name: str, *allowed: object) -> Option:
        return Option(name, around.get(name), allowed)

    strategy = option("engine.strategy", "fsdp2", "fsdp")
    compute_dtype = (around.get("engine.mixed_precision") or {}).get("param_dtype")
    reentrant = around.get("model.enable_activation_offload") and around.get("model.enable_gradient_checkpointing")
    overrides = optim.override_optimizer_config or {}
    return TrainerFacts(
        trainer="verl",
        version=verl.__version__,
        version_floor=VERL_FLOOR,
        flag=Option("optim.bwd_hook", getattr(optim, "bwd_hook", True), (True, False)),
        nonfinite=Option("optim.nonfinite", getattr(optim, "nonfinite", "skip")),
        loop=Option("loop", "SFT" if around.get("parent") is None else f"part of {around['parent']}", ("SFT",)),
        device=Option("trainer.device", get_device_name(), ("cpu",)),
        device_reason=native().build_info()["cuda"],
        # the deprecated spelling wins over the other where it is set
        clip_grad=Option("optim.clip_grad" if optim.grad_clip is None else "optim.grad_clip", optim.clip_grad, (None,)),
        dynamic_batch=option("data.use_dynamic_bsz", False),
        batch=Batch(
            micro=option("data.micro_batch_size_per_gpu"),
            ranks=_data_parallel_size(around),
            total=option("data.train_batch_size"),
        ),
        grad_scaler=Option("engine.mixed_precision.param_dtype", compute_dtype, DTYPES),
        param_dtype=option("engine.model_dtype", *DTYPES),
        reentrant_checkpointing=Option("model.enable_activation_offload", bool(reentrant), (False,)),
        strategy=strategy,
        sharding=SHARDINGS.get(strategy.value, "other"),
        orig_params=option("engine.use_orig_params", True),
        offload_policy=option("engine.offload_policy", False, None),
        param_offload=option("engine.param_offload", False, None),
        quantized_training=option("engine.qat.enable", False, None),
        optimizer=Option("optim.optimizer", optim.optimizer, ("AdamW", "Adam")),
        optimizer_impl=Option("optim.optimizer_impl", optim.optimizer_impl, ("bwdfuse.optim", "torch.optim")),
        optimizer_options={key: Option(f"optim.override_optimizer_config.{key}", overrides[key]) for key in overrides},
    )


def _data_parallel_size(around: dict[str, Any]) -> int:
    """Ranks that see different samples; before there is a process group, as the launcher or verl's Ray trainer plan."""
    if torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
    elif "WORLD_SIZE" in os.environ:
        world = int(os.environ["WORLD_SIZE"])
    else:
        world = int(around.get("trainer.nnodes") or 1) * int(around.get("trainer.n_gpus_per_node") or 1)
    return max(1, world // int(around.get("engine.ulysses_sequence_parallel_size") or 1))
