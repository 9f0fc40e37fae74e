"""The rules as functions on NumPy arrays and DLPack tensors: for checking, teaching, and use without torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from bwdfuse._native import native

#: A numpy.ndarray, or an object that lends CPU memory by ``__dlpack__`` (a torch.Tensor that requires no gradient).
Array = Any


class StepResult(NamedTuple):
    """What a step saw of its gradient, in the same pass over memory.

    Attributes:
        grad_sq_sum: Sum of grad * grad, accumulated in double. Its square root is the gradient's L2 norm. The same bits
            on every CPU.
        nonfinite: How many elements of grad are inf or nan.
    """

    grad_sq_sum: float
    nonfinite: int


def adamw_(
    param: Array,
    grad: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    max_exp_avg_sq: Array | None = None,
    *,
    step: float,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
) -> StepResult:
    """One AdamW step, in place: what ``torch.optim.AdamW`` does to one parameter, by the same kernels as the hook.

    Computes, with the moments before the parameter::

        exp_avg    = betas[0] * exp_avg    + (1 - betas[0]) * grad
        exp_avg_sq = betas[1] * exp_avg_sq + (1 - betas[1]) * grad**2
        denom      = sqrt(exp_avg_sq) / sqrt(1 - betas[1]**step) + eps
        param      = param - lr * weight_decay * param - lr / (1 - betas[0]**step) * exp_avg / denom

    in float32 (float64 for float64 arrays); a store to a smaller format rounds to nearest, ties to even. With
    ``max_exp_avg_sq`` the denominator is taken from the running maximum of exp_avg_sq, which is kept there (amsgrad).
    The GIL is released during the step: two threads must not step one parameter at a time.

    Args:
        param: The parameter, any shape; written. float32, float64, float16, or bfloat16 from ``ml_dtypes``.
        grad: Its gradient: same shape; only read. The dtype of param; float32 and bfloat16, and float16 and float32,
            may also stand beside each other as (param, grad).
        exp_avg: Running mean of the gradient: same shape; written. float32, the dtype of param (but not float16), or
            bfloat16 beside a float32 param. Zeros at first.
        exp_avg_sq: Running mean of its square: same shape, same dtype as exp_avg; written. Zeros at first.
        max_exp_avg_sq: None, or the running maximum of exp_avg_sq: same shape, same dtype; written. Zeros at first.
        step: Number of the step being taken: 1 for the first. It is not kept anywhere: count it yourself.
        lr: Learning rate, >= 0.
        betas: Decay of the two running means per step, each in [0, 1).
        eps: Added to the denominator, >= 0, in units of the gradient.
        weight_decay: Decoupled decay, >= 0: param loses lr * weight_decay of itself.
        maximize: Ascend instead of descend.

    Arrays are plain ``numpy.ndarray``, or lend their memory by DLPack; C-contiguous, aligned, in native byte order and CPU
    memory, and no two share memory. torch does not see that a tensor lent by DLPack was written: its version stays.

    Returns:
        StepResult: The gradient's sum of squares and its number of non-finite elements. A non-finite gradient is
        stepped all the same, as torch does.

    Raises:
        TypeError: An argument is of the wrong kind or dtype. No array was changed.
        ValueError: An argument is out of range, or an array has the wrong shape or memory layout. No array was changed.
        BwdFuseError: The native part is missing or cannot run here.

    Source:
        Loshchilov & Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2; amsgrad: Reddi, Kale & Kumar,
        "On the Convergence of Adam and Beyond", ICLR 2018; defaults and the place of eps as in ``torch.optim.AdamW``.

    Example:
        >>> import numpy as np
        >>> param, grad = np.array([1, -2], "f4"), np.array([0.5, -0.25], "f4")
        >>> exp_avg, exp_avg_sq = np.zeros(2, "f4"), np.zeros(2, "f4")
        >>> adamw_(param, grad, exp_avg, exp_avg_sq, step=1, lr=0.1)
        StepResult(grad_sq_sum=0.3125, nonfinite=0)
        >>> param
        array([ 0.899, -1.898], dtype=float32)
    """
    arrays = (param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq)
    return _adam("adamw", arrays, step, lr, betas, eps, weight_decay, maximize)


def adam_(
    param: Array,
    grad: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    max_exp_avg_sq: Array | None = None,
    *,
    step: float,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> StepResult:
    """One Adam step, in place: what ``torch.optim.Adam`` does to one parameter.

    As `adamw_`, but weight decay is coupled, an L2 penalty: ``grad + weight_decay * param`` stands where `adamw_` has grad, and
    param is not decayed by itself. grad itself is only read.

    Args:
        param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step, lr, betas, eps, maximize: As in `adamw_`.
        weight_decay: L2 penalty, >= 0.

    Returns:
        StepResult: Of grad as it was passed, without the penalty.

    Raises:
        TypeError, ValueError, BwdFuseError: As `adamw_`.

    Source:
        Kingma & Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1; defaults, decay and the place of eps as
        in ``torch.optim.Adam``.
    """
    arrays = (param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq)
    return _adam("adam", arrays, step, lr, betas, eps, weight_decay, maximize)


def _adam(
    rule: str, arrays: tuple, step: Any, lr: Any, betas: Any, eps: Any, weight_decay: Any, maximize: Any
) -> StepResult:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas={betas!r} is not a pair: pass two numbers in [0, 1), for instance (0.9, 0.999)")
    if arrays[-1] is None:
        arrays = arrays[:-1]
    else:
        rule += "_amsgrad"
    return StepResult(*native().step_(rule, arrays, (lr, *betas, eps, weight_decay, maximize), step=step, isa=None))
