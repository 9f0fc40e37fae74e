"""The faults, as the field wrote them: naive optimizers, and one wrong detail put into ours."""

import weakref
from itertools import chain

import torch
from torch import nn

import bwdfuse
from bwdfuse import _checkpoint, _late_readers, validate
from bwdfuse._optimizer import BackwardOptimizer

AdamW = bwdfuse.AdamW


def faults(*patches):
    """Attaches to a test what must make it fail: functions that take pytest's monkeypatch."""

    def attach(test):
        test.faults = patches
        return test

    return attach


def one(value=1.0, dtype=torch.float32, cls="AdamW", **options):
    """A parameter and its armed optimizer, without weight decay unless asked for; a first step is lr in the sign of the gradient."""
    param = nn.Parameter(torch.as_tensor(value, dtype=dtype).clone())
    options = {"lr": 0.1, "weight_decay": 0.0, "bwd_hook": True, **options}
    return param, getattr(bwdfuse, cls)([param], **options)


def backward(param, grad):
    """A real backward that leaves exactly `grad`."""
    (param * torch.as_tensor(grad, dtype=param.dtype)).sum().backward()


# ---- optimizers --------------------------------------------------------------------------------------------------------


class Naive(torch.optim.AdamW):
    """Stepping inside backward as it is mostly written: a hook and an optimizer of its own for every parameter, no guard."""

    def __init__(self, params, bwd_hook=False, nonfinite="off", state_dtype=None, **options):
        super().__init__(params, **options)
        self.hooked = bwd_hook
        for group in self.param_groups if bwd_hook else ():
            for param in group["params"]:
                self.register(param, {k: v for k, v in group.items() if k not in ("params", "decoupled_weight_decay")})

    def register(self, param, options):
        own = torch.optim.AdamW([param], **options)

        def hook(_):
            own.step()
            own.zero_grad()

        param.register_post_accumulate_grad_hook(hook)

    def step(self, closure=None):
        return None if self.hooked else super().step(closure)


def replaced_by(cls, name="AdamW"):
    def patch(monkeypatch):
        monkeypatch.setattr(bwdfuse, name, cls)

    patch.__name__ = cls.__doc__.split(":")[0].split(".")[0].lower().replace(" ", "_").replace(",", "")
    return patch


def altered(name, **changes):
    """Ours, with some methods replaced."""
    return replaced_by(type("Altered", (AdamW,), {"__doc__": name, **changes}))


def options_dropped(*names):
    """Accepts options and ignores them."""

    class Dropping(AdamW):
        def __init__(self, params, **options):
            super().__init__(params, **{k: v for k, v in options.items() if k not in names})

    Dropping.__doc__ = f"{' '.join(names)} accepted and ignored"
    return replaced_by(Dropping)


def kernel(function):
    """Another update rule behind the same hooks; float arithmetic in torch, one tensor at a time."""

    def patch(monkeypatch):
        monkeypatch.setattr(BackwardOptimizer, "_kernel", staticmethod(function))

    patch.__name__ = function.__name__
    return patch


def adamw(param, grad, state, group, step, *, keep=None, eps=None):
    """A right rule, for faults to be made of."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    state["exp_avg"].lerp_(grad.to(state["exp_avg"].dtype), 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    param.mul_(1 - lr * group["weight_decay"] if keep is None else keep)
    denom = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + (group["eps"] if eps is None else eps)
    param.addcdiv_(state["exp_avg"], denom, value=-lr / (1 - beta1**step))


def demands_equal_strides(param, grad, state, group, step):
    if param.stride() != grad.stride():
        raise RuntimeError("params, grads and states must have the same strides")
    adamw(param, grad, state, group, step)


def raw_memory(param, grad, state, group, step):
    """Every array as the memory it starts at, whatever its strides."""

    def flat(tensor):
        return torch.as_strided(
            tensor, (min(param.numel(), tensor.untyped_storage().nbytes() // tensor.itemsize),), (1,)
        )

    tensors = [flat(t) for t in (param, grad, state["exp_avg"], state["exp_avg_sq"])]
    size = min(t.numel() for t in tensors)
    p, g, m, v = (t[:size] for t in tensors)
    adamw(p, g, {"exp_avg": m, "exp_avg_sq": v}, group, step)


# ---- one detail of ours ------------------------------------------------------------------------------------------------


def refusal_missing(*names):
    """Trainers' settings that are no longer asked about."""

    def patch(monkeypatch):
        kept = tuple(refuse for refuse in validate.REFUSALS if refuse.__name__ not in names)
        assert len(kept) == len(validate.REFUSALS) - len(names), names
        monkeypatch.setattr(validate, "REFUSALS", kept)

    patch.__name__ = f"no_refusal_of_{'_'.join(names)}"
    return patch


def late_readers_unguarded(monkeypatch):
    monkeypatch.setattr(_late_readers, "watch", lambda optimizer: None)
    monkeypatch.setattr(_late_readers, "_armed", weakref.WeakSet())


def checkpoints_unchecked(monkeypatch):
    monkeypatch.setattr(_checkpoint, "check", lambda *_: None)


def parameters(optimizer):
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
