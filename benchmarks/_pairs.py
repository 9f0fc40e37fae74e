"""What the commands here share: their options, and the file they write. The measuring is in bwdfuse/bench."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

from bwdfuse.bench.timing import machine


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures and the machine there")
    parser.add_argument("--rounds", type=int, default=15, help="timings of each case (default %(default)s)")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--no-peers", action="store_true", help="only torch and this package")
    return parser


def report(result: dict[str, object], file: str | None) -> None:
    """Adds the machine to the figures and writes them as JSON, when a file was asked for."""
    if file:
        name = pathlib.Path(sys.argv[0]).stem
        command = ["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]
        result = {**result, "command": command, "machine": machine()}
        pathlib.Path(file).write_text(json.dumps(result, indent=2) + "\n")
