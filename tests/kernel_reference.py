"""What the kernels must compute, written again from the maths in NumPy and float64, and ways to compare with it."""

from __future__ import annotations

import hashlib

import ml_dtypes
import numpy as np

from bwdfuse import _C

F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
#: (param, grad, states) for which there are kernels.
FORMATS = {"f32": (F32, F32, F32), "bf16 with f32 states": (BF16, BF16, F32), "bf16": (BF16, BF16, BF16)}
ISAS = _C.isa_info()["possible"]
HYPER = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, maximize=False)
LANES, CHUNK = 16, 16384


def step(arrays, *, rule="adamw", step=1, isa=None, **kwargs):
    """One native step in place; returns (grad_sq_sum, nonfinite)."""
    hyper = {**HYPER, **kwargs}
    hypers = (hyper["lr"], *hyper["betas"], hyper["eps"], hyper["weight_decay"], hyper["maximize"])
    return _C.step_(rule, tuple(arrays), hypers, step=step, isa=isa)


def random_arrays(n, fmt, seed=0, scale=(1.0, 1.0, 1.0, 1.0)):
    """param, grad, exp_avg, exp_avg_sq with normal values; exp_avg_sq >= 0."""
    rng = np.random.default_rng(seed)
    param, grad, state = FORMATS[fmt]
    arrays = [rng.standard_normal(n) * s for s in scale]
    arrays[3] = arrays[3] ** 2
    return [a.astype(d) for a, d in zip(arrays, (param, grad, state, state), strict=True)]


def bits(array):
    """The array's bits as integers, every NaN as one: a NaN's sign and payload are not part of the interface."""
    plain = np.array(array)
    plain[np.isnan(plain.astype(np.float32))] = np.nan
    return plain.view(np.uint32 if plain.dtype == F32 else np.uint16)


def digest(arrays):
    return hashlib.sha256(b"".join(bits(a).tobytes() for a in arrays)).hexdigest()[:16]


def adamw_float64(param, grad, exp_avg, exp_avg_sq, *, step, lr, betas, eps, weight_decay, maximize=False):
    """AdamW in float64: three pairs (exact value, magnitude of the largest addend of its statement)."""
    p, g, m, v = (a.astype(np.float64) for a in (param, grad, exp_avg, exp_avg_sq))
    if maximize:
        g = -g
    m_old, m_new = betas[0] * m, (1 - betas[0]) * g
    v_old, v_new = betas[1] * v, (1 - betas[1]) * g * g
    m, v = m_old + m_new, v_old + v_new
    decay = lr * weight_decay * p
    update = lr / (1 - betas[0] ** step) * m / (np.sqrt(v) / np.sqrt(1 - betas[1] ** step) + eps)
    return (
        (m, np.maximum(abs(m_old), abs(m_new))),
        (v, np.maximum(v_old, v_new)),
        (p - decay - update, np.maximum.reduce([abs(p), abs(decay), abs(update)])),
    )


def ulp(magnitude, dtype=F32):
    """Distance between neighbouring numbers of the dtype at that magnitude."""
    exponent = np.floor(np.log2(np.maximum(magnitude, 2.0**-126)))
    return 2.0 ** (exponent - (23 if dtype == F32 else 7))


def sum_of_squares(grad):
    """The promised order of additions: 16 lanes over chunks of 16384, folded by halves, chunks in order."""
    squares = np.square(grad.astype(np.float64).ravel())
    total = 0.0
    for start in range(0, squares.size, CHUNK):
        chunk = squares[start : start + CHUNK]
        rows = np.zeros((-(-chunk.size // LANES), LANES))
        rows.ravel()[: chunk.size] = chunk
        lanes = np.zeros(LANES)
        for row in rows:
            lanes = lanes + row
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        total += lanes[0]
    return float(total)
