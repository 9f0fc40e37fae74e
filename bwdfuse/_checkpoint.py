"""What a loaded state_dict must be before anything is replaced by it, and the dtype in which states are kept."""

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch

from bwdfuse.errors import ConfigError

if TYPE_CHECKING:
    from bwdfuse._optimizer import BackwardOptimizer

FORMAT = 1  # of state_dict(); rises when what is stored changes its meaning


def check(optimizer: "BackwardOptimizer", state_dict: dict[str, Any], state_names: tuple[str, ...]) -> None:
    """Raises ConfigError unless `optimizer` can go on from `state_dict`. Changes nothing.

    Implementation flags of another optimizer (foreach, capturable, fused) are not held against it: they are not loaded.
    """
    version = state_dict.get("bwdfuse_format", FORMAT)
    if version > FORMAT:
        raise ConfigError(
            f"this state_dict has bwdfuse_format {version}, this bwdfuse reads up to {FORMAT}: upgrade bwdfuse"
        )
    for group in state_dict["param_groups"]:
        optimizer._check_options({**optimizer.defaults, **group, **dict.fromkeys(("foreach", "capturable"))})
    saved = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for position, param in zip(saved, params, strict=False):
        entry = state_dict["state"].get(position)
        if entry:
            _check_entry(f"parameter {position}", entry, param, state_names)


def _check_entry(what: str, entry: dict[str, Any], param: torch.Tensor, state_names: tuple[str, ...]) -> None:
    missing = [name for name in ("step", *state_names) if name not in entry]
    if missing:
        raise ConfigError(
            f"the state of {what} in this state_dict lacks {', '.join(missing)} (it has {', '.join(map(str, entry))}): "
            "load a state_dict of the same optimizer"
        )
    for name in state_names:
        value = entry[name]
        if not isinstance(value, torch.Tensor) or value.shape != param.shape:
            found = (
                f"shape {tuple(value.shape)}"
                if isinstance(value, torch.Tensor)
                else f"no tensor ({type(value).__name__})"
            )
            raise ConfigError(
                f"{name} of {what} in this state_dict has {found}, the parameter {tuple(param.shape)}: it belongs to another "
                "model or another sharding"
            )
    step = float(entry["step"])
    if not 0 <= step < math.inf:
        raise ConfigError(f"step of {what} in this state_dict is {step}; it counts updates from 0")


def normalise_step(entry: dict[str, Any]) -> None:
    """A loaded ``step`` may be a number, of another dtype, or wherever the file said; here it is 0-dim float32 on the CPU."""
    step = entry["step"]
    value = step if isinstance(step, torch.Tensor) else torch.tensor(float(step))
    entry["step"] = value.detach().to(device="cpu", dtype=torch.float32).reshape(()).clone()


_STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def state_dtype(optimizer: str, asked: torch.dtype | str | None) -> torch.dtype | None:
    """The option ``state_dtype``, which a config file gives by name. Raises ConfigError for any other dtype."""
    dtype = _STATE_DTYPES.get(str(asked).removeprefix("torch."))
    if asked is not None and dtype is None:
        raise ConfigError(f"{optimizer}(state_dtype={asked!r}): set torch.float32, torch.bfloat16 or None")
    return dtype


def dtype_of_state(param: torch.Tensor, asked: torch.dtype | None) -> torch.dtype:
    """In which dtype the states of `param` are kept."""
    if asked is not None:
        return asked
    return torch.float32 if param.dtype == torch.float16 else param.dtype


def refuse_dtypes(optimizer: str, groups: list[dict[str, Any]], asked: torch.dtype | None) -> None:
    """Raises ConfigError for parameters that have no step with states of the dtype that was asked for."""
    for group in groups:
        for param in group["params"]:
            wide, half = param.dtype == torch.float64, param.dtype == torch.float16
            if (wide and asked is not None) or (half and asked == torch.bfloat16):
                raise ConfigError(
                    f"{optimizer}(state_dtype={asked}): a {param.dtype} parameter has no step with such states; set state_dtype=None"
                )


def restore_states(optimizer: "BackwardOptimizer", state_dict: dict[str, Any], state_names: tuple[str, ...]) -> None:
    """Puts states from the file in the optimizer's own dtype where torch has cast them to the parameter's."""
    saved = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    rounded = set()
    for position, param in zip(saved, params, strict=True):
        entry = state_dict["state"].get(position)
        for name in state_names if entry else ():
            dtype, source = dtype_of_state(param, optimizer.state_dtype), entry[name]
            if torch.promote_types(source.dtype, dtype) != dtype:
                rounded.add((source.dtype, dtype))
            if dtype != param.dtype:
                optimizer.state[param][name] = source.detach().to(device=param.device, dtype=dtype, copy=True)
    for source, dtype in rounded:
        keep = f"; build the optimizer with state_dtype={source} to keep them" if source == torch.float32 else ""
        warnings.warn(
            f"optimizer states of this state_dict are {source} and were rounded to {dtype}{keep}", stacklevel=3
        )
