"""Drawings of memory timelines. Uses matplotlib's objects directly: no pyplot, no backend chosen for everybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bwdfuse.memory import Comparison, Timeline

MIB = 1 << 20
INK, FAINT = "#2b2f36", "#8a919c"
REST, GRADS, OFF_LINE, ON_LINE = "#b9c6d8", "#e0803a", "#a23b2a", "#1f6f54"
BANDS = ("#ffffff", "#f4f6f9")
NARROW = 0.08  # a phase below this share of the width gets no label inside it


def draw_one(timeline: Timeline, title: str | None) -> Figure:
    figure = _figure(8.0, 4.6)
    axes = figure.subplots()
    _panel(axes, timeline, OFF_LINE, "peak")
    axes.set_ylabel(_y_label(timeline), color=INK)
    axes.set_ylim(0, max(timeline.above_rest_mib, 1e-6) * 1.22)
    axes.set_title(title or "Live tensor memory", loc="left", fontsize=12, color=INK, pad=26)
    _legend(figure, timeline.log.knows_grads)
    return figure


def draw_two(comparison: Comparison, title: str | None) -> Figure:
    off, on = comparison.off, comparison.on
    figure = _figure(12.0, 5.4)
    left, right = figure.subplots(1, 2, sharey=True)
    _panel(left, off, OFF_LINE, "peak")
    _panel(right, on, ON_LINE, "peak")
    left.set_title("optimizer steps after backward", fontsize=11, color=OFF_LINE, pad=24)
    right.set_title("optimizer steps inside backward", fontsize=11, color=ON_LINE, pad=24)
    left.set_ylabel(_y_label(off), color=INK)
    top = max(off.above_rest_mib, on.above_rest_mib, 1e-6)
    left.set_ylim(0, top * 1.18)
    if comparison.saved_mib > 0.02 * top:
        _saving(right, off, on)
    figure.suptitle(
        title or f"The peak falls by {comparison.saved_mib:,.0f} MiB", fontsize=15, fontweight="bold", color=INK
    )
    _legend(figure, off.log.knows_grads and on.log.knows_grads)
    return figure


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _y_label(timeline: Timeline) -> str:
    return f"MiB above rest\n(at rest: {timeline.rest_mib:,.0f} MiB of tensors)"


def _panel(axes: Axes, timeline: Timeline, colour: str, word: str) -> None:
    log = timeline.log
    seconds = np.append(log.ns, log.end_ns) / 1e9
    live = np.append(log.live, log.live[-1]) / MIB
    axes.fill_between(seconds, live, step="post", color=REST, linewidth=0)
    if log.knows_grads:
        grads = np.append(log.grad, log.grad[-1]) / MIB
        axes.fill_between(seconds, np.minimum(grads, live), step="post", color=GRADS, linewidth=0)
    axes.step(seconds, live, where="post", color=INK, linewidth=0.7)
    axes.set_xlim(0, seconds[-1])
    _phases(axes, timeline)
    at = int(np.argmax(live))
    axes.axhline(live[at], color=colour, linewidth=1.2, linestyle=(0, (5, 3)))
    late = seconds[at] > 0.6 * seconds[-1]
    axes.annotate(
        f"{word} {live[at]:,.0f} MiB", (seconds[at], live[at]), xytext=(-6 if late else 6, 6), color=colour,
        textcoords="offset points", ha="right" if late else "left", fontsize=11, fontweight="bold",
    )  # fmt: skip
    axes.plot([seconds[at]], [live[at]], "o", color=colour, markersize=5)
    axes.set_xlabel("seconds (slowed down by the recording)", color=FAINT)
    axes.tick_params(colors=FAINT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)


def _phases(axes: Axes, timeline: Timeline) -> None:
    across = axes.get_xaxis_transform()
    for index, phase in enumerate(timeline.phases):
        axes.axvspan(phase.start, phase.end, color=BANDS[index % 2], zorder=-2, linewidth=0)
        if index:
            axes.axvline(phase.start, color=FAINT, linewidth=0.8, zorder=-1)
        if phase.end - phase.start < NARROW * timeline.seconds:
            where, side = (phase.end, "right") if phase.end > 0.5 * timeline.seconds else (phase.start, "left")
        else:
            where, side = (phase.start + phase.end) / 2, "center"
        axes.text(where, 1.01, phase.name, transform=across, ha=side, va="bottom", fontsize=9, color=FAINT)


def _saving(axes: Axes, off: Timeline, on: Timeline) -> None:
    """The old peak drawn over the new panel, and the distance between the two."""
    high, low, middle = off.above_rest_mib, on.above_rest_mib, on.seconds * 0.5
    axes.axhline(high, color=OFF_LINE, linewidth=1.2, linestyle=(0, (5, 3)))
    axes.annotate("", (middle, low), xytext=(middle, high), arrowprops={"arrowstyle": "<->", "color": INK, "lw": 1.2})
    axes.text(
        middle + on.seconds * 0.02, (high + low) / 2, f"{high - low:,.0f} MiB saved", fontsize=13, fontweight="bold",
        color=INK, ha="left", va="center",
    )  # fmt: skip


def _legend(figure: Figure, knows_grads: bool) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=GRADS, label="gradients")] if knows_grads else []
    handles.append(
        Patch(
            color=REST, label="activations, gathered weights, temporaries" if knows_grads else "everything above rest"
        )
    )
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=10, labelcolor=INK
    )
