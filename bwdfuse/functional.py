"""The rules as functions on NumPy arrays: for checking, teaching, and use without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bwdfuse._native import native

if TYPE_CHECKING:
    import numpy as np


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
    param: np.ndarray,
    grad: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
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

    in float32; a store to bfloat16 rounds to nearest, ties to even. The GIL is released during the step: two threads
    must not step one parameter at a time.

    Args:
        param: The parameter, any shape; written. float32, or bfloat16 from ``ml_dtypes``.
        grad: Its gradient: same shape, same dtype; only read.
        exp_avg: Running mean of the gradient: same shape; float32, or the dtype of param; written. Zeros at first.
        exp_avg_sq: Running mean of its square: same shape, same dtype as exp_avg; written. Zeros at first.
        step: Number of the step being taken: 1 for the first. It is not kept anywhere: count it yourself.
        lr: Learning rate, >= 0.
        betas: Decay of the two running means per step, each in [0, 1).
        eps: Added to the denominator, >= 0, in units of the gradient.
        weight_decay: Decoupled decay, >= 0: param loses lr * weight_decay of itself.
        maximize: Ascend instead of descend.

    All arrays are plain, C-contiguous, aligned ``numpy.ndarray`` in native byte order, and no two share memory.

    Returns:
        StepResult: The gradient's sum of squares and its number of non-finite elements. A non-finite gradient is
        stepped all the same, as torch does.

    Raises:
        TypeError: An argument is of the wrong kind or dtype. No array was changed.
        ValueError: An argument is out of range, or an array has the wrong shape or memory layout. No array was changed.
        BwdFuseError: The native part is missing or cannot run here.

    Source:
        Loshchilov & Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2; defaults and the place of
        eps as in ``torch.optim.AdamW``.

    Example:
        >>> import numpy as np
        >>> param, grad = np.array([1, -2], "f4"), np.array([0.5, -0.25], "f4")
        >>> exp_avg, exp_avg_sq = np.zeros(2, "f4"), np.zeros(2, "f4")
        >>> adamw_(param, grad, exp_avg, exp_avg_sq, step=1, lr=0.1)
        StepResult(grad_sq_sum=0.3125, nonfinite=0)
        >>> param
        array([ 0.899, -1.898], dtype=float32)
    """
    return StepResult(
        *native().adamw_(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            step=step,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            isa=None,
        )
    )
