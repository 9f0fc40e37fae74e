"""What the demo puts on the terminal: lines of progress, bars while training, one table at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from bwdfuse.demo.arms import OFF, ON, STOCK, Progress


class Screen:
    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(highlight=False)

    def say(self, text: str) -> None:
        self.console.print(f"[dim]· {text}[/dim]")

    @contextlib.contextmanager
    def training(self, title: str, updates: int) -> Iterator[Progress]:
        """A bar on a terminal; in a log one line when done."""
        from tqdm import tqdm

        with tqdm(total=updates, desc=title, unit="update", dynamic_ncols=True, disable=None) as bar:
            began, shown = time.perf_counter(), 0

            def progress(done: int) -> None:
                nonlocal shown
                if done > shown:
                    bar.update(done - shown)
                    shown = done

            yield progress
        if bar.disable:
            self.say(f"{title}: {shown} updates in {time.perf_counter() - began:.0f} s")

    def table(self, report: dict[str, Any]) -> None:
        from rich.table import Table

        title = (
            f"{report['model']} in {report['trainer']} on {report['device']}: "
            f"{report['updates']} updates, {report['parameters']} parameters"
        )
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("", no_wrap=True)
        for heading in ("flag off", "flag on", "torch.optim"):
            table.add_column(heading, justify="right", no_wrap=True)
        for label, *cells in rows(report):
            table.add_row(label, *cells)
        self.console.print(table)
        self._samples(report["samples"])

    def _samples(self, samples: list[dict[str, str]]) -> None:
        for sample in samples:
            self.console.print(sample["question"].splitlines()[-1], style="bold", markup=False, soft_wrap=True)
            for when in ("before", "after", "reference"):
                text = " ".join(sample[when].split()) or "(nothing)"
                self.console.print(f"  {when:>9}: ", end="", style="dim")
                self.console.print(text, markup=False)


def rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table's rows: a label and one cell for flag off, flag on and stock."""
    arms = (OFF, ON, STOCK)

    def each(key: str, form: str) -> list[str]:
        return [format(report[f"{key}_{arm}"], form) for arm in arms]

    losses = [report[f"losses_{arm}"] for arm in arms]
    before, after, stock = (report[f"eval_loss_{when}"] for when in ("before", "after", "after_stock"))
    same = after if report["weights_max_abs_diff"] == 0.0 else float("nan")  # equal weights have equal losses
    return [
        # The mean: each batch is seen once, and batches differ more than training moves the loss.
        ("training loss, mean", *(f"{sum(loss) / len(loss):.4f}" for loss in losses)),
        ("held-out loss", *(f"{before:.2f} -> {loss:.2f}" for loss in (same, after, stock))),
        ("peak above rest, MiB", *each("peak_mib", ",.1f")),
        ("gradients alive, MiB", *each("peak_gradient_mib", ",.1f")),
        ("gradient memory freed, MiB", "", f"{report['saved_mib']:,.1f}", ""),
        ("seconds per step", *each("seconds_per_step", ".2f")),
        ("parameter steps in C", "", f"{report['native_steps']:,}", ""),
        ("largest weight distance", f"{report['weights_max_abs_diff']:g}", "-",
         f"{report['weights_max_abs_diff_stock']:.2g}"),
    ]  # fmt: skip
