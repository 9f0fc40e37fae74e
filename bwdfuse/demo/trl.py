"""Runs TRL's own SFT trainer, as a user would: one process for each arm, a script of a few lines (trl_run.py)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from bwdfuse.demo import process
from bwdfuse.demo.arms import Arm, Job, Progress
from bwdfuse.demo.cache import write_json
from bwdfuse.demo.recipe import Recipe
from bwdfuse.memory import Timeline

NAME = "trl"
SHORT: dict[str, dict[str, Any]] = {"smollm2": {"batch": 1, "updates": 48}, "tiny": {"batch": 1, "max_length": 8}}


def adapted(recipe: Recipe) -> Recipe:
    """Fewer tokens in an update, in more updates.

    TRL computes the loss from tiles of logits, one row for each token and 32,768 columns however small the vocabulary
    is; without Triton (on CPU) eight such tiles are alive at once. For SmolLM2 they outgrow the gradients at some 150
    tokens an update and then set the peak alone: measured with 508, stepping inside backward saves 23 MiB of 405.
    """
    return replace(recipe, **SHORT.get(recipe.name, {}))


def version() -> str:
    return importlib.metadata.version("trl")


def train(arm: str, job: Job, folder: Path, progress: Progress) -> Arm:
    """Train one arm in a process of its own and read back what it left in ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "job.json", _orders(arm, job))
    command = [sys.executable, "-m", "bwdfuse.demo.trl_run", str(folder)]
    process.run(NAME, command, _environment(job), folder, progress)
    probe = json.loads((folder / "probe.json").read_text())
    return Arm(
        losses=[json.loads(line)["loss"] for line in (folder / process.METRICS).read_text().splitlines()],
        seconds=probe["seconds"],
        timeline=Timeline.load(folder / "timeline.json"),
        weights=folder / "model",
        optimizer=probe["optimizer"],
        stats=probe["stats"],
        parameters=probe["parameters"],
        gradient_bytes=probe["gradient_bytes"],
        largest_gradient_bytes=probe["largest_gradient_bytes"],
    )


def _orders(arm: str, job: Job) -> dict[str, object]:
    recipe = job.recipe
    return {
        "arm": arm,
        "model": str(job.model),
        "train_file": str(job.train_file),
        "device": job.device,
        "updates": recipe.updates,
        "batch": recipe.batch,
        "max_length": recipe.max_length,
        "lr": recipe.lr,
        "recorded_update": recipe.recorded_update,
    }


def _environment(job: Job) -> dict[str, str]:
    extra = {
        "HF_HUB_OFFLINE": "1",
        "KINETO_LOG_LEVEL": "99",
        "OMP_NUM_THREADS": str(job.threads),
        "OMP_WAIT_POLICY": "passive",  # spinning threads slow each other down by ten where cores are shared
    }
    if job.device == "cuda":  # TRL wants one process for each GPU that it sees
        extra["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {**os.environ, **extra}
