"""Arming: what must hold of the parameters before hooks are put on them, and the putting on and taking off."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch

from bwdfuse import _fsdp1 as fsdp1
from bwdfuse._native import native
from bwdfuse.errors import ConfigError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def name_parameters(groups: Sequence[dict], model: torch.nn.Module | None) -> dict[int, str]:
    """Names for messages, by ``id(param)``: the model's, else the group's ``param_names``, else the position."""
    names = {}
    for g, group in enumerate(groups):
        given = group.get("param_names")
        for i, param in enumerate(group["params"]):
            names[id(param)] = given[i] if given else f"param_groups[{g}]['params'][{i}]"
    if model is not None:
        found = ((id(param), name) for name, param in model.named_parameters())
        names.update({key: name.replace("_fsdp_wrapped_module.", "") for key, name in found if key in names})
    return names


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, without importing torch.distributed for those who do not use it."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def shard_groups(param: Any, units: "fsdp1.Units | None") -> tuple:
    """The process groups over which a sum over this parameter's elements has to be reduced; empty: this rank holds them all."""
    if is_dtensor(param):
        sharded = (dim for dim, placement in enumerate(param.placements) if placement.is_shard())
        return tuple(param.device_mesh.get_group(dim) for dim in sharded)
    group = units.group_of(param) if units is not None else None
    return () if group is None else (group,)


def slots_of(param: torch.Tensor) -> list:
    """The slots, of whichever optimizer, that step this parameter inside backward: from a hook, or where FSDP1 calls them."""
    hooks = (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()
    found = [*(getattr(hook, "__self__", None) for hook in hooks), *getattr(param, "_in_backward_optimizers", ())]
    return [slot for slot in found if isinstance(slot, native().Slot)]


def _owner(param: torch.Tensor, own: Set[int]) -> str | None:
    """What already steps this parameter inside backward, other than the slots whose ids are in `own`; or None."""
    slots = slots_of(param)
    if any(id(slot) not in own for slot in slots):
        return "another bwdfuse optimizer: call its disarm() first"
    if any(entry not in slots for entry in getattr(param, "_in_backward_optimizers", ())):
        return "torch's _apply_optimizer_in_backward: remove that call"
    return None


def _refusal(param: torch.Tensor, own: Set[int]) -> str | None:
    """Why a trainable parameter cannot be stepped inside backward, with the way out; None when it can."""
    if param.is_meta:
        return "is on the meta device: materialise the model (to_empty, load the weights), then build the optimizer or call arm()"
    if fsdp1.is_flat(param):
        return (
            "is an FSDP1 flat parameter, whose hook sees unreduced gradients: wrap with use_orig_params=True (verl: "
            "engine.use_orig_params=True), or use FSDP2 (fully_shard; verl: engine.strategy=fsdp2)"
        )
    if param.layout != torch.strided or param.dtype not in _DTYPES:
        return f"is {param.dtype} with layout {param.layout}: the native step takes dense floating-point tensors; use torch.optim.AdamW"
    if param.device.type != "cpu":
        return f"is on {param.device}: this version steps CPU tensors only; use torch.optim.AdamW(fused=True) there"
    placements = getattr(param, "placements", ())
    if any(placement.is_partial() for placement in placements):
        return f"has placements {placements}: a partial parameter is not a value to step; redistribute() it first"
    owner = _owner(param, own)
    if owner is not None:
        return f"is already stepped inside backward by {owner}"
    if param.grad is not None:
        return "still holds a gradient of an earlier backward: call zero_grad() before arming"
    return None


def refuse_unarmable(params: Iterable[torch.Tensor], names: Mapping[int, str], own: Set[int]) -> None:
    """Raises ConfigError naming the first parameters that cannot be stepped inside backward. Changes nothing.

    Args:
        own: ids of the slots of the optimizer that asks: its own hooks are no obstacle to arming it again.
    """
    if not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
        raise ConfigError(
            f"bwd_hook=True needs torch >= 2.10 (Tensor.register_post_accumulate_grad_hook), found torch {torch.__version__}: "
            "upgrade torch, or set bwd_hook=False"
        )
    refused = [(names[id(p)], why) for p in params if p.requires_grad and (why := _refusal(p, own))]
    if refused:
        more = f" ({len(refused) - 3} more)" if len(refused) > 3 else ""
        raise ConfigError("bwd_hook=True: " + "; ".join(f"parameter {n!r} {why}" for n, why in refused[:3]) + more)


def refuse_unreduced(params: Iterable[torch.Tensor]) -> None:
    """Raises ConfigError when several ranks would each step a whole replica from their own, unreduced gradient.

    A post-accumulate hook runs before DistributedDataParallel reduces: replicas would drift apart without a word.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return
    if any(is_dtensor(p) or fsdp1.is_wrapped(p) for p in params):
        return
    raise ConfigError(
        f"bwd_hook=True with {distributed.get_world_size()} ranks and unsharded parameters: the hook runs before "
        "DistributedDataParallel reduces gradients, so the replicas would diverge. Shard the model with FSDP2 "
        "(torch.distributed.fsdp.fully_shard; verl: engine.strategy=fsdp2) before building the optimizer, or set bwd_hook=False"
    )


def register(slots_and_params: Iterable[tuple], units: fsdp1.Units | None) -> list:
    """Registers each armed slot's hook on its parameter; returns the handles. All or nothing.

    Args:
        units: what wraps parameters with FSDP1, which calls their slots itself.
    """
    handles: list = []
    try:
        if units is not None:
            handles += units.register()
        for slot, param in slots_and_params:
            if fsdp1.is_wrapped(param):
                # Also where it lies on other ranks: a unit frees its flat gradient if it finds an entry.
                if param.requires_grad:
                    handles.append(fsdp1.Entry(slot, param))
            elif slot.armed:
                handles.append(param.register_post_accumulate_grad_hook(slot.hook))
        if units is not None:
            units.look()
    except BaseException:
        remove(handles)
        raise
    return handles


def remove(handles: list) -> None:
    """Takes hooks off again, the last first; also the optimizer's finalizer, hence a function that knows no optimizer."""
    while handles:
        handles.pop().remove()
