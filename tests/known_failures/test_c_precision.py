"""Section C: loss scaling and gradients that are not finite."""

import field
import pytest
import torch
from field import backward, faults, one, options_dropped, parameters, replaced_by
from torch import nn

import bwdfuse
from bwdfuse.errors import BwdFuseError, ConfigError


@faults(options_dropped("nonfinite"))
def test_b25_a_gradient_with_inf_changes_nothing_where_that_was_asked(fault):
    """pytorch/pytorch PR#95847: on one branch inf reached the parameters."""
    p, opt = one(nonfinite="skip")
    backward(p, float("inf"))
    opt.step()
    state = opt.state[p]
    assert p.item() == 1.0 and state["step"] == 0 and state["exp_avg"] == 0 and state["exp_avg_sq"] == 0
    assert opt.stats()["skipped"] == 1
    backward(p, 2.0)
    opt.step()
    assert state["exp_avg"].item() == pytest.approx(0.2) and state["step"] == 1


class UnscalesAgain(field.AdamW):
    """Unscaled twice: the optimizer does not know that the scaler has."""

    def step(self, closure=None):
        for p in parameters(self):
            p.grad.div_(1024.0)
        return super().step(closure)


@faults(replaced_by(UnscalesAgain))
def test_b26_gradients_are_unscaled_once(fault):
    """pytorch/pytorch PR#94060: unscaled for clipping, and then again by the fused step."""
    p, opt = one(bwd_hook=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(p * 8.0).sum().backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    assert opt.state[p]["exp_avg"].item() == pytest.approx(0.1 * 8.0)
    scaler.scale(p * float("inf")).sum().backward()
    scaler.step(opt)  # skips
    assert opt.state[p]["step"] == 1


@faults(field.late_readers_unguarded, replaced_by(field.Naive))
def test_b27_an_enabled_loss_scaler_is_refused(fault):
    """huggingface/accelerate PR#3462: a scaler beside a fused step; scaled gradients were stepped."""
    p, opt = one()
    with pytest.raises(ConfigError, match="GradScaler"):
        torch.amp.GradScaler("cpu", init_scale=65536.0).scale(p.sum()).backward()
    assert p.item() == 1.0
    torch.amp.GradScaler("cpu", enabled=False).scale(p.sum()).backward()
    opt.step()
    assert p.item() == pytest.approx(0.9, abs=1e-6)


class Spoilt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("nan")


@faults(options_dropped("nonfinite"))
def test_b28_a_policy_for_gradients_that_are_not_finite(fault):
    """pytorch/pytorch#67590, #152279: a trainer's guard looked at the norm of gradients that were gone."""
    for policy in ("skip", "raise"):
        model = nn.ModuleDict({"l1": nn.Linear(2, 2), "l2": nn.Linear(2, 2)})
        opt = bwdfuse.AdamW(model.named_parameters(), bwd_hook=True, nonfinite=policy)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        loss = model["l2"](Spoilt.apply(model["l1"](torch.ones(1, 2)))).sum()  # layer 2 comes first in backward
        if policy == "raise":
            with pytest.raises(BwdFuseError, match="l1"):
                loss.backward()
        else:
            loss.backward()
            opt.step()
            assert opt.stats()["skipped"] == 2
        assert torch.equal(model["l1"].weight, before["l1.weight"])
        assert not torch.equal(model["l2"].weight, before["l2.weight"])
