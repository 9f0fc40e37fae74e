"""Draws the measured figures: docs/hook_cost.png from benchmarks/results/bench_hook.json.

python -m benchmarks.plot [--results FOLDER] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bwdfuse.bench.titles import TITLES

CASE = "1000x1024"
ROOT = Path(__file__).resolve().parent.parent


def hook_cost(result: dict, file: Path) -> None:
    """A bar for each optimizer: microseconds that stepping one parameter adds. Logarithmic, since they span a hundredfold."""
    from matplotlib.figure import Figure

    costs = sorted(result["us_per_parameter"][CASE].items(), key=lambda pair: pair[1], reverse=True)
    figure = Figure(figsize=(8, 0.42 * len(costs) + 1.3), layout="constrained")
    axes = figure.subplots()
    colours = ["#1b6ca8" if name == "bwdfuse" else "#b8bcc2" for name, _ in costs]
    bars = axes.barh([TITLES.get(name, name) for name, _ in costs], [us for _, us in costs], color=colours)
    axes.bar_label(bars, [f"{us:.1f}" for _, us in costs], padding=4)
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_xlabel("µs for each parameter of 1,024 fp32 elements, one thread (logarithmic)")
    axes.set_title("What stepping one of 1,000 parameters costs", loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    hook_cost(json.loads((options.results / "bench_hook.json").read_text()), options.out / "hook_cost.png")


if __name__ == "__main__":
    main()
