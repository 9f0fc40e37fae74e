"""Live tensor memory over one stretch of training, taken from the allocator's own events.

Knows torch's profiler and nothing of optimizers or trainers. Allocator events are the one source that sees everything:
FSDP2 resizes storages in place, which a dispatch mode misses, and a process's resident set says nothing of tensors.

    with bwdfuse.memory.timeline(model) as t:
        t.mark("forward")
        loss = model(**batch).loss
        t.mark("backward")
        loss.backward()
        t.mark("step")
        opt.step(); opt.zero_grad()
    print(t); t.plot("memory.png")

Start it where no gradient is alive, after at least one update (so that the optimizer's state counts as being at rest).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bwdfuse.errors import BwdFuseError

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

__all__ = ["Comparison", "Phase", "Timeline", "compare", "live_tensor_bytes", "timeline"]

MIB = 1 << 20
_FORMAT = 1  # of the saved file
_PHASE = "bwdfuse.phase."
_GRAD = "bwdfuse.grad."


class Phase(NamedTuple):
    """A marked stretch of a timeline: seconds from its start, and the peak above rest inside it."""

    name: str
    start: float
    end: float
    peak_mib: float


@dataclass(frozen=True)
class _Log:
    """What was recorded: one entry per allocator event, in the order they happened."""

    ns: np.ndarray  # since the timeline began
    live: np.ndarray  # bytes above rest after the event
    grad: np.ndarray  # bytes of gradients alive after the event
    grads: np.ndarray  # number of gradient buffers alive after the event
    marks: tuple[tuple[int, str], ...]
    end_ns: int
    rest: int
    knows_grads: bool


class Timeline:
    """Live bytes over time. Made by `timeline`; figures are there once its ``with`` block is left."""

    def __init__(self, log: _Log | None = None) -> None:
        self._log = log
        self._marking = False

    def mark(self, name: str) -> None:
        """Begin a phase: what happens from here to the next mark (or to the end) belongs to ``name``."""
        if not self._marking:
            raise BwdFuseError(f'mark("{name}") belongs inside the with block of bwdfuse.memory.timeline()')
        from torch.profiler import record_function

        # A profiler event rather than a clock reading, so that it stands in order among the allocator's events.
        with record_function(_PHASE + name):
            pass

    @property
    def log(self) -> _Log:
        if self._log is None:
            raise BwdFuseError(
                "the timeline has no figures yet: leave the with block of bwdfuse.memory.timeline() first"
            )
        return self._log

    @property
    def rest_mib(self) -> float:
        """Tensors alive when the timeline began: parameters and optimizer state, when it is begun after an update."""
        return self.log.rest / MIB

    @property
    def above_rest_bytes(self) -> int:
        """Peak of what was allocated since the beginning and not yet freed, to the byte."""
        return max(0, int(self.log.live.max(initial=0)))

    @property
    def above_rest_mib(self) -> float:
        return self.above_rest_bytes / MIB

    @property
    def peak_mib(self) -> float:
        """Rest and peak above it together."""
        return self.rest_mib + self.above_rest_mib

    @property
    def end_mib(self) -> float:
        """What is left above rest at the end: anything here was kept by somebody."""
        return int(self.log.live[-1]) / MIB if len(self.log.live) else 0.0

    @property
    def peak_grad_mib(self) -> float:
        """Peak of the gradients alive. Needs the model: ``timeline(model)``."""
        return int(self._with_grads().grad.max(initial=0)) / MIB

    @property
    def peak_grads(self) -> int:
        """The most gradient buffers alive at one time. Needs the model: ``timeline(model)``."""
        return int(self._with_grads().grads.max(initial=0))

    @property
    def seconds(self) -> float:
        return self.log.end_ns / 1e9

    @property
    def phases(self) -> tuple[Phase, ...]:
        log, found = self.log, []
        ends = [ns for ns, _ in log.marks[1:]] + [log.end_ns]
        for (start, name), end in zip(log.marks, ends, strict=True):
            found.append(Phase(name, start / 1e9, end / 1e9, self._peak_between(start, end) / MIB))
        return tuple(found)

    def plot(self, path: str | os.PathLike[str] | None = None, *, title: str | None = None) -> Figure:
        """Draw the timeline; with ``path`` also write it (the suffix decides the format)."""
        from bwdfuse._memory_plot import draw_one

        return _write(draw_one(self, title), path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as JSON, for `load` in another process."""
        log = self.log
        doc: dict[str, Any] = {"format": _FORMAT, "marks": log.marks, "end_ns": log.end_ns, "rest": log.rest}
        doc["knows_grads"] = log.knows_grads
        doc |= {name: getattr(log, name).tolist() for name in ("ns", "live", "grad", "grads")}
        Path(path).write_text(json.dumps(doc, separators=(",", ":")))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Timeline:
        doc = json.loads(Path(path).read_text())
        if doc.get("format") != _FORMAT:
            raise BwdFuseError(f"{path} is no timeline of format {_FORMAT} (it says {doc.get('format')!r})")
        columns = {name: np.asarray(doc[name], dtype=np.int64) for name in ("ns", "live", "grad", "grads")}
        marks = tuple((int(ns), str(name)) for ns, name in doc["marks"])
        return cls(_Log(**columns, marks=marks, end_ns=doc["end_ns"], rest=doc["rest"], knows_grads=doc["knows_grads"]))

    def __repr__(self) -> str:
        if self._log is None:
            return "Timeline(recording)" if self._marking else "Timeline(nothing recorded)"
        text = f"Timeline: {self.rest_mib:,.1f} MiB at rest, peak {self.above_rest_mib:,.1f} above"
        if self.phases:
            text += f" ({max(self.phases, key=lambda phase: phase.peak_mib).name})"
        if self.log.knows_grads:
            text += f", gradients at most {self.peak_grad_mib:,.1f} MiB ({self.peak_grads} at once)"
        return text

    def _repr_png_(self) -> bytes | None:
        return None if self._log is None else _png(lambda: self.plot())

    def _with_grads(self) -> _Log:
        if not self.log.knows_grads:
            raise BwdFuseError("gradients were not followed: give the model, bwdfuse.memory.timeline(model)")
        return self.log

    def _peak_between(self, start: int, end: int) -> int:
        first, last = np.searchsorted(self.log.ns, [start, end])
        entry = int(self.log.live[first - 1]) if first else 0
        return max(entry, int(self.log.live[first:last].max(initial=entry)))


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two timelines of the same work: stepping after backward (``off``) and inside it (``on``)."""

    off: Timeline
    on: Timeline

    @property
    def saved_mib(self) -> float:
        """How much lower the peak above rest is. Negative when it is higher."""
        return self.off.above_rest_mib - self.on.above_rest_mib

    def plot(self, path: str | os.PathLike[str] | None = None, *, title: str | None = None) -> Figure:
        """Draw both side by side on one scale; with ``path`` also write it."""
        from bwdfuse._memory_plot import draw_two

        return _write(draw_two(self, title), path)

    def __repr__(self) -> str:
        off, on = self.off, self.on
        text = f"peak above rest {off.above_rest_mib:,.1f} -> {on.above_rest_mib:,.1f} MiB: {self.saved_mib:,.1f} saved"
        if off.log.knows_grads and on.log.knows_grads:
            text += f"; gradients alive at most {off.peak_grad_mib:,.1f} -> {on.peak_grad_mib:,.1f} MiB"
        return text

    def _repr_png_(self) -> bytes | None:
        return _png(lambda: self.plot())


def compare(off: Timeline, on: Timeline) -> Comparison:
    """Set the timeline of stepping after backward beside the one of stepping inside it."""
    return Comparison(off, on)


@contextlib.contextmanager
def timeline(
    model: torch.nn.Module | Iterable[torch.nn.Parameter] | None = None, *, device: str | torch.device = "cpu"
) -> Iterator[Timeline]:
    """Record live tensor memory inside a ``with`` block.

    Args:
        model: whose gradients to follow (a module, or parameters). Without it `Timeline.peak_grad_mib` is unknown.
        device: whose memory to record, ``"cpu"`` or ``"cuda"``.

    On CPU only blocks born inside the block of code are counted: torch does not tell the size of a block that was
    allocated before its profiler began. So do not start it while gradients are alive that will be freed inside.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    if torch.autograd._profiler_enabled():
        # torch would not complain; both profilers would come out empty.
        raise BwdFuseError("another torch profiler is running; a memory timeline cannot be recorded inside it")
    where = torch.device(device)
    params = [] if model is None else _trainable(model)
    gc.collect()  # garbage that dies inside would be seen on some runs and not on others
    rest = live_tensor_bytes(where)
    result, sighted = Timeline(), _Sightings()
    result._marking = True
    with (
        sighted.watching(params),
        _quiet_kineto(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiler,
    ):
        began = time.time_ns()
        try:
            yield result
        finally:
            result._marking = False
            ended = time.time_ns()
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    entries = _flatten(tree, where.type)
    result._log = _replay(
        entries, sighted.buffers, (began, ended), rest, knows_grads=model is not None, sized=where.type != "cpu"
    )


def live_tensor_bytes(device: str | torch.device = "cpu") -> int:
    """Bytes of every tensor that Python can see on a device, each storage once."""
    import torch

    where = torch.device(device)
    if where.type == "cuda":
        return torch.cuda.memory_allocated(where)
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # type(), since isinstance asks proxies for their __class__
            found = _storage_of(thing)
            if found is not None and thing.device.type == where.type:
                sizes[found[0]] = max(found[1], sizes.get(found[0], 0))
    return sum(sizes.values())


class _Sightings:
    """Gradient buffers, noted where autograd hands them over, in the order in which it does."""

    def __init__(self) -> None:
        self.buffers: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def watching(self, params: list[torch.nn.Parameter]) -> Iterator[None]:
        handles = []
        try:
            for param in params:
                handles.append(param.register_post_accumulate_grad_hook(self._see))
                _move_last_hook_first(param)
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, param: torch.Tensor) -> None:
        from torch.profiler import record_function

        found = None if param.grad is None else _storage_of(getattr(param.grad, "_local_tensor", param.grad))
        if found is not None:
            with record_function(f"{_GRAD}{len(self.buffers)}"):
                self.buffers.append(found)


def _move_last_hook_first(param: torch.Tensor) -> None:
    """A hook that steps the optimizer frees the gradient, so ours must run before it.

    The dict is emptied and refilled: autograd walks it as a plain dict, which ``move_to_end`` does not reorder.
    """
    hooks = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    items = list(hooks.items())
    hooks.clear()
    hooks.update([items[-1], *items[:-1]])


def _trainable(model: torch.nn.Module | Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    params = model.parameters() if hasattr(model, "parameters") else model
    return [param for param in params if param.requires_grad]


def _storage_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Address and bytes of a tensor's memory; None where it has none of its own (wrappers, meta, sparse, fake)."""
    try:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        return None
    return (address, storage.nbytes()) if address else None


class _Entry(NamedTuple):
    ns: int
    kind: str  # "memory", or a phase or gradient label
    address: int = 0
    size: int = 0


def _flatten(tree: list[Any], device_type: str) -> list[_Entry]:
    """The profiler's event tree as one list in time: memory events of the device, and our own labels."""
    from torch._C._profiler import _EventType

    entries, todo = [], tree[::-1]
    while todo:  # depth first and oldest first, so that entries of the same nanosecond keep their order
        event = todo.pop()
        todo.extend(reversed(event.children))
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            if fields.device.type == device_type:
                entries.append(_Entry(event.start_time_ns, "memory", fields.ptr, fields.alloc_size))
        elif event.name.startswith((_PHASE, _GRAD)):
            entries.append(_Entry(event.start_time_ns, event.name))
    entries.sort(key=lambda entry: entry.ns)
    return entries


def _replay(
    entries: list[_Entry],
    buffers: list[tuple[int, int]],
    span: tuple[int, int],
    rest: int,
    *,
    knows_grads: bool,
    sized: bool,
) -> _Log:
    """Walk the entries once, keeping the blocks alive and which of them hold gradients.

    ``sized``: the allocator itself knows the size of what it frees (CUDA's does, the CPU's does not).
    """
    began = min(span[0], entries[0].ns) if entries else span[0]
    births: dict[int, tuple[int, int]] = {}  # address -> (size, index of the row where it was born)
    held: dict[int, tuple[int, int]] = {}  # the same, of gradients
    lives: list[tuple[int, int, int]] = []  # of gradients: size, row of birth, row of death
    ns, live, marks, total = [0], [0], [], 0
    for entry in entries:
        if entry.kind.startswith(_PHASE):
            marks.append((entry.ns - began, entry.kind[len(_PHASE) :]))
            continue
        if entry.kind.startswith(_GRAD):
            address, size = buffers[int(entry.kind[len(_GRAD) :])]
            held.setdefault(address, births.get(address, (size, len(live) - 1)))
            continue
        if entry.size > 0:
            births[entry.address] = (entry.size, len(live))
        elif births.pop(entry.address, None) is None and not sized:
            continue  # born before us: the size would be that of another block, from an earlier profile
        total += entry.size
        ns.append(entry.ns - began)
        live.append(total)
        if entry.size < 0 and entry.address in held:
            lives.append((*held.pop(entry.address), len(live) - 1))
    lives += [(size, born, len(live)) for size, born in held.values()]
    change, count = np.zeros(len(live) + 1, np.int64), np.zeros(len(live) + 1, np.int64)
    for size, born, died in lives:
        change[born] += size
        change[died] -= size
        count[born] += 1
        count[died] -= 1
    end = max(span[1] - began, ns[-1])
    columns = np.asarray(ns, np.int64), np.asarray(live, np.int64), np.cumsum(change)[:-1], np.cumsum(count)[:-1]
    return _Log(*columns, marks=tuple(marks), end_ns=end, rest=rest, knows_grads=knows_grads)


@contextlib.contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep the profiler's own two lines off stderr; the level is read once, when the profiler is first used."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "99"
    try:
        yield
    finally:
        del os.environ[name]


def _write(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    if path is not None:
        figure.savefig(path)
    return figure


def _png(draw: Any) -> bytes | None:
    """For notebooks: the picture, or None (the text is shown then) where matplotlib is missing."""
    import io

    try:
        figure = draw()
    except ImportError:
        return None
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
