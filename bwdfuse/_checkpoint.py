"""What a loaded state_dict must be before anything is replaced by it."""

import math
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
        shape = getattr(entry[name], "shape", None)
        if shape != param.shape:
            found = f"shape {tuple(shape)}" if shape is not None else f"no shape ({type(entry[name]).__name__})"
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
