"""FSDP1 with ``use_orig_params=True``: the one room that knows torch's private names for it.

FSDP1 computes gradients of flat parameters only, so a hook on an original parameter never fires. After its reduce-scatter (and
all-reduce, where replicas are sharded) it shows each original parameter its piece of the reduced gradient, in the parameter's own
dtype, and calls ``step()`` of what stands in the parameter's ``_in_backward_optimizers``. That is where our slots stand.
"""

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from bwdfuse.errors import AccumulationError, ConfigError


def is_flat(param: torch.Tensor) -> bool:
    """Whether this is a flat parameter, which stands for all of a unit's with ``use_orig_params=False``."""
    return getattr(param, "_is_flat_param", False)


def is_wrapped(param: torch.Tensor) -> bool:
    """Whether this is an original parameter of an FSDP1 unit. Its data is this rank's piece of it."""
    return getattr(param, "_fsdp_flattened", False) and not is_flat(param)


def is_elsewhere(param: torch.Tensor) -> bool:
    """Whether all of a wrapped parameter lies on other ranks: here FSDP1 never gives it a gradient, nor torch a state."""
    return param.numel() == 0 and is_wrapped(param)


class Units:
    """The FSDP1 units that hold parameters of one optimizer."""

    def __init__(self, states: list[Any], missing: int) -> None:
        self._states = [weakref.ref(state) for state in states]
        self._groups = {id(p): _shard_group(state) for state in states for p in state._handle.flat_param._params}
        self._missing = missing

    def group_of(self, param: torch.Tensor) -> Any:
        """The process group whose ranks hold the pieces of this parameter; None where this rank holds all of it."""
        if is_wrapped(param) and id(param) not in self._groups:
            self._refuse_missing(1)
        return self._groups.get(id(param))

    def refuse_unarmable(self) -> None:
        """Raises ConfigError for a unit whose gradient is not complete, or not here, when FSDP1 calls step()."""
        if self._missing:
            self._refuse_missing(self._missing)
        for state in self._alive():
            _refuse(state)

    def register(self) -> list:
        """Has forwards under ``no_sync()`` raise; returns handles. The first, removed last, lets FSDP1 look at entries again."""
        states = self._alive()
        nested = {id(module) for state in states for module in state.modules() if module is not state}
        return [
            self,
            *(state.register_forward_pre_hook(_refuse_no_sync) for state in states if id(state) not in nested),
        ]

    def look(self) -> None:
        """FSDP1 looks for entries once, in the first forward; this does it for those that came or went later."""
        for state in self._alive():
            params = state._handle.flat_param._params
            state._handle._has_optim_in_backward = any(hasattr(param, "_in_backward_optimizers") for param in params)

    remove = look

    def _alive(self) -> list[Any]:
        return [state for ref in self._states if (state := ref()) is not None]

    def _refuse_missing(self, count: int) -> None:
        raise ConfigError(
            f"{count} parameters are FSDP1's, but the module that holds them was not found: give the outermost "
            "FullyShardedDataParallel module to optimizer.arm(model)"
        )


class Entry:
    """A slot in a parameter's ``_in_backward_optimizers``; ``remove()`` takes it out."""

    def __init__(self, slot: Any, param: torch.Tensor) -> None:
        self._param = weakref.ref(param)
        param._in_backward_optimizers = [slot]  # type: ignore[attr-defined]

    def remove(self) -> None:
        param = self._param()
        if param is not None:
            param.__dict__.pop("_in_backward_optimizers", None)


def find_units(params: Iterable[torch.Tensor], model: torch.nn.Module | None) -> Units | None:
    """The units that hold these parameters, found in `model` or, without one, among all live modules; None without FSDP1."""
    wrapped = {id(param) for param in params if is_wrapped(param)}
    if not wrapped:
        return None
    from torch.distributed.fsdp import FullyShardedDataParallel

    # By type, and not isinstance: asking some objects for their __class__ runs code.
    live: list[Any] = gc.get_objects() if model is None else list(model.modules())
    states: list[Any] = [
        state for state in live if issubclass(type(state), FullyShardedDataParallel) and _holds(state, wrapped)
    ]
    held = {id(param) for state in states for param in state._handle.flat_param._params}
    return Units(states, missing=len(wrapped - held))


def forget_forward(root: Any) -> None:
    """Ends an update of the outermost module whose forward no backward follows, as FSDP1 itself does after a backward.

    Without it FSDP1 takes the next forward for another one of the same update, waits on the graph of the first, and reduces nothing.
    """
    from torch.distributed.fsdp import _runtime_utils

    _runtime_utils._post_backward_final_callback(root, root)


def _holds(state: Any, wrapped: set[int]) -> bool:
    handle = getattr(state, "_handle", None)
    return handle is not None and any(id(param) in wrapped for param in handle.flat_param._params or ())


def _shard_group(state: Any) -> Any:
    return state.process_group if state._handle.uses_sharded_strategy else None


def _refuse(state: Any) -> None:
    if state._handle._offload_params:
        raise ConfigError(
            "bwd_hook=True with FSDP1 CPUOffload(offload_params=True): stepping gradients while they move to host memory is not "
            "proven; set cpu_offload=None, or bwd_hook=False"
        )
    if getattr(state, "_inter_node_pg", None) is not None and not state._handle.uses_sharded_strategy:
        raise ConfigError(
            "bwd_hook=True with FSDP1 HYBRID_SHARD over shard groups of one rank: torch then switches to NO_SHARD and reduces no "
            "gradient over the replicas, which drift apart, with or without bwd_hook; use more than one rank per shard group (verl: "
            "engine.fsdp_size=-1), or FSDP2 (verl: engine.strategy=fsdp2)"
        )


def _refuse_no_sync(module: Any, _args: Any) -> None:
    if torch.is_grad_enabled() and not module._sync_gradients:
        raise AccumulationError(
            "forward under no_sync() while an optimizer steps inside backward: no_sync() keeps whole, unreduced gradients to "
            "accumulate more, and nothing would be freed; leave no_sync() out and call step() after every backward, or call "
            "optimizer.disarm()"
        )
