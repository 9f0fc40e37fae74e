"""``python -m bwdfuse doctor | estimate | demo | bench``."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Annotated

try:
    import rich  # noqa: F401
    import typer
except ImportError as error:
    sys.exit(
        f"python -m bwdfuse needs typer and rich ({error}): pip install typer rich. bwdfuse.show() in Python needs neither."
    )

app = typer.Typer(
    help="bwdfuse steps the optimizer inside backward.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
NOTHING = {
    "lora": "with LoRA only the adapter trains; its gradients are a few MiB.",
    "ddp": "DistributedDataParallel keeps all gradients in its buckets, and bwdfuse refuses it; use FSDP2.",
}


@app.command()
def doctor() -> None:
    """Say what this installation can do, and why not more."""
    from bwdfuse.report import build_info, show

    show()
    if not build_info()["native"]["available"]:
        raise typer.Exit(1)


@app.command()
def estimate(
    what: Annotated[
        str, typer.Argument(help="A model folder with a config.json, or a parameter count such as 135M or 7B.")
    ],
    dtype: Annotated[str, typer.Option(help="Of the gradients: fp32 (verl's default) or bf16.")] = "fp32",
    ranks: Annotated[int, typer.Option(min=1, help="Over how many ranks FSDP shards them.")] = 1,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="Gradients are freed by FSDP group rather than one by one.")
    ] = False,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences of a micro-batch, to count peaks.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence, to count peaks.")] = None,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="With gradient checkpointing.")] = False,
    lora: Annotated[bool, typer.Option("--lora", help="Only a LoRA adapter trains.")] = False,
    ddp: Annotated[bool, typer.Option("--ddp", help="The trainer uses DistributedDataParallel.")] = False,
) -> None:
    """Say how much gradient memory a model would free, and whether that lowers the peak."""
    from rich.console import Console

    from bwdfuse import estimate as rooms
    from bwdfuse.errors import BwdFuseError

    nothing = NOTHING["lora"] if lora else NOTHING["ddp"] if ddp else None
    count = _count(what)
    try:
        if (batch is None) != (seq is None):
            raise BwdFuseError("--batch and --seq belong together: give both or neither")
        if count is None:
            found = rooms.from_folder(
                what,
                dtype=dtype,
                ranks=ranks,
                fsdp=fsdp,
                batch=batch,
                seq=seq,
                checkpointing=checkpointing,
                nothing=nothing,
            )
        elif batch or seq:
            raise BwdFuseError("counting peaks (--batch, --seq) needs a model folder, not a parameter count")
        else:
            found = rooms.from_count(count, dtype=dtype, ranks=ranks, nothing=nothing)
    except BwdFuseError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    console = Console(highlight=False)
    for label, text in _figures(found, ranks):
        console.print(f"{label:<36}{text:>16}")
    console.print(found.verdict, style="bold")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where report.json and memory.png go.")] = Path("out/demo"),
    trainer: Annotated[str, typer.Option(help="Which trainer to run.")] = "verl",
    recipe: Annotated[str, typer.Option(help="smollm2 (the real one) or tiny (a test of the way there).")] = "smollm2",
) -> None:
    """Fine-tune a real model three times, off, on and with torch's optimizer, and check every claim."""
    from bwdfuse.demo.arms import DemoError

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that the trainer's processes end too
    try:
        from bwdfuse.demo.run import run

        run(out, trainer=trainer, recipe=recipe)
    except DemoError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


@app.command()
def bench(
    json: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures and the machine to this file.")
    ] = None,
) -> None:
    """Measure hook, step and a small training run beside every other optimizer that is installed; two minutes."""
    from bwdfuse.errors import BwdFuseError

    if json is not None and (json.is_dir() or not json.parent.is_dir()):
        typer.echo(f"--json {json}: not a file that can be written; give a file in a folder that exists", err=True)
        raise typer.Exit(2)
    try:
        import torch  # noqa: F401
    except ImportError as error:
        typer.echo(f"bench compares with torch's optimizers and needs torch ({error}): pip install torch", err=True)
        raise typer.Exit(1) from None
    try:
        from bwdfuse.bench import quick

        quick.run(json)
    except BwdFuseError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _count(text: str) -> int | None:
    """The number that 135M, 7b, 1.5B or 1_000_000 means; None for anything else."""
    found = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)([kmbt]?)", text.strip().lower())
    return int(float(found[1].replace("_", "")) * SUFFIX[found[2]]) if found else None


def _figures(found, ranks: int) -> list[tuple[str, str]]:
    where = " on each rank" if ranks > 1 else ""
    figures = [("parameters", f"{found.parameters:,}"), (f"gradients{where}", f"{found.gradients:,.1f} MiB")]
    if found.largest:
        figures.append((f"largest kept alive ({found.unit})", f"{found.largest:,.1f} MiB"))
    figures.append(("most that can be saved", f"{found.ceiling:,.1f} MiB"))
    if found.peaks is not None:
        off, on = found.peaks
        figures.append(("peak above rest, after backward", f"{off:,.1f} MiB"))
        figures.append(("peak above rest, inside backward", f"{on:,.1f} MiB"))
    return figures


if __name__ == "__main__":
    app(prog_name="python -m bwdfuse")
