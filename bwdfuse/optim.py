"""Optimizers whose native step can run inside backward. Class names and signatures are torch's."""

import math
from typing import Any

import torch

from bwdfuse._optimizer import BackwardOptimizer
from bwdfuse.errors import ConfigError

__all__ = ["AdamW"]


class AdamW(BackwardOptimizer):
    """AdamW (decoupled weight decay) with a native step that can run inside backward.

    For a gradient g of step t, in the order of torch.optim.AdamW: ``param *= 1 - lr * weight_decay``;
    ``exp_avg += (1 - beta1) * (g - exp_avg)``; ``exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g``;
    ``param -= lr / (1 - beta1**t) * exp_avg / (sqrt(exp_avg_sq / (1 - beta2**t)) + eps)``. Arithmetic is float32 whatever the storage;
    ``bwd_hook`` on and off give the same bits.

    Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization, https://arxiv.org/abs/1711.05101; interface of
    ``torch.optim.AdamW``.

    Args:
        params: parameters, named parameters, or param groups; dense float32 or bfloat16 CPU tensors, DTensors included.
        lr: learning rate, >= 0; a float or a CPU tensor of one element, read live at every step.
        betas: decay rates of the moments, each in [0, 1).
        eps: added to the denominator, >= 0.
        weight_decay: decoupled decay, >= 0.
        amsgrad: must be False.
        maximize: ascend instead of descend.
        foreach, capturable, differentiable: must be unset; fused: any value, this step is fused;
            kept for whoever loads the state_dict.
        bwd_hook: step each parameter inside backward and free its gradient. ``step()`` then closes the update; one backward per
            update. Build the optimizer after the model has its final parameters.
        nonfinite: what a gradient with inf or nan does to its parameter: "off" steps it as torch would, "skip" leaves parameter and
            state as they are, "raise" raises. Only that parameter: others may have been stepped before.

    Raises:
        ConfigError: (a ValueError) for an option or parameter that cannot be honoured; nothing was changed.
        BwdFuseError: the native part is missing.
    """

    _rule = "adamw"

    def __init__(
        self,
        params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        bwd_hook: bool = False,
        nonfinite: str = "off",
    ) -> None:
        if nonfinite not in ("off", "skip", "raise"):
            raise ConfigError(f"AdamW(nonfinite={nonfinite!r}): set 'off', 'skip' or 'raise'")
        beta1, beta2 = betas
        defaults = {
            "lr": lr,
            "betas": (float(beta1), float(beta2)),
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "fused": fused,
        }
        asked = {"amsgrad": amsgrad, "foreach": foreach, "capturable": capturable, "differentiable": differentiable}
        self._check_options({**defaults, **asked})
        super().__init__(params, defaults, bwd_hook=bwd_hook, nonfinite=nonfinite)

    def _check_options(self, group: dict[str, Any]) -> None:
        self._refuse_implementation(group)
        lr = group["lr"]
        if isinstance(lr, torch.Tensor) and (lr.numel() != 1 or lr.device.type != "cpu"):
            raise ConfigError(
                f"AdamW(lr=tensor of shape {tuple(lr.shape)} on {lr.device}): reading it would stall every step; pass a float or a CPU "
                "tensor of one element"
            )
        for name in ("lr", "eps", "weight_decay"):
            if not 0.0 <= float(group[name]) < math.inf:
                raise ConfigError(f"AdamW({name}={float(group[name])}): set a finite number >= 0")
        for name, beta in zip(("betas[0]", "betas[1]"), group["betas"], strict=True):
            if not 0.0 <= float(beta) < 1.0:
                raise ConfigError(f"AdamW({name}={float(beta)}): set a number in [0, 1)")
