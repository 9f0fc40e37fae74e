"""Says before a run what stepping inside backward can save, and plainly when it saves nothing.

With batch and seq it runs one forward and backward of the model on meta tensors, which take neither memory nor time,
and counts what would be alive. FSDP's unsharded copies and the optimizer's own temporaries are not in the count.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bwdfuse.errors import BwdFuseError

MIB = 1 << 20
DTYPE_BYTES = {"fp32": 4, "bf16": 2}
NOTHING_SHARE = 0.02  # of the gradients: less than this is called nothing


@dataclass(frozen=True)
class Estimate:
    """MiB on each rank."""

    parameters: int
    gradients: float
    largest: float  # freed together: one gradient, or those of one FSDP group
    unit: str
    peaks: tuple[float, float] | None  # above rest, stepping after backward and inside it; None: not asked for
    reason_for_nothing: str | None

    @property
    def ceiling(self) -> float:
        """The most that can be saved: all gradients but the one at hand."""
        return 0.0 if self.reason_for_nothing else self.gradients - self.largest

    @property
    def saved(self) -> float | None:
        """What the peak falls by; None where no batch was given."""
        if self.peaks is None:
            return None
        return 0.0 if self.reason_for_nothing else self.peaks[0] - self.peaks[1]

    @property
    def verdict(self) -> str:
        least = NOTHING_SHARE * self.gradients
        if self.reason_for_nothing:
            return f"Nothing is gained: {self.reason_for_nothing}"
        if self.ceiling < least:
            return f"Nothing is gained: {self.unit} holds nearly all gradients and stays alive anyway."
        if self.saved is None:
            return (
                f"Up to {self.ceiling:,.0f} MiB are saved; less where activations set the peak: give --batch and --seq."
            )
        if self.saved < least:
            return (
                "Nothing is gained: activations set the peak, not gradients. Gradient checkpointing or a smaller "
                "micro-batch changes that."
            )
        return f"About {self.saved:,.0f} MiB are saved, of {self.ceiling:,.0f} at most."


def from_count(parameters: int, *, dtype: str = "fp32", ranks: int = 1, nothing: str | None = None) -> Estimate:
    """From a parameter count alone: the largest gradient is not known, so it is left out of the account."""
    gradients = parameters * _bytes(dtype) / ranks / MIB
    return Estimate(parameters, gradients, 0.0, "the largest gradient, unknown here,", None, nothing)


def from_folder(
    folder: str | os.PathLike[str],
    *,
    dtype: str = "fp32",
    ranks: int = 1,
    fsdp: bool = False,
    batch: int | None = None,
    seq: int | None = None,
    checkpointing: bool = False,
    nothing: str | None = None,
) -> Estimate:
    """From a model folder with a ``config.json``, for a run in which every parameter trains.

    Args:
        dtype: of gradients and activations, ``"fp32"`` or ``"bf16"``.
        ranks: over how many FSDP shards the gradients; more than one implies ``fsdp``.
        fsdp: gradients are freed by FSDP group, one decoder layer each, rather than one by one.
        batch: sequences of one micro-batch; with ``seq`` the peaks are counted.
        seq: tokens of a sequence.
        checkpointing: count with gradient checkpointing.
        nothing: a reason, known from elsewhere, why nothing can be saved.

    Raises:
        BwdFuseError: no such model, or its code cannot run on meta tensors.
    """
    scale = _bytes(dtype) / ranks / MIB
    model = _meta_model(folder, dtype)
    fsdp = fsdp or ranks > 1
    groups = _groups(model) if fsdp else [[param] for param in model.parameters()]
    sizes = [sum(param.numel() for param in group) for group in groups]
    peaks = None
    if batch and seq:
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        off, on = peaks_above_rest(model, groups, batch, seq, ranks)
        peaks = off / MIB, on / MIB
    unit = "one FSDP group" if fsdp else "one gradient"
    return Estimate(sum(sizes), sum(sizes) * scale, max(sizes) * scale, unit, peaks, nothing)


def peaks_above_rest(model: Any, groups: list[list[Any]], batch: int, seq: int, ranks: int = 1) -> tuple[float, float]:
    """Peak bytes of one forward and backward: with all gradients kept, and with each group's freed once it is complete.

    One pass gives both. Gradients are kept in it and accounted for apart: ``ranks`` divides them and nothing else.
    """
    import torch

    ledger = _ledger(model, groups, ranks)
    ids = torch.zeros(batch, seq, dtype=torch.long, device="meta")
    mask = torch.ones(batch, 1, seq, seq, dtype=torch.bool, device="meta")  # given, or transformers looks into the ids
    model.train()
    try:
        with _fused_attention(), ledger:
            loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
            loss.backward()
    except Exception as error:  # any model's own code runs here
        raise BwdFuseError(
            f"{type(model).__name__} cannot run on meta tensors ({type(error).__name__}: {error}), so its activations "
            "cannot be counted; leave out batch and seq"
        ) from error
    return ledger.peak_off, ledger.peak_on


def _ledger(model: Any, groups: list[list[Any]], ranks: int) -> Any:
    """Counts storages by their lifetime as operators make them, gradients apart from the rest."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    class Ledger(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.live = self.grads = self.pending = 0
            self.peak_off = self.peak_on = 0.0
            self.known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
            self.group_of = {param: index for index, group in enumerate(groups) for param in group}
            self.waiting = [len(group) for group in groups]
            self.held = [0] * len(groups)
            for param in self.group_of:
                param.register_post_accumulate_grad_hook(self.fired)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for thing in tree_iter(out):
                if isinstance(thing, torch.Tensor):
                    self.note(thing.untyped_storage())
            return out

        def note(self, storage: Any) -> None:
            key, size = storage._cdata, storage.nbytes()
            if key not in self.known:
                self.known.add(key)
                self.live += size
                weakref.finalize(storage, self.gone, key, size)
                others = self.live - self.grads
                self.peak_off = max(self.peak_off, others + self.grads / ranks)
                self.peak_on = max(self.peak_on, others + self.pending / ranks)

        def gone(self, key: int, size: int) -> None:
            self.known.discard(key)
            self.live -= size

        def fired(self, param: Any) -> None:
            index, size = self.group_of[param], param.grad.untyped_storage().nbytes()
            self.grads += size
            self.pending += size
            self.held[index] += size
            self.waiting[index] -= 1
            if not self.waiting[index]:
                self.pending -= self.held[index]

    return Ledger()


@contextlib.contextmanager
def _fused_attention() -> Iterator[None]:
    """Attention that keeps what a fused kernel keeps; on meta tensors torch takes the path that keeps the matrix."""
    import torch
    from torch.nn import functional

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            out = query.new_empty(*query.shape[:-1], value.shape[-1])
            ctx.save_for_backward(query, key, value, out)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return tuple(tensor.new_empty(tensor.shape) for tensor in ctx.saved_tensors[:3])

    original = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = lambda query, key, value, *args, **kwargs: Fused.apply(query, key, value)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def _meta_model(folder: str | os.PathLike[str], dtype: str) -> Any:
    if not (Path(folder) / "config.json").is_file():
        raise BwdFuseError(
            f"{folder} holds no config.json: give a folder of a transformers model, or a parameter count"
        )
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise BwdFuseError(
            f"reading a model folder needs torch and transformers ({error}); a count does not"
        ) from error
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
        return AutoModelForCausalLM.from_config(config, dtype=dtypes[dtype], attn_implementation="sdpa")


def _groups(model: Any) -> list[list[Any]]:
    """Parameters of each decoder layer, and those outside of them: the usual FSDP wrapping."""
    layers = [child for child in model.modules() if type(child).__name__ in (model._no_split_modules or ())]
    inside = [list(layer.parameters()) for layer in layers]
    taken = {param for group in inside for param in group}
    return [*inside, [param for param in model.parameters() if param not in taken]]


def _bytes(dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise BwdFuseError(f"dtype {dtype!r} is unknown: gradients are {' or '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]
