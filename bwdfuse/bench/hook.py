"""What stepping one parameter costs, inside backward or after it. Knows no optimizer by name but this package's.

Every case is one backward over many small parameters, each used once. The same backward without any optimizer is subtracted,
so what is left is hook, bookkeeping and step, all guards of ours on, the sum of squares and the version bump among them. One
thread, its own CPU time, all optimizers in turn, medians.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from bwdfuse.bench import peers, timing

FLOOR = "nothing"


class Backward:
    """One backward over `count` parameters of `size` elements, then the end of the update."""

    def __init__(self, count: int, size: int, peer: peers.Peer | None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model = peers.Bag(torch.randn(size, generator=generator) for _ in range(count))
        self.params = list(self.model.parameters())
        self.end = peer.attach(self.model) if peer else self._drop

    def _drop(self) -> None:
        for param in self.params:
            param.grad = None

    def __call__(self) -> float:
        """Seconds of backward and the end of the update; building the graph is not timed."""
        loss = torch.stack([(p * 0.5).sum() for p in self.params]).sum()
        now = timing.clock(1)
        start = now()
        loss.backward()  # type: ignore[no-untyped-call]
        self.end()
        return now() - start


def measure(names: Iterable[str], count: int, size: int, rounds: int) -> dict[str, Any]:
    """Microseconds that each optimizer adds to the backward of one parameter, and ours over theirs.

    Returns:
        ``us_per_parameter`` by optimizer, ``us_floor`` (backward alone), ``seconds`` (a `Timing` each), ``ratio_vs`` (ours over
        each) and ``left_out`` (why, by name).

    Raises:
        peers.WrongResult: this package's result is wrong.
    """
    found, left_out = peers.usable(names, torch.float32, parameters=count, elements=size)
    runs: dict[str, Backward] = {FLOOR: Backward(count, size, None)}
    runs |= {name: Backward(count, size, peer) for name, peer in found.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for counts, name in timing.turns(runs, rounds):
        elapsed = runs[name]()
        if counts:
            seconds[name].append(elapsed)
    timings = {name: timing.Timing.of(values) for name, values in seconds.items()}
    floor = timings[FLOOR]["median"]
    cost = {name: (t["median"] - floor) / count * 1e6 for name, t in timings.items() if name != FLOOR}
    return {
        "us_per_parameter": cost,
        "us_floor": floor / count * 1e6,
        "ratio_vs": {name: cost["bwdfuse"] / us for name, us in cost.items() if name != "bwdfuse"},
        "seconds": timings,
        "left_out": left_out,
    }
