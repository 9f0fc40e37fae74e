"""The one line that says that ``bwd_hook`` took effect, and what it saves."""

from collections.abc import Hashable

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

MIB = 2**20

#: What makes a group of a module's parameters: FSDP2's class and FSDP1's.
GROUPS = (FSDPModule, FullyShardedDataParallel)


def announcement(flag: str, module: torch.nn.Module) -> str:
    """The line.

    Args:
        flag: The flag as its user spells it, with its value.
        module: The model, wrapped and armed.
    """
    sizes = gradient_bytes(module)
    params = sum(param.requires_grad for param in module.parameters())
    total, at_once = sum(sizes.values()), max(sizes.values(), default=0)
    sharded = any(isinstance(child, GROUPS) for child in module.modules())
    where, unit = (" on each rank", "FSDP group") if sharded else ("", "one")
    return (
        f"bwdfuse: {flag} took effect: {params} parameters are stepped inside backward by the native step; "
        f"{(total - at_once) / MIB:.2f} of {total / MIB:.2f} MiB of gradients are freed{where} (all but the largest "
        f"{unit}, {at_once / MIB:.2f} MiB)"
    )


def gradient_bytes(module: torch.nn.Module) -> dict[Hashable, int]:
    """Bytes of this rank's gradients by what is alive together: a parameter, or under FSDP a module's parameters."""
    owner: dict[torch.nn.Parameter, Hashable] = {param: name for name, param in module.named_parameters()}
    for child in module.modules():  # parents first, so the innermost FSDP module wins
        if isinstance(child, GROUPS):
            owner.update(dict.fromkeys(child.parameters(), child))
    sizes: dict[Hashable, int] = {}
    for param, key in owner.items():
        if param.requires_grad:
            local = getattr(param, "_local_tensor", param)
            sizes[key] = sizes.get(key, 0) + local.nbytes
    return sizes
