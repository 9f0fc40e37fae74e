"""What stepping one parameter inside backward costs, beside torch's own optimizer-in-backward.

Every case is one backward over many small parameters; the same backward without any optimizer is subtracted, so what is left
is hook, bookkeeping and step. All guards are on, the sum of squares and the version bump among them. Results are compared
before anything is timed. One thread, interleaved with the others, CPU time of the thread; medians.

    python -m benchmarks.bench_hook --json out/hook.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch.distributed.optim import _apply_optimizer_in_backward

import bwdfuse
from benchmarks import _pairs

#: parameters x elements
CASES = {"100x1024": (100, 1024), "1000x1024": (1000, 1024), "300x4096": (300, 4096), "10000x1024": (10000, 1024)}
OPTIONS = {"lr": 1e-3, "weight_decay": 0.01}


class Backward:
    """One backward over `count` parameters, each used once; `close` ends the update."""

    def __init__(self, count: int, size: int, arm: Callable[[list], Callable[[], object]]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(size, generator=generator)) for _ in range(count)]
        self.close = arm(self.params)

    def __call__(self) -> float:
        """Seconds of CPU time of backward and the closing call; building the graph is not timed."""
        loss = torch.stack([(p * 0.5).sum() for p in self.params]).sum()
        start = time.thread_time()
        loss.backward()
        self.close()
        return time.thread_time() - start


def nothing(params: list) -> Callable[[], object]:
    def clear() -> None:
        for p in params:
            p.grad = None

    return clear


def apply_fused(params: list) -> Callable[[], object]:
    _apply_optimizer_in_backward(torch.optim.AdamW, params, {**OPTIONS, "fused": True})
    return lambda: None


def python_hook(params: list) -> Callable[[], object]:
    """The least that Python can do: torch's fused kernel called for one parameter, no guard at all."""
    steps, averages, squares = ([torch.zeros_like(p) for p in params] for _ in range(3))
    for p, step, exp_avg, exp_avg_sq in zip(params, steps, averages, squares, strict=True):
        step = torch.zeros(())

        def hook(p: torch.Tensor, step=step, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq) -> None:
            step += 1
            with torch.no_grad():
                torch._fused_adamw_(
                    [p],
                    [p.grad],
                    [exp_avg],
                    [exp_avg_sq],
                    [],
                    [step],
                    lr=OPTIONS["lr"],
                    beta1=0.9,
                    beta2=0.999,
                    weight_decay=OPTIONS["weight_decay"],
                    eps=1e-8,
                    amsgrad=False,
                    maximize=False,
                )
            p.grad = None

        p.register_post_accumulate_grad_hook(hook)
    return lambda: None


def ours(params: list) -> Callable[[], object]:
    return bwdfuse.AdamW(params, bwd_hook=True, **OPTIONS).step


KINDS = {"nothing": nothing, "apply_fused": apply_fused, "python_hook": python_hook, "bwdfuse": ours}


def check(kinds: dict[str, Backward]) -> None:
    """Three updates of each must leave the same weights, up to two ULP of a weight below 8 (2**-21) an update: torch rounds
    in another order."""
    for _ in range(3):
        for backward in kinds.values():
            backward()
    for name in ("apply_fused", "python_hook"):
        for a, b in zip(kinds[name].params, kinds["bwdfuse"].params, strict=True):
            if not torch.allclose(a, b, rtol=0, atol=6 * 2.0**-21):
                raise SystemExit(f"{name} and bwdfuse differ by {(a - b).abs().max().item():.3g}: nothing was timed")


def measure(name: str, count: int, size: int, rounds: int) -> dict[str, object]:
    """Microseconds that each kind adds to the backward of one parameter, and ours over theirs."""
    kinds = {kind: Backward(count, size, arm) for kind, arm in KINDS.items()}
    check(kinds)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds + 1):
        for kind in sorted(kinds, key=lambda k: (list(kinds).index(k) + turn) % len(kinds)):
            elapsed = kinds[kind]()
            if turn:
                seconds[kind].append(elapsed)
    timings = {kind: _pairs.Timing.of(values) for kind, values in seconds.items()}
    floor = timings["nothing"]["median"]
    cost = {kind: (t["median"] - floor) / count * 1e6 for kind, t in timings.items() if kind != "nothing"}
    print(f"{name:>12}  " + "  ".join(f"{kind} {us:7.2f} µs" for kind, us in cost.items()), file=sys.stderr)
    return {
        "us_per_parameter": cost,
        "us_floor": floor / count * 1e6,
        "ratio_vs_apply_fused": cost["bwdfuse"] / cost["apply_fused"],
        "ratio_vs_python_hook": cost["bwdfuse"] / cost["python_hook"],
        "seconds": timings,
    }


def main() -> None:
    parser = _pairs.arguments(__doc__)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measured = {}
    for name, (count, size) in CASES.items():
        if arguments.only in name:
            measured[name] = measure(name, count, size, max(5, arguments.rounds * 1000 // max(count, 300)))
    keys = ("ratio_vs_apply_fused", "ratio_vs_python_hook", "us_per_parameter")
    result: dict[str, object] = {key: {name: m[key] for name, m in measured.items()} for key in keys}
    for name, value in result["ratio_vs_apply_fused"].items():  # type: ignore[attr-defined]
        print(f"{name:>12}  {value:.3f} of torch's _apply_optimizer_in_backward with AdamW(fused=True)")
    _pairs.report({**result, "cases": measured}, arguments.json)


if __name__ == "__main__":
    main()
