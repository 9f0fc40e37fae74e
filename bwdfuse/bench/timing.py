"""Paired timing and the machine it was done on: what every benchmark shares. Knows no optimizer.

Two things are compared by running them in turn, many times, and taking medians: whatever else the machine does then
falls on both. One thread is timed by its own CPU time, so that other processes do not count; more by wall time.
"""

from __future__ import annotations

import gc
import os
import pathlib
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata


class Timing(dict):
    """Seconds a call: ``median``, quartiles ``low`` and ``high``, ``min``, ``max``, and ``rounds``. JSON as it is."""

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        ordered = sorted(seconds)
        return cls(
            median=statistics.median(ordered),
            low=ordered[len(ordered) // 4],
            high=ordered[(3 * len(ordered)) // 4],
            min=ordered[0],
            max=ordered[-1],
            rounds=len(ordered),
        )


def clock(threads: int) -> Callable[[], float]:
    """CPU time of this thread when there is one, else wall time."""
    return time.thread_time if threads == 1 else time.perf_counter


def turns(names: Iterable[str], rounds: int) -> Iterator[tuple[bool, str]]:
    """Every name once a round, in an order that rotates: (whether it counts, name). The first round is thrown away.

    Python's collector runs between rounds and not inside a timing.
    """
    order = list(names)
    enabled = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds + 1):
            gc.collect()
            start_at = turn % len(order)
            for name in order[start_at:] + order[:start_at]:
                yield turn > 0, name
    finally:
        if enabled:
            gc.enable()


def paired(
    cases: Mapping[str, Callable[[], object]], rounds: int = 15, *, calls: int = 1, threads: int = 1
) -> dict[str, Timing]:
    """Times every case once a round.

    Args:
        cases: name -> what to call, already checked for its result.
        rounds: How often each is timed.
        calls: Calls per timing, for what is too short to be timed alone.
        threads: How many the cases use.

    Returns:
        name -> Timing, in seconds a call.
    """
    now = clock(threads)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for counts, name in turns(cases, rounds):
        call = cases[name]
        start = now()
        for _ in range(calls):
            call()
        elapsed = now() - start
        if counts:
            seconds[name].append(elapsed / calls)
    return {name: Timing.of(values) for name, values in seconds.items()}


def ratio(timings: Mapping[str, Timing], of: str, to: str) -> float:
    """Median time of one case over that of another: below 1 is faster."""
    return timings[of]["median"] / timings[to]["median"]


def _first_line(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def _cpu() -> dict[str, object]:
    model, caches = platform.processor(), {}
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    for index in sorted(pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        caches[f"L{level} {kind.lower()}"] = size
    return {"model": model, "cpus": os.cpu_count(), "caches": caches}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


#: Packages whose version a reader must know: what is measured and what it runs on.
PACKAGES = (
    "bwdfuse",
    "torch",
    "numpy",
    "ml_dtypes",
    "transformers",
    "torch-optimi",
    "flashoptim",
    "deepspeed",
    "lomo-optim",
    "bitsandbytes",
    "torchao",
)


def machine() -> dict[str, object]:
    """What a reader must know to judge the figures: hardware, system, compiler, versions, commit, load."""
    from bwdfuse import _C

    # Of the checkout that this module lies in; an installed copy has none.
    root = pathlib.Path(__file__).resolve().parent.parent.parent
    inside = (root / ".git").exists()
    changed = inside and _first_line("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return {
        "cpu": _cpu(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "build": _C.build_info(),
        "isa": _C.isa_info(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "huge_pages_for_tensors": os.environ.get("THP_MEM_ALLOC_ENABLE") == "1",
        "commit": _first_line("git", "-C", str(root), "rev-parse", "HEAD") if inside else None,
        "uncommitted_changes": bool(changed),
        "load_average": os.getloadavg(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
