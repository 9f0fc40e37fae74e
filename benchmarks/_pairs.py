"""Paired timing: what every benchmark here shares.

Two things are compared by running them in turn, many times, and taking medians: whatever else the machine does then
falls on both. One thread is timed by its own CPU time, so that other processes do not count; more by wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
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


def paired(
    cases: Mapping[str, Callable[[], object]],
    rounds: int = 15,
    *,
    calls: int = 1,
    threads: int = 1,
    before: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Times every case once a round, in an order that rotates, after one round that is thrown away.

    Args:
        cases: name -> what to call, already checked for its result.
        rounds: How often each is timed.
        calls: Calls per timing, for what is too short to be timed alone.
        threads: 1: CPU time of this thread. More: wall time.
        before: Called before every timing and not timed, for instance to evict caches.

    Returns:
        name -> Timing, in seconds a call.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        start_at = turn % len(names)
        for name in names[start_at:] + names[:start_at]:
            call = cases[name]
            if before:
                before()
            start = clock()
            for _ in range(calls):
                call()
            elapsed = clock() - start
            if turn:
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


def machine() -> dict[str, object]:
    """What a reader must know to judge the figures: hardware, system, compiler, versions, commit, load."""
    from bwdfuse import _C

    root = str(pathlib.Path(__file__).resolve().parent)
    changed = _first_line("git", "-C", root, "status", "--porcelain", "--untracked-files=no")
    return {
        "cpu": _cpu(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "build": _C.build_info(),
        "isa": _C.isa_info(),
        "versions": {name: _version(name) for name in ("numpy", "torch", "ml_dtypes", "bwdfuse")},
        "commit": _first_line("git", "-C", root, "rev-parse", "HEAD"),
        "uncommitted_changes": changed is not None,
        "load_average": os.getloadavg(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures and the machine there")
    parser.add_argument("--rounds", type=int, default=15, help="timings of each case (default %(default)s)")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    return parser


def report(result: dict[str, object], file: str | None) -> None:
    """Adds the machine to the figures and writes them as JSON, when a file was asked for."""
    if file:
        name = pathlib.Path(sys.argv[0]).stem
        command = ["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]
        result = {**result, "command": command, "machine": machine()}
        pathlib.Path(file).write_text(json.dumps(result, indent=2) + "\n")
