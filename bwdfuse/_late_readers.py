"""Functions of torch that want gradients after backward, when an armed optimizer has used and freed them.

Nothing else notices: a GradScaler finds no inf, clipping finds a norm of zero, and both go on. These are the functions of torch
that bwdfuse wraps, from the first arming on; they do what they did wherever no armed optimizer is concerned.
"""

import functools
import gc
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from bwdfuse.attach import slots_of
from bwdfuse.errors import ConfigError

#: Optimizers that are armed now.
_armed: weakref.WeakSet = weakref.WeakSet()


def watch(optimizer: torch.optim.Optimizer) -> None:
    """From now on, scaling a loss and clipping what this optimizer steps raise."""
    _armed.add(optimizer)
    scaler: Any
    for scaler in (torch.amp.GradScaler, *torch.amp.GradScaler.__subclasses__()):
        if "scale" in scaler.__dict__:
            _wrap(scaler, "scale", _refuse_scaling)
    # clip_grad_norm_ looks this one up when it is called, so it is met however clip_grad_norm_ was imported
    _wrap(clip_grad, "_clip_grads_with_norm_", _refuse_clipping)
    for name in ("clip_grads_with_norm_", "clip_grad_value_"):
        for module in (clip_grad, torch.nn.utils):
            if hasattr(module, name):
                _wrap(module, name, _refuse_clipping)
    if "torch.distributed.fsdp" in sys.modules:
        _wrap(sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel, "clip_grad_norm_", _refuse_fsdp1_clipping)


def unwatch(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer is no longer armed."""
    _armed.discard(optimizer)


def _wrap(owner: Any, name: str, refuse: Callable[..., None]) -> None:
    """Asks `refuse` before the function is called, with its arguments."""
    function = getattr(owner, name)
    if hasattr(function, "_bwdfuse"):
        return

    @functools.wraps(function)
    def asked(*args, **kwargs):
        if _armed:
            refuse(*args, **kwargs)
        return function(*args, **kwargs)

    asked._bwdfuse = True  # type: ignore[attr-defined]
    setattr(owner, name, asked)


def _refuse_scaling(scaler: Any, outputs: Any) -> None:
    """A scaled loss looks to a hook like any other; this is the last moment at which nothing is changed yet."""
    if scaler.is_enabled():
        gc.collect()  # an LR scheduler and its optimizer form a cycle: one that nobody uses any more may still be there
    if scaler.is_enabled() and _armed:
        raise ConfigError(
            "GradScaler.scale() while an optimizer steps inside backward: the scaler unscales gradients and looks for inf only after "
            "backward, when each is already used. Train in bfloat16 without a scaler (GradScaler(enabled=False)), or set bwd_hook=False"
        )


def _refuse_clipping(parameters: Any, bound: Any = None, *args: Any, **kwargs: Any) -> None:
    """An iterator would be used up by looking; torch's own functions hand on a list."""
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    listed = parameters if isinstance(parameters, list | tuple) else ()
    slot = next((slot for param in listed for slot in slots_of(param)), None)
    if slot is None:
        return
    unbounded = kwargs.get("max_norm", bound) == math.inf
    if unbounded and any(optimizer._norm_is_replaced and slot in optimizer._plan.slots for optimizer in _armed):
        return
    raise ConfigError(
        f"clipping of gradients while parameter {slot.name!r} is stepped inside backward: the step has used and freed its "
        "gradient, unclipped. Take the clipping out (max_grad_norm=0, clip_grad=null); the norm is optimizer.grad_norm(). Or set "
        "bwd_hook=False, which keeps gradients until step()"
    )


def _refuse_fsdp1_clipping(module: Any, max_norm: Any, *args: Any, **kwargs: Any) -> None:
    _refuse_clipping(list(module.parameters()), max_norm)
