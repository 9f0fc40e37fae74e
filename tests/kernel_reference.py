"""What the kernels must compute, written again from the maths in NumPy and float64, and ways to compare with it."""

from __future__ import annotations

import hashlib

import ml_dtypes
import numpy as np

from bwdfuse import _C

F32, BF16, F16, F64 = (np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64))
#: (param, grad, states) for which there are kernels.
FORMATS = {
    "f32": (F32, F32, F32),
    "bf16 with f32 states": (BF16, BF16, F32),
    "bf16": (BF16, BF16, BF16),
    "f32 with bf16 states": (F32, F32, BF16),
    "f32 with bf16 grad": (F32, BF16, F32),
    "f32 with bf16 grad and states": (F32, BF16, BF16),
    "bf16 with f32 grad and states": (BF16, F32, F32),
    "bf16 with f32 grad": (BF16, F32, BF16),
    "f16 with f32 states": (F16, F16, F32),
    "f16 with f32 grad and states": (F16, F32, F32),
    "f64": (F64, F64, F64),
}
RULES = tuple(_C.rules())
ISAS = _C.isa_info()["possible"]
HYPER = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, maximize=False)
LANES, CHUNK = 16, 16384


def step(arrays, *, rule="adamw", step=1, isa=None, **kwargs):
    """One native step in place; returns (grad_sq_sum, nonfinite)."""
    hyper = {**HYPER, **kwargs}
    hypers = (hyper["lr"], *hyper["betas"], hyper["eps"], hyper["weight_decay"], hyper["maximize"])
    return _C.step_(rule, tuple(arrays), hypers, step=step, isa=isa)


def random_arrays(n, fmt, seed=0, scale=(1.0, 1.0, 1.0, 1.0), rule="adamw"):
    """param, grad and the rule's states with normal values; exp_avg_sq >= 0, its maximum sometimes above and sometimes below it."""
    rng = np.random.default_rng(seed)
    param, grad, state = FORMATS[fmt]
    arrays = [rng.standard_normal(n) * s for s in scale]
    arrays[3] = arrays[3] ** 2
    if rule.endswith("_amsgrad"):
        arrays.append((rng.standard_normal(n) * scale[3]) ** 2)
    return [a.astype(d) for a, d in zip(arrays, (param, grad, state, state, state)[: len(arrays)], strict=True)]


def bits(array):
    """The array's bits as integers, every NaN as one: a NaN's sign and payload are not part of the interface."""
    plain = np.array(array)
    plain[np.isnan(plain.astype(np.float64))] = np.nan
    return plain.view(f"u{plain.itemsize}")


def digest(arrays):
    return hashlib.sha256(b"".join(bits(a).tobytes() for a in arrays)).hexdigest()[:16]


def real_of(fmt):
    """The dtype that a format is computed in, and a wider one in which to say what is right."""
    return (F64, np.longdouble) if FORMATS[fmt][0] == F64 else (F32, np.float64)


def exact_step(rule, arrays, *, step, lr, betas, eps, weight_decay, maximize=False, real=np.float64):
    """One step in `real`, written from the papers: (exact value, magnitude of the largest addend of its statement) of param and
    each state, by name."""
    p, g, m, v, *largest_v = (a.astype(real) for a in arrays)
    # in float64 for every format, as torch does
    correction1, correction2 = (real(1 - beta**step) for beta in betas)
    lr, beta1, beta2, eps, weight_decay, one = (real(x) for x in (lr, *betas, eps, weight_decay, 1))
    g = -g if maximize else g
    g = g if rule.startswith("adamw") else g + weight_decay * p
    m_old, m_new = beta1 * m, (one - beta1) * g
    v_old, v_new = beta2 * v, (one - beta2) * g * g
    m, v = m_old + m_new, v_old + v_new
    out = {"exp_avg": (m, np.maximum(abs(m_old), abs(m_new))), "exp_avg_sq": (v, np.maximum(v_old, v_new))}
    if largest_v:
        v = np.maximum(v, largest_v[0])
        out["max_exp_avg_sq"] = (v, np.maximum(out["exp_avg_sq"][1], v))
    decay = lr * weight_decay * p if rule.startswith("adamw") else 0 * p
    rate = lr / correction1 / (np.sqrt(v) / np.sqrt(correction2) + eps)
    # exp_avg counts with its addends: what it lost when they cancelled, the quotient magnifies
    update = rate * out["exp_avg"][1]
    out["param"] = (p - decay - rate * m, np.maximum.reduce([abs(p), abs(decay), update]))
    return out


#: dtype -> (bits of its fraction, exponent of its smallest normal number)
PRECISION = {F32: (23, -126), BF16: (7, -126), F16: (10, -14), F64: (52, -1022)}


def ulp(magnitude, dtype=F32):
    """Distance between neighbouring numbers of the dtype at that magnitude."""
    fraction, smallest = PRECISION[dtype]
    exponent = np.floor(np.log2(np.maximum(magnitude, magnitude.dtype.type(2.0) ** smallest)))
    return magnitude.dtype.type(2.0) ** (exponent - fraction)


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
