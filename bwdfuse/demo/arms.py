"""What every trainer module gives back, so that the rest of the demo need not know which trainer ran.

A trainer module (verl.py; one per trainer) has ``NAME``, ``version() -> str`` and
``train(arm, job, folder, progress) -> Arm``; where it needs another recipe than the others, also
``adapted(recipe) -> Recipe`` for the training.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bwdfuse.demo.recipe import Recipe
from bwdfuse.memory import Timeline

OFF, ON, STOCK = "off", "on", "stock"
ARMS = {
    OFF: "bwdfuse, stepping after backward",
    ON: "bwdfuse, stepping inside backward",
    STOCK: "torch.optim.AdamW",
}


class DemoError(RuntimeError):
    """The demo could not run, or one of its claims does not hold. The text is for the reader of a terminal."""


@dataclass(frozen=True)
class Job:
    """What to train: the same for every arm."""

    recipe: Recipe
    model: Path  # a plain folder of transformers
    train_file: Path  # parquet with a column "messages"
    device: str  # "cpu" or "cuda"
    threads: int


@dataclass(frozen=True)
class Arm:
    """One finished training run."""

    losses: list[float]
    seconds: list[float]  # of the updates that were timed
    timeline: Timeline
    weights: Path  # a plain folder of transformers
    optimizer: str  # the class that was really used
    stats: dict[str, Any] | None  # what our optimizer counted
    parameters: int
    gradient_bytes: int
    largest_gradient_bytes: int

    @property
    def seconds_per_step(self) -> float:
        return statistics.median(self.seconds)


Progress = Callable[[int], None]  # told how many updates are done
