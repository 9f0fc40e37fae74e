"""Runs verl's own SFT trainer, unmodified, as a user would: torchrun, overrides on the command line, nothing else."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
from pathlib import Path

from bwdfuse.demo import process, verl_cpu
from bwdfuse.demo.arms import OFF, ON, STOCK, Arm, Job, Progress
from bwdfuse.memory import Timeline

NAME = "verl"
# Stock verl insists on a threshold, and 0 would scale every gradient to zero. This one never clips: it multiplies by 1.
NO_CLIPPING = "optim.clip_grad=1e9"
# flash-attention is no dependency of ours, and padding is only removed with it.
GPU_OVERRIDES = (
    "trainer.device=cuda",
    "+model.override_config.attn_implementation=sdpa",
    "model.use_remove_padding=False",
)
OPTIMIZER = {
    OFF: ["optim.optimizer_impl=bwdfuse.optim", NO_CLIPPING],
    ON: ["optim.bwd_hook=true", "optim.clip_grad=null"],
    STOCK: [NO_CLIPPING],
}


def version() -> str:
    return importlib.metadata.version("verl")


def train(arm: str, job: Job, folder: Path, progress: Progress) -> Arm:
    """Train one arm in processes of its own and read back what they left in ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    process.run(NAME, _command(arm, job, folder), _environment(arm, job, folder), folder, progress)
    probe = json.loads((folder / "probe.json").read_text())
    metrics = [json.loads(line)["data"] for line in (folder / process.METRICS).read_text().splitlines()]
    timed = [seconds for seconds in probe["seconds"][1:] if seconds is not None]  # the first one warms up
    return Arm(
        losses=[row["train/loss"] for row in metrics if "train/loss" in row],
        seconds=timed,
        timeline=Timeline.load(folder / "timeline.json"),
        weights=folder / "checkpoint" / f"global_step_{job.recipe.updates}" / "huggingface",
        optimizer=probe["optimizer"],
        stats=probe["stats"],
        parameters=probe["parameters"],
        gradient_bytes=probe["gradient_bytes"],
        largest_gradient_bytes=probe["largest_gradient_bytes"],
    )


def _command(arm: str, job: Job, folder: Path) -> list[str]:
    recipe = job.recipe
    return [
        *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--nproc_per_node=1"],
        *["-m", "verl.trainer.sft_trainer"],
        f"model.path={_quoted(job.model)}",
        "model.enable_gradient_checkpointing=true",
        f"data.train_files={_quoted(job.train_file)}",
        f"data.train_batch_size={recipe.batch}",
        f"data.micro_batch_size_per_gpu={recipe.batch}",
        "data.use_dynamic_bsz=false",
        f"data.max_length={recipe.max_length}",
        "data.truncation=right",
        "data.num_workers=0",
        f"optim.lr={recipe.lr}",
        "engine.strategy=fsdp2",
        "trainer.logger=[console,file]",
        "trainer.project_name=bwdfuse-demo",
        f"trainer.experiment_name={arm}",
        f"trainer.default_local_dir={_quoted(folder / 'checkpoint')}",
        "trainer.resume_mode=disable",
        "trainer.total_epochs=1",
        f"trainer.total_training_steps={recipe.updates}",
        "checkpoint.save_contents=[hf_model]",
        f"hydra.run.dir={_quoted(folder / 'hydra')}",
        *(verl_cpu.OVERRIDES if job.device == "cpu" else GPU_OVERRIDES),
        *OPTIMIZER[arm],
    ]


def _quoted(path: Path) -> str:
    """For Hydra's grammar, in which blanks, commas and equal signs mean something."""
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"


def _environment(arm: str, job: Job, folder: Path) -> dict[str, str]:
    extra = {
        "BWDFUSE_PROBE_DIR": str(folder),
        "BWDFUSE_PROBE_UPDATE": str(job.recipe.recorded_update),
        "HF_HUB_OFFLINE": "1",
        "KINETO_LOG_LEVEL": "99",
        "OMP_NUM_THREADS": str(job.threads),
        "OMP_WAIT_POLICY": "passive",  # spinning threads slow each other down by ten where cores are shared
        "VERL_FILE_LOGGER_PATH": str(folder / process.METRICS),
    }
    modules = ["bwdfuse.demo.verl_probe"]
    if job.device == "cpu":
        extra |= verl_cpu.ENVIRONMENT
        modules.insert(0, extra["VERL_USE_EXTERNAL_MODULES"])
    extra["VERL_USE_EXTERNAL_MODULES"] = ",".join(modules)
    # Stock means stock: verl does not even load our plugin there.
    extra["VERL_USE_EXTERNAL_PLUGINS"] = "none" if arm == STOCK else "bwdfuse"
    return {**os.environ, **extra}
