"""Equality to the bit."""

import torch


def same_bits(a, b):
    """Equality of two state_dicts, models or tensors to the bit; NaN equals NaN."""
    if isinstance(a, torch.nn.Module):
        a, b = a.state_dict(), b.state_dict()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.nan_to_num(), b.nan_to_num())
            and torch.equal(a.isnan(), b.isnan())
        )
    return a == b
