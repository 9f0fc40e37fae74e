"""Optimizers whose native step can run inside backward. Class names and signatures are torch's."""

import math
from typing import Any

import torch

from bwdfuse._optimizer import BackwardOptimizer
from bwdfuse.errors import ConfigError

__all__ = ["Adam", "AdamW"]


class _AdamFamily(BackwardOptimizer):
    """What Adam and AdamW share: their options, and the choice of the rule."""

    _decoupled_weight_decay: bool

    def __init__(
        self,
        params,
        lr: float | torch.Tensor,
        betas: tuple[float | torch.Tensor, float | torch.Tensor],
        eps: float,
        weight_decay: float,
        amsgrad: bool,
        *,
        maximize: bool,
        foreach: bool | None,
        capturable: bool,
        differentiable: bool,
        fused: bool | None,
        bwd_hook: bool,
        nonfinite: str,
        state_dtype: torch.dtype | str | None,
    ) -> None:
        fixed = {"amsgrad": bool(amsgrad), "decoupled_weight_decay": self._decoupled_weight_decay}
        rule = ("adamw" if self._decoupled_weight_decay else "adam") + ("_amsgrad" if amsgrad else "")
        defaults = {
            "lr": lr,
            "betas": tuple(betas) if isinstance(betas, list) else betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "fused": fused,
        }
        super().__init__(
            params,
            defaults,
            rule=rule,
            fixed=fixed,
            implementation={"foreach": foreach, "capturable": capturable, "differentiable": differentiable},
            bwd_hook=bwd_hook,
            nonfinite=nonfinite,
            state_dtype=state_dtype,
        )

    def _why_fixed(self, name: str, value: Any) -> str:
        if name == "amsgrad":
            return f"every param group has the amsgrad that the optimizer was built with; build {self._name}(amsgrad={value!r})"
        other = "AdamW" if value else "Adam"
        return f"that is the rule of {other}; build bwdfuse.{other}"

    def _check_options(self, group: dict[str, Any]) -> None:
        self._refuse_implementation(group)
        for name in ("lr", "eps", "weight_decay"):
            value = _number(self._name, name, group[name])
            if not 0.0 <= value < math.inf:
                raise ConfigError(f"{self._name}({name}={value}): set a finite number >= 0")
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ConfigError(
                f"{self._name}(betas={betas!r}): set a pair of numbers in [0, 1), for instance (0.9, 0.999)"
            )
        if isinstance(betas[0], torch.Tensor) != isinstance(betas[1], torch.Tensor):
            raise ConfigError(f"{self._name}(betas={betas!r}): set both to floats or both to tensors")
        for i, beta in enumerate(betas):
            value = _number(self._name, f"betas[{i}]", beta)
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"{self._name}(betas[{i}]={value}): set a number in [0, 1)")


def _number(optimizer: str, name: str, value: Any) -> float:
    """An option as a float. It may be a tensor, which is then read live at every step."""
    if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.device.type != "cpu"):
        raise ConfigError(
            f"{optimizer}({name}=tensor of shape {tuple(value.shape)} on {value.device}): reading it would stall every step; pass a "
            "float or a CPU tensor of one element"
        )
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{optimizer}({name}={value!r}): set a number") from None


class AdamW(_AdamFamily):
    """AdamW (decoupled weight decay) with a native step that can run inside backward.

    For a gradient g of step t, in the order of torch.optim.AdamW: ``param *= 1 - lr * weight_decay``;
    ``exp_avg += (1 - beta1) * (g - exp_avg)``; ``exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g``;
    ``param -= lr / (1 - beta1**t) * exp_avg / (sqrt(exp_avg_sq / (1 - beta2**t)) + eps)``. Arithmetic is float32 whatever the storage
    (float64 for float64 parameters); ``bwd_hook`` on and off give the same bits.

    Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization, https://arxiv.org/abs/1711.05101; interface of
    ``torch.optim.AdamW``.

    Args:
        params: parameters, named parameters, or param groups; dense float32, float64, float16 or bfloat16 CPU tensors, DTensors
            included. A parameter's gradient may have another dtype (``param.grad_dtype``): float32 beside bfloat16 or float16,
            bfloat16 beside float32.
        lr: learning rate, >= 0; a float or a CPU tensor of one element, read live at every step.
        betas: decay rates of the moments, each in [0, 1); two floats, or two CPU tensors of one element.
        eps: added to the denominator, >= 0.
        weight_decay: decoupled decay, >= 0.
        amsgrad: divide by the root of the running maximum of ``exp_avg_sq`` (Reddi, Kale & Kumar,
            On the Convergence of Adam and Beyond, https://openreview.net/forum?id=ryQu7f-RZ). The same for every param group.
        maximize: ascend instead of descend.
        foreach, capturable, differentiable: must be unset; fused: any value, this step is fused;
            kept for whoever loads the state_dict.
        bwd_hook: step each parameter inside backward and free its gradient. ``step()`` then closes the update; one backward per
            update. Build the optimizer after the model has its final parameters.
        nonfinite: what a gradient with inf or nan does to its parameter: "off" steps it as torch would, "skip" leaves parameter and
            state as they are, "raise" raises. Only that parameter: others may have been stepped before.
        state_dtype: torch.float32 or torch.bfloat16 (or their names) for the moments; None: as torch, the parameter's own dtype, but
            float32 for float16 parameters, whose squared gradients would underflow.

    Raises:
        ConfigError: (a ValueError) for an option or parameter that cannot be honoured; nothing was changed.
        BwdFuseError: the native part is missing.
    """

    _decoupled_weight_decay = True

    def __init__(
        self,
        params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
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
        state_dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            bwd_hook=bwd_hook,
            nonfinite=nonfinite,
            state_dtype=state_dtype,
        )


class Adam(_AdamFamily):
    """Adam with a native step that can run inside backward; weight decay is an L2 penalty, added to the gradient.

    For a gradient g of step t, as torch.optim.Adam: ``g += weight_decay * param``; then the moments and the parameter as in
    `AdamW`, without its decay. ``grad_norm()`` is of the gradient without the penalty.

    Source: Kingma & Ba, Adam: A Method for Stochastic Optimization, https://arxiv.org/abs/1412.6980; interface of
    ``torch.optim.Adam``.

    Args:
        params: parameters, named parameters, or param groups; dense float32, float64, float16 or bfloat16 CPU tensors, DTensors
            included. A parameter's gradient may have another dtype (``param.grad_dtype``): float32 beside bfloat16 or float16,
            bfloat16 beside float32.
        lr: learning rate, >= 0; a float or a CPU tensor of one element, read live at every step.
        betas: decay rates of the moments, each in [0, 1); two floats, or two CPU tensors of one element.
        eps: added to the denominator, >= 0.
        weight_decay: L2 penalty, >= 0.
        amsgrad: divide by the root of the running maximum of ``exp_avg_sq`` (Reddi, Kale & Kumar,
            On the Convergence of Adam and Beyond, https://openreview.net/forum?id=ryQu7f-RZ). The same for every param group.
        maximize: ascend instead of descend.
        foreach, capturable, differentiable: must be unset; fused: any value, this step is fused;
            kept for whoever loads the state_dict.
        decoupled_weight_decay: must be False: that is `AdamW`.
        bwd_hook: step each parameter inside backward and free its gradient. ``step()`` then closes the update; one backward per
            update. Build the optimizer after the model has its final parameters.
        nonfinite: what a gradient with inf or nan does to its parameter: "off" steps it as torch would, "skip" leaves parameter and
            state as they are, "raise" raises. Only that parameter: others may have been stepped before.
        state_dtype: torch.float32 or torch.bfloat16 (or their names) for the moments; None: as torch, the parameter's own dtype, but
            float32 for float16 parameters, whose squared gradients would underflow.

    Raises:
        ConfigError: (a ValueError) for an option or parameter that cannot be honoured; nothing was changed.
        BwdFuseError: the native part is missing.
    """

    _decoupled_weight_decay = False

    def __init__(
        self,
        params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        bwd_hook: bool = False,
        nonfinite: str = "off",
        state_dtype: torch.dtype | str | None = None,
    ) -> None:
        if decoupled_weight_decay:
            raise ConfigError("Adam(decoupled_weight_decay=True): that is another rule here; build bwdfuse.AdamW")
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            bwd_hook=bwd_hook,
            nonfinite=nonfinite,
            state_dtype=state_dtype,
        )
