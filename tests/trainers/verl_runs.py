"""Runs verl's own SFT trainer on this machine: tiny model and data made from scratch, real processes over gloo."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

from bwdfuse.demo import verl_cpu

HERE = Path(__file__).parent
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


def make_model_and_data(folder: Path) -> None:
    """``model``: a Qwen2 of 2 layers with its tokenizer; ``train.parquet``: 64 dialogues of standard-library lines;
    ``val.parquet``: the first 16 of them."""
    import pandas
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    library = Path(sysconfig.get_path("stdlib"))
    text = [(library / name).read_text(encoding="utf-8") for name in ("os.py", "random.py", "ast.py", "argparse.py")]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    bpe.train_from_iterator(text, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    pick = random.Random(0).choice
    lines = [line.strip() for source in text for line in source.splitlines() if 20 < len(line.strip()) < 100]
    rows = [[("user", pick(lines)), ("assistant", pick(lines))] for _ in range(64)]
    messages = [[{"role": role, "content": content} for role, content in row] for row in rows]
    pandas.DataFrame({"messages": messages}).to_parquet(folder / "train.parquet")
    pandas.DataFrame({"messages": messages[:16]}).to_parquet(folder / "val.parquet")


@dataclass(frozen=True)
class Run:
    """One finished run of the trainer.

    Args:
        metrics: What verl logged for each training step, in full precision.
        validation: The losses of its validations.
        folder: Where its checkpoints are.
    """

    name: str
    returncode: int
    log: str
    metrics: list[dict[str, float]]
    validation: list[float]
    folder: Path

    @property
    def announcements(self) -> list[str]:
        return re.findall(r"bwdfuse: optim.bwd_hook=True took effect.*", self.log)

    def checkpoint(self, step: int) -> dict[str, "object"]:
        """Every tensor of model and optimizer after ``step``, this rank's shards, by ``rank/kind/key``."""
        import torch

        tensors: dict[str, object] = {}
        for path in sorted((self.folder / f"global_step_{step}").glob("*.pt")):
            kind, _, rank = path.stem.partition("_world_size_")
            if kind in ("model", "optim"):
                content = torch.load(path, weights_only=False)
                tensors.update(_tensors(content, f"{rank}/{kind}"))
        assert tensors, f"no checkpoint of step {step} in {self.folder}"
        return tensors


def _tensors(node: object, path: str) -> dict[str, object]:
    import torch

    if isinstance(node, dict):
        found: dict[str, object] = {}
        for key, value in node.items():
            found.update(_tensors(value, f"{path}/{key}"))
        return found
    if isinstance(node, torch.Tensor):
        return {path: getattr(node, "_local_tensor", node)}
    return {}


class Trainer:
    """Runs ``verl.trainer.sft_trainer`` with the settings that all runs share, plus those of one run."""

    STEPS = 6
    SECONDS = 150  # 10 to 25 on a quiet machine; a rank that waits for the other waits for ever

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_model_and_data(folder)

    def arguments(self, name: str, ranks: int = 2) -> list[str]:
        return [
            *verl_cpu.OVERRIDES,
            f"model.path={self.folder}/model",
            f"data.train_files={self.folder}/train.parquet",
            f"data.val_files={self.folder}/val.parquet",
            "data.train_batch_size=8",
            f"data.micro_batch_size_per_gpu={8 // ranks}",
            "data.use_dynamic_bsz=False",
            "data.max_length=256",
            "data.num_workers=0",
            "data.ignore_input_ids_mismatch=True",
            "engine.strategy=fsdp2",
            "optim.lr=1e-3",
            "optim.lr_scheduler_type=cosine",
            "optim.lr_warmup_steps=2",
            "trainer.logger=[file]",
            "trainer.project_name=t",
            f"trainer.experiment_name={name}",
            f"trainer.default_local_dir={self.folder}/{name}",
            "trainer.total_epochs=2",
            f"trainer.total_training_steps={self.STEPS}",
            "trainer.save_freq=3",
            "trainer.test_freq=3",
            f"hydra.run.dir={self.folder}/hydra/{name}",
        ]

    def __call__(self, name: str, *overrides: str, ranks: int = 2, modules: tuple[str, ...] = (), **environment) -> Run:
        """Runs the trainer to its end.

        Args:
            overrides: Hydra overrides on top of :meth:`arguments`.
            modules: Modules of this directory that verl imports before it starts.
            environment: Further environment variables.
        """
        command = [*_launcher(ranks), "-m", "verl.trainer.sft_trainer", *self.arguments(name, ranks), *overrides]
        return self.run(name, command, modules, **environment)

    def script(self, name: str, script: str, *overrides: str, ranks: int = 2) -> Run:
        """The same for a script of this directory that takes verl's command line."""
        return self.run(name, [*_launcher(ranks), str(HERE / script), *self.arguments(name, ranks), *overrides])

    def run(self, name: str, command: list[str], modules: tuple[str, ...] = (), **environment: str) -> Run:
        metrics_path = self.folder / f"{name}.jsonl"
        env = {
            **os.environ,
            **verl_cpu.ENVIRONMENT,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "VERL_FILE_LOGGER_PATH": str(metrics_path),
            **environment,
        }
        env["VERL_USE_EXTERNAL_MODULES"] = ",".join([env["VERL_USE_EXTERNAL_MODULES"], *modules])
        began = time.perf_counter()
        output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with subprocess.Popen(command, env=env, cwd=self.folder, **output) as process:
            try:
                log, _ = process.communicate(timeout=self.SECONDS)
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun ends its ranks
                log = process.communicate()[0] + f"\nnot finished after {self.SECONDS} s"
        (self.folder / f"{name}.log").write_text(f"{command}\n{log}\n{time.perf_counter() - began:.1f} s\n")
        logged = []
        if metrics_path.exists():
            logged = [json.loads(line)["data"] for line in metrics_path.read_text().splitlines()]
        metrics = [step for step in logged if "train/loss" in step]
        validation = [step["val/loss"] for step in logged if "val/loss" in step]
        return Run(name, process.returncode, log, metrics, validation, self.folder / name)

    def fork(self, run: Run, step: int, name: str) -> None:
        """Gives the run that will be called ``name`` the checkpoint of ``run`` after ``step`` to resume from."""
        source, target = run.folder / f"global_step_{step}", self.folder / name
        target.mkdir()
        shutil.copytree(source, target / source.name)
        (target / "latest_checkpointed_iteration.txt").write_text(str(step))


def _launcher(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
