"""The two-minute benchmark behind ``python -m bwdfuse bench``: what is slow to build or to run is named and left out."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import bwdfuse
from bwdfuse.bench import hook, kernel, peers, timing, train
from bwdfuse.bench.titles import TITLES

INSIDE = ["bwdfuse", "apply_fused", "apply_default", "python_hook", "fused_after", "foreach_after"]
INSIDE += ["optimi_release", "flashoptim_release"]
AFTER = ["bwdfuse_after", "fused_after", "foreach_after", "optimi_after", "flashoptim_after"]
TRAIN = ["bwdfuse", "bwdfuse_after", "apply_fused", "optimi_release", "flashoptim_release"]
#: Those that only the commands in benchmarks/ measure.
SLOW = {
    "compile_after": "compiles first",
    "deepspeed_after": "compiles first",
    "deepspeed_hook": "compiles first",
    "lomo": "its cost grows with the square of the number of parameters",
    "adalomo": "its cost grows with the square of the number of parameters",
    "bitsandbytes_8bit": "takes seconds an update",
    "torchao_8bit": "compiles first",
}
FULL = "measured by the commands in benchmarks/ of the source tree"


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    parameters: int = 1000
    elements: int = 1024
    updates: tuple[int, ...] = (1 << 16, 1 << 24)
    shape: train.Shape = train.PLAIN
    tokens: int = 64
    rounds: int = 7


SIZES = Sizes()


def measure(sizes: Sizes, console: Console) -> dict[str, Any]:
    """All figures, checked before they are timed.

    Raises:
        peers.WrongResult: this package's result is wrong.
    """
    with warnings.catch_warnings(), console.status("checking and timing the hook") as status:
        warnings.simplefilter("ignore")  # other packages' own, on import
        for form in ("f32", "bf16"):
            kernel.check(kernel.FORMATS[form])
        found: dict[str, Any] = {"hook": hook.measure(INSIDE, sizes.parameters, sizes.elements, 2 * sizes.rounds)}
        found["kernel"] = {}
        for form, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            for n in sizes.updates:
                status.update(f"timing one {form} parameter of {n:,} elements")
                found["kernel"][f"{form}/{n}"] = kernel.measure_peers(AFTER, n, dtype, sizes.rounds)
        status.update("timing a training step")
        found["train"] = train.measure(*train.plain(torch.float32, sizes.tokens, sizes.shape), TRAIN, sizes.rounds)
    return found


def run(file: Path | None) -> None:
    """Measures, prints a table, writes ``file`` if one is given.

    Raises:
        peers.WrongResult: this package's result is wrong; nothing was timed.
    """
    sizes, console = SIZES, Console(highlight=False)
    threads = torch.get_num_threads(), bwdfuse.get_num_threads()
    kernel.set_threads(1)
    try:
        found = measure(sizes, console)
    finally:
        torch.set_num_threads(threads[0])
        bwdfuse.set_num_threads(threads[1])
    _print(found, sizes, console)
    if file is not None:
        result = {**found, "left_out": left_out(found), "sizes": vars(sizes), "machine": timing.machine()}
        file.write_text(json.dumps(result, indent=2) + "\n")
        console.print(Text(f"figures written to {file}"))


def left_out(found: dict[str, Any]) -> dict[str, str]:
    """Why each optimizer that was not measured was not."""
    reasons = {name: peers.PEERS[name].missing() or f"{why}; {FULL}" for name, why in SLOW.items()}
    for part in (found["hook"], *found["kernel"].values(), found["train"]):
        reasons |= part["left_out"]
    return reasons


def _print(found: dict[str, Any], sizes: Sizes, console: Console) -> None:
    cost = found["hook"]["us_per_parameter"]
    title = f"Stepping one of {sizes.parameters:,} parameters of {sizes.elements:,} fp32 elements"
    console.print(_table(title, "µs", cost, "bwdfuse"))
    for case, part in found["kernel"].items():
        form, n = case.split("/")
        ns = {name: taken["median"] / int(n) * 1e9 for name, taken in part["seconds"].items()}
        console.print(_table(f"One {form} parameter of {int(n):,} elements", "ns an element", ns, "bwdfuse_after"))
    part = found["train"]
    ms = {name: taken["median"] * 1e3 for name, taken in part["seconds"].items()}
    table = _table(f"A training step, {part['parameters'] / 1e6:.0f} million fp32 parameters", "ms", ms, "bwdfuse")
    console.print(table)
    peak = {name: at["above_rest_mib"] for name, at in part["memory"].items()}
    console.print(_table("Its peak of live tensors above rest", "MiB", peak, "bwdfuse"))
    for name, reason in left_out(found).items():
        console.print(Text(f"{name}: {reason}", style="dim"))
    console.print(
        Text(f"one thread, medians of {sizes.rounds} rounds in turn; each result checked before it was timed")
    )


def _table(title: str, unit: str, values: dict[str, float], own: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("optimizer")
    table.add_column(unit, justify="right")
    table.add_column("of ours", justify="right")
    for name, value in sorted(values.items(), key=lambda pair: pair[1]):
        row = (TITLES.get(name, name), f"{value:,.2f}", f"{value / values[own]:.2f}×")
        table.add_row(*row, style="bold" if name == own else None)
    return table
