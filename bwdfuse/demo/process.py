"""Runs a trainer's process, shows how far it is, and ends it with us."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from bwdfuse.demo.arms import DemoError, Progress

TAIL = 25  # lines of the log shown when it fails
METRICS = "metrics.jsonl"  # in the run's folder: one line for each update


def run(name: str, command: list[str], environment: dict[str, str], folder: Path, progress: Progress) -> None:
    """Run ``command``; its output goes to ``folder/log.txt``.

    Raises:
        DemoError: it failed; the end of its log is in the message.
    """
    log, metrics = folder / "log.txt", folder / METRICS
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                time.sleep(0.3)
                progress(_lines(metrics))
        finally:
            if process.poll() is None:  # Ctrl-C here, or an error: a launcher takes its workers along
                process.terminate()
                process.wait()
    progress(_lines(metrics))
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:])
        raise DemoError(f"{name} stopped with exit status {process.returncode}; the end of {log}:\n{tail}")


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
