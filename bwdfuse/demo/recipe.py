"""What a demo run trains: one frozen set of numbers, the same for every arm and every trainer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    name: str
    title: str
    model: str  # "smollm2" or "tiny", see model.py
    updates: int
    batch: int  # conversations per update, one micro-batch
    max_length: int  # tokens per conversation
    lr: float
    conversations: int  # packed for training
    held_out: int  # questions of the evaluation loss
    recorded_update: int  # whose memory is recorded; the first one still allocates optimizer state
    min_eval_drop: float | None  # claimed, so checked
    threads: int | None = None  # None: every core

    def __post_init__(self) -> None:
        if not 1 < self.recorded_update < self.updates or self.conversations < self.updates * self.batch:
            raise ValueError(
                f"recipe {self.name}: record an update after the first and before the last, and pack enough data"
            )


_ALL = (
    Recipe(
        name="smollm2", title="SmolLM2-135M", model="smollm2", updates=16, batch=4, max_length=128, lr=1e-4, conversations=96,
        held_out=48, recorded_update=4, min_eval_drop=0.5,
    ),
    Recipe(
        name="tiny", title="a tiny Llama", model="tiny", updates=4, batch=2, max_length=48, lr=1e-3, conversations=16,
        held_out=4, recorded_update=3, min_eval_drop=None, threads=1,
    ),
)  # fmt: skip
RECIPES = {recipe.name: recipe for recipe in _ALL}
