"""One adapter for each optimizer that is measured, and the check that it computes what it should.

Knows how each is called; measures nothing. Every adapter has one shape: given a model it returns what ends an update.
For one that steps inside backward that is whatever it wants called afterwards; for one that steps after backward, its step.
All take the same hyper-parameters, so that all of one rule must arrive at the same weights.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import bwdfuse
from bwdfuse.errors import BwdFuseError

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
RELATIVE_LR = 0.1  # AdaLomo's, which is multiplied by the weights' own size
OPTIONS: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}

End = Callable[[], object]


class WrongResult(BwdFuseError):
    """An optimizer left other weights than its rule says. Its time would mean nothing."""


@dataclass(frozen=True)
class Peer:
    """An optimizer to measure.

    Attributes:
        build: given a model, arms or builds the optimizer and returns what ends an update.
        inside: it steps inside backward and takes the gradients away; else ``build`` returns a step that leaves them.
        needs: modules without which it cannot run.
        install: what to give to pip for them.
        rule: key of `REFERENCES`.
        quantised: its states are rounded to a few bits, so that its result is only near the rule's.
        dtypes: storage of parameters that it takes.
        most_parameters, most_elements: beyond these it takes minutes.
        note: what a reader of its time must know.
    """

    build: Callable[[torch.nn.Module], End]
    inside: bool
    needs: tuple[str, ...] = ()
    install: str = ""
    rule: str = "adamw"
    quantised: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    most_parameters: int = 1 << 30
    most_elements: int = 1 << 40
    note: str = ""

    def missing(self) -> str | None:
        """Why it is not here, or None."""
        if all(importlib.util.find_spec(module) for module in self.needs):
            return None
        return f"not installed: pip install {self.install}"

    def attach(self, model: torch.nn.Module) -> End:
        """Arms it; what is returned ends an update and leaves no gradient."""
        end = self.build(model)
        if self.inside:
            return end
        params = list(model.parameters())

        def step_and_drop() -> None:
            end()
            for param in params:
                param.grad = None

        return step_and_drop


# ---- this package ----------------------------------------------------------------------------------------------


def _bwdfuse(model: torch.nn.Module) -> End:
    return bwdfuse.AdamW(model.parameters(), bwd_hook=True, **OPTIONS).step


def _bwdfuse_after(model: torch.nn.Module) -> End:
    return bwdfuse.AdamW(model.parameters(), **OPTIONS).step


# ---- torch -----------------------------------------------------------------------------------------------------


def _torch(**how: bool) -> Callable[[torch.nn.Module], End]:
    return lambda model: torch.optim.AdamW(model.parameters(), **OPTIONS, **how).step  # type: ignore[arg-type]


def _torch_compile(model: torch.nn.Module) -> End:
    # A tensor for lr and for the step count: a Python number would compile anew when it changes.
    optimizer = torch.optim.AdamW(
        model.parameters(), **{**OPTIONS, "lr": torch.tensor(LR)}, foreach=True, capturable=True
    )
    return torch.compile(optimizer.step)


def _apply_in_backward(**how: bool) -> Callable[[torch.nn.Module], End]:
    def build(model: torch.nn.Module) -> End:
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {**OPTIONS, **how})
        return lambda: None

    return build


def _python_hook(model: torch.nn.Module) -> End:
    """The least that Python can do: torch's fused kernel called for one parameter, no guard at all."""
    for param in model.parameters():
        exp_avg, exp_avg_sq, step = torch.zeros_like(param), torch.zeros_like(param), torch.zeros(())

        def hook(p: torch.Tensor, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, step=step) -> None:
            step += 1
            with torch.no_grad():
                torch._fused_adamw_(
                    [p],
                    [p.grad],  # type: ignore[list-item]
                    [exp_avg],
                    [exp_avg_sq],
                    [],
                    [step],
                    lr=LR,
                    beta1=BETAS[0],
                    beta2=BETAS[1],
                    weight_decay=WEIGHT_DECAY,
                    eps=EPS,
                    amsgrad=False,
                    maximize=False,
                )
            p.grad = None

        param.register_post_accumulate_grad_hook(hook)
    return lambda: None


# ---- others ----------------------------------------------------------------------------------------------------


def _optimi(model: torch.nn.Module) -> End:
    import optimi

    return optimi.AdamW(model.parameters(), **OPTIONS, triton=False).step


def _optimi_release(model: torch.nn.Module) -> End:
    import optimi

    optimizer = optimi.AdamW(model.parameters(), **OPTIONS, triton=False, gradient_release=True)
    optimi.prepare_for_gradient_release(model, optimizer)

    def end() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return end


def _flashoptim(model: torch.nn.Module):
    import flashoptim

    return flashoptim.FlashAdamW(model.parameters(), **OPTIONS, quantize=False, master_weight_bits=None, fused=False)


def _flashoptim_release(model: torch.nn.Module) -> End:
    import flashoptim

    optimizer = _flashoptim(model)
    handle = flashoptim.enable_gradient_release(model, optimizer)
    return lambda: handle and None  # the handle and, through it, the optimizer must stay alive


def _deepspeed(params: Iterable[torch.nn.Parameter]):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    folder = os.path.dirname(sys.executable)  # it builds its kernel with the ninja that lies beside this Python
    if folder not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += os.pathsep + folder
    import cpuinfo
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    # Its constructor asks for the CPU each time, which takes most of a second.
    cached = functools.cache(cpuinfo.get_cpu_info) if not hasattr(cpuinfo.get_cpu_info, "cache_info") else None
    if cached:
        cpuinfo.get_cpu_info = cached
    return DeepSpeedCPUAdam(list(params), **OPTIONS, adamw_mode=True)


def _deepspeed_hook(model: torch.nn.Module) -> End:
    for param in model.parameters():

        def hook(p: torch.Tensor, optimizer=_deepspeed([param])) -> None:  # noqa: B008 - one for each parameter
            optimizer.step()
            p.grad = None

        param.register_post_accumulate_grad_hook(hook)
    return lambda: None


def _lomo(model: torch.nn.Module) -> End:
    import lomo_optim

    optimizer = lomo_optim.Lomo(model, lr=LR)
    return lambda: optimizer.grad_func(None)  # steps what the last hook could not see yet


def _adalomo(model: torch.nn.Module) -> End:
    import lomo_optim

    with mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor):  # it puts its states there, always
        optimizer = lomo_optim.AdaLomo(model, lr=RELATIVE_LR, loss_scale=None)
    optimizer.step_num = 1

    def end() -> None:
        optimizer.grad_func(None)
        optimizer.step_num += 1

    return end


def _bitsandbytes(model: torch.nn.Module) -> End:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(model.parameters(), **OPTIONS).step


def _torchao(model: torch.nn.Module) -> End:
    import torchao.optim

    return torchao.optim.AdamW8bit(model.parameters(), **OPTIONS).step


_OPTIMI: dict[str, Any] = {"needs": ("optimi",), "install": "torch-optimi"}
_FLASH: dict[str, Any] = {"needs": ("flashoptim", "triton"), "install": "flashoptim triton"}
_DEEPSPEED: dict[str, Any] = {
    "needs": ("deepspeed", "cpuinfo", "ninja"),
    "install": "deepspeed ninja",
    "note": "compiles its kernel on the first use, for some minutes",
}
_LOMO: dict[str, Any] = {
    "needs": ("lomo_optim", "transformers"),
    "install": "lomo-optim transformers",
    "most_parameters": 1000,
}
_QUADRATIC = "every hook walks all parameters: the cost of one grows with their number"

PEERS: dict[str, Peer] = {
    "bwdfuse": Peer(_bwdfuse, inside=True),
    "bwdfuse_after": Peer(_bwdfuse_after, inside=False),
    "fused_after": Peer(_torch(fused=True), inside=False),
    "foreach_after": Peer(_torch(foreach=True), inside=False),
    "compile_after": Peer(_torch_compile, inside=False, most_parameters=100),
    "python_hook": Peer(_python_hook, inside=True, note="no guard of any kind"),
    "apply_fused": Peer(_apply_in_backward(fused=True), inside=True),
    "apply_default": Peer(_apply_in_backward(), inside=True),
    "optimi_after": Peer(_optimi, inside=False, **_OPTIMI),
    "optimi_release": Peer(_optimi_release, inside=True, **_OPTIMI),
    "flashoptim_after": Peer(lambda model: _flashoptim(model).step, inside=False, **_FLASH),
    "flashoptim_release": Peer(_flashoptim_release, inside=True, **_FLASH),
    "deepspeed_after": Peer(lambda model: _deepspeed(model.parameters()).step, inside=False, **_DEEPSPEED),
    "deepspeed_hook": Peer(_deepspeed_hook, inside=True, most_parameters=1000, **_DEEPSPEED),
    "lomo": Peer(_lomo, inside=True, rule="sgd", **_LOMO, note=f"plain SGD, no state; {_QUADRATIC}"),
    "adalomo": Peer(
        _adalomo, inside=True, rule="adalomo", **_LOMO, note=f"a rule of its own, with factored state; {_QUADRATIC}"
    ),
    "bitsandbytes_8bit": Peer(
        _bitsandbytes,
        inside=False,
        needs=("bitsandbytes",),
        install="bitsandbytes",
        quantised=True,
        most_elements=1 << 22,
    ),
    "torchao_8bit": Peer(
        _torchao, inside=False, needs=("torchao",), install="torchao", quantised=True, most_elements=1 << 22
    ),
}


# ---- the check -------------------------------------------------------------------------------------------------


def _adamw(param: torch.Tensor, grads: list[torch.Tensor]) -> None:
    exp_avg, exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)
    for step, grad in enumerate(grads, 1):
        param.mul_(1 - LR * WEIGHT_DECAY)
        exp_avg.mul_(BETAS[0]).add_(grad, alpha=1 - BETAS[0])
        exp_avg_sq.mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
        root = (exp_avg_sq / (1 - BETAS[1] ** step)).sqrt_()
        param.addcdiv_(exp_avg, root.add_(EPS), value=-LR / (1 - BETAS[0] ** step))


def _sgd(param: torch.Tensor, grads: list[torch.Tensor]) -> None:
    for grad in grads:
        param.sub_(grad, alpha=LR)


def _adalomo_rule(param: torch.Tensor, grads: list[torch.Tensor]) -> None:
    """AdaLomo (https://arxiv.org/abs/2310.10195): a factored second moment, the update held to the weights' own size."""
    axes = (-1,) if param.ndim == 1 else (-1, -2)
    moments = [torch.zeros(()) for _ in axes]
    for step, grad in enumerate(grads, 1):
        fresh = step**-0.8
        square = grad.square()
        means = [square] if param.ndim == 1 else [square.mean(axis) for axis in axes]
        moments = [(1 - fresh) * old + fresh * new for old, new in zip(moments, means, strict=True)]
        second = moments[0] if param.ndim == 1 else torch.outer(moments[0] / moments[0].mean(), moments[1])
        change = grad / second.sqrt()
        change /= max(1.0, float(change.square().mean().sqrt()))
        param.sub_(change, alpha=RELATIVE_LR * max(1e-3, float(param.square().mean().sqrt())))


#: rule -> its updates of one float64 parameter, in place
REFERENCES: dict[str, Callable[[torch.Tensor, list[torch.Tensor]], None]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "adalomo": _adalomo_rule,
}
# 8-bit optimizers quantise only what is large and whole in blocks; the second parameter has an odd length.
_SHAPES = ((8, 1024), (1003,))


class Bag(torch.nn.Module):
    """Parameters and nothing else."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.params = torch.nn.ParameterList(torch.nn.Parameter(tensor) for tensor in tensors)


def check(peer: Peer, dtype: torch.dtype) -> float:
    """Takes some updates and compares the weights with the rule computed in float64.

    Returns:
        The largest distance (root mean square for quantised states) over what rounding explains: at most 1.

    Raises:
        WrongResult: it is more.
    """
    generator = torch.Generator().manual_seed(0)

    def values(scale: float) -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator).mul_(scale).to(dtype) for shape in _SHAPES]

    # Small weights, so that a step is many units of bfloat16; gradients of different size, so that scale matters.
    start, grads = values(1e-3), [values(scale) for scale in (0.5, 2.0, 1.0)]
    model = Bag(tensor.clone() for tensor in start)
    end = peer.attach(model)
    for grad in grads:
        loss = sum((p * g).float().sum() for p, g in zip(model.params, grad, strict=True))
        loss.backward()  # type: ignore[union-attr]
        end()
    worst = 0.0
    for i, (param, before) in enumerate(zip(model.params, start, strict=True)):
        if param.grad is not None:
            raise WrongResult("a gradient is left after the update")
        expected = before.double()
        REFERENCES[peer.rule](expected, [grad[i].double() for grad in grads])
        apart = param.detach().double() - expected
        distance = float(apart.square().mean().sqrt() if peer.quantised else apart.abs().max())
        share = distance / explained_by_rounding(peer, dtype, before.double(), expected, len(grads))
        worst = max(worst, share if math.isfinite(share) else math.inf)
    if worst > 1:
        raise WrongResult(
            f"its weights differ from those of {peer.rule} in float64 by {worst:.2g} times what rounding explains"
        )
    return worst


def explained_by_rounding(
    peer: Peer, dtype: torch.dtype, before: torch.Tensor, after: torch.Tensor, updates: int
) -> float:
    """Every update rounds a weight to its dtype, and the way it goes is as good as the moments: seven digits in float32, three in
    bfloat16 with bfloat16 moments, some percent where they are quantised."""
    way = float((after - before).square().mean().sqrt())
    share = 0.05 if peer.quantised else 2e-5 if dtype == torch.float32 else 0.02
    return share * way + updates * torch.finfo(dtype).eps * float(before.abs().max())


def usable(
    names: Iterable[str], dtype: torch.dtype, *, parameters: int = 1, elements: int = 1
) -> tuple[dict[str, Peer], dict[str, str]]:
    """Those that run here and compute what they should, and why the others are left out.

    Raises:
        WrongResult: this package is among those that do not.
    """
    found, left_out = {}, {}
    for name in names:
        peer = PEERS[name]
        reason = peer.missing() or _too_much(peer, dtype, parameters, elements)
        if reason is None:
            try:
                check(peer, dtype)
            except WrongResult as error:
                if name.startswith("bwdfuse"):
                    raise WrongResult(f"{name}: {error}; nothing was timed") from None
                reason = f"not timed: {error}"
            except Exception as error:  # whatever another's package raises where it cannot run is the finding
                if name.startswith("bwdfuse"):
                    raise
                text = str(error).strip().splitlines()
                reason = f"cannot run here: {type(error).__name__}: {text[0][:200] if text else ''}"
        if reason is None:
            found[name] = peer
        else:
            left_out[name] = reason
    return found, left_out


def _too_much(peer: Peer, dtype: torch.dtype, parameters: int, elements: int) -> str | None:
    if dtype not in peer.dtypes:
        return f"takes no {dtype}"
    if parameters > peer.most_parameters:
        return f"takes minutes with {parameters} parameters; measured up to {peer.most_parameters}"
    if elements > peer.most_elements:
        return f"takes minutes for {elements} elements; measured up to {peer.most_elements}"
    return None
