"""Loaded inside verl's own process to watch it: times updates, records a memory timeline, notes the optimizer's stats.

Watches only; what verl computes is untouched. verl imports it because ``VERL_USE_EXTERNAL_MODULES`` names it.
Environment: ``BWDFUSE_PROBE_DIR`` is where it writes, ``BWDFUSE_PROBE_UPDATE`` the update (1 for the first) whose
memory it records.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from verl.workers.engine.base import BaseEngine

from bwdfuse.demo.cache import write_json
from bwdfuse.memory import Timeline, timeline


class _Probe:
    def __init__(self, folder: Path, recorded_update: int) -> None:
        self.folder = folder
        self.recorded_update = recorded_update
        self.seconds: list[float] = []

    def update(self, engine: Any, run: Callable[[], Any]) -> Any:
        """Run one update, recorded or timed but never both: recording slows it down."""
        if len(self.seconds) + 1 == self.recorded_update:
            device = next(engine.module.parameters()).device
            with timeline(engine.module, device=device) as recorded, _marked(engine, recorded):
                output = run()
                # verl drops what is left of the gradients as it leaves training mode; here that moment is in sight.
                engine.optimizer_zero_grad()
            recorded.save(self.folder / "timeline.json")
            self.seconds.append(float("nan"))
        else:
            began = time.perf_counter()
            output = run()
            self.seconds.append(time.perf_counter() - began)
        self.report(engine)
        return output

    def report(self, engine: Any) -> None:
        stats = getattr(engine.optimizer, "stats", None)
        params = [p for p in engine.module.parameters() if p.requires_grad]
        sizes = [p.numel() * p.element_size() for p in params]
        doc = {
            "seconds": [None if s != s else s for s in self.seconds],
            "stats": stats() if callable(stats) else None,
            "optimizer": f"{type(engine.optimizer).__module__}.{type(engine.optimizer).__qualname__}",
            "engine": f"{type(engine).__module__}.{type(engine).__qualname__}",
            "parameters": len(params),
            "gradient_bytes": sum(sizes),
            "largest_gradient_bytes": max(sizes),
        }
        write_json(self.folder / "probe.json", doc)


@contextlib.contextmanager
def _marked(engine: Any, recorded: Timeline) -> Iterator[None]:
    """Mark where backward and the optimizer's step begin, by standing in front of both for one update."""
    backward, step = torch.Tensor.backward, engine.optimizer_step

    @functools.wraps(backward)
    def marked_backward(*args: Any, **kwargs: Any) -> None:
        recorded.mark("backward")
        backward(*args, **kwargs)

    def marked_step() -> Any:
        recorded.mark("step")
        return step()

    torch.Tensor.backward = marked_backward  # type: ignore[method-assign]
    engine.optimizer_step = marked_step
    recorded.mark("forward")
    try:
        yield
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
        del engine.optimizer_step


def _install() -> None:
    probe = _Probe(Path(os.environ["BWDFUSE_PROBE_DIR"]), int(os.environ["BWDFUSE_PROBE_UPDATE"]))
    train_batch = BaseEngine.train_batch

    @functools.wraps(train_batch)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        return probe.update(self, lambda: train_batch(self, *args, **kwargs))

    BaseEngine.train_batch = watched  # type: ignore[method-assign]


_install()
