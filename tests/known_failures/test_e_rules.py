"""Section E: the arithmetic of the update."""

import field
import pytest
import torch
from field import AdamW, adamw, backward, faults, kernel, one, options_dropped, parameters, replaced_by
from torch import nn

import bwdfuse


class Decoupled(AdamW):
    """Adam that decays as AdamW does: one rule under two names."""


@faults(replaced_by(Decoupled, "Adam"), replaced_by(bwdfuse.Adam))
def test_b45_adam_and_adamw_are_two_rules(fault):
    """flagos-ai/FlagGems#4988: 'Adam' decayed as AdamW does."""
    for cls, param, exp_avg, exp_avg_sq in (
        ("AdamW", [0.899, -1.898], [0.05, -0.025], [2.5e-4, 6.25e-5]),
        ("Adam", [0.9, -1.9], [0.051, -0.027], [2.601e-4, 7.29e-5]),
    ):
        p, opt = one([1.0, -2.0], cls=cls, weight_decay=0.01)
        backward(p, [0.5, -0.25])
        opt.step()
        assert p.tolist() == pytest.approx(param, abs=1e-6)
        assert opt.state[p]["exp_avg"].tolist() == pytest.approx(exp_avg, abs=1e-8)
        assert opt.state[p]["exp_avg_sq"].tolist() == pytest.approx(exp_avg_sq, rel=1e-5)


def rounds_after_the_decay(param, grad, state, group, step):
    adamw(param, grad, state, group, step)  # each of its statements rounds to bfloat16


@faults(kernel(rounds_after_the_decay))
def test_b47_decay_and_update_are_rounded_once_together(fault):
    """Nerogar/OneTrainer#996: weight decay had no effect in bfloat16.

    Half a ULP below 1 is 0.00195: a decay of 0.0006 and an update of 0.0015 are each lost, but not their sum.
    """
    p, opt = one(torch.ones(8), torch.bfloat16, lr=0.0015, weight_decay=0.4)
    backward(p, 1.0)
    opt.step()
    assert (p == 0.99609375).all()
    p, opt = one(torch.ones(8), lr=1e-3, weight_decay=0.01)  # float32 parameters lose nothing
    for _ in range(1000):
        backward(p, 0.0)
        opt.step()
    assert p.tolist() == pytest.approx([(1 - 1e-5) ** 1000] * 8, abs=1e-5)


def swallows_in_float32_parameters(param, grad, state, group, step):
    wide = param.bfloat16()
    adamw(wide, grad, {k: v.bfloat16() for k, v in state.items()}, group, step)
    param.copy_(wide)


@faults(kernel(swallows_in_float32_parameters), options_dropped("stochastic_rounding"))
def test_b48_what_bfloat16_does_to_small_updates_is_known(fault):
    """pytorch/ao PR#1124, pytorch/pytorch#120376, meta-pytorch/torchtune#2254: bfloat16 weights did not move.

    Plain bfloat16 does not move here either, as in torch; float32 parameters with bfloat16 gradients do. Stochastic rounding
    is not offered, and says so.
    """
    plain, opt = one(torch.ones(4), torch.bfloat16, lr=1e-3)
    wide = nn.Parameter(torch.ones(4))
    wide.grad_dtype = torch.bfloat16
    opt_wide = bwdfuse.AdamW([wide], lr=1e-3, weight_decay=0.0, bwd_hook=True)
    for _ in range(10):
        backward(plain, 1.0)
        opt.step()
        (wide.bfloat16() * torch.ones(4, dtype=torch.bfloat16)).sum().backward()
        opt_wide.step()
    assert (plain == 1.0).all()
    assert wide.tolist() == pytest.approx([0.99] * 4, abs=1e-5)
    with pytest.raises(TypeError, match="stochastic_rounding"):
        bwdfuse.AdamW([plain], stochastic_rounding=True)


@faults(options_dropped("stochastic_rounding", "seed"))
def test_b50_no_random_rounding_is_promised(fault):
    """Nerogar/OneTrainer PR#804, pytorch/ao#2296: replicas drifted apart by random rounding. There is none; bits are fixed."""
    p, _ = one()
    with pytest.raises(TypeError):
        bwdfuse.AdamW([p], stochastic_rounding=True, seed=1)


@faults(replaced_by(field.Naive))
def test_b51_zero_gradients_in_float16_are_no_nan(fault):
    """google-deepmind/optax#1754, PR#1755: eps is zero in float16, and 0 / 0 is NaN."""
    p, opt = one([1.0, 0.5], torch.float16)
    for _ in range(3):
        backward(p, 0.0)
        opt.step()
    assert p.tolist() == [1.0, 0.5]


def folds_the_corrections(param, grad, state, group, step):
    beta1, beta2 = group["betas"]
    lr = group["lr"] * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    param.mul_(1 - lr * group["weight_decay"])
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    param.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + group["eps"], value=-lr)


@faults(kernel(folds_the_corrections))
def test_b53_eps_and_decay_are_outside_the_bias_correction(fault):
    """Oneflow-Inc/oneflow PR#5960: corrections folded into lr changed where eps acts (0.99693), and what the decay is."""
    p, opt = one(1.0, torch.float64, eps=1e-3)
    backward(p, 1e-3)
    opt.step()
    assert p.item() == pytest.approx(0.95, abs=1e-12)
    p, opt = one(1.0, torch.float64, weight_decay=0.1)
    backward(p, 0.0)
    opt.step()
    assert p.item() == pytest.approx(0.99, abs=1e-12)


@faults(options_dropped("amsgrad"), options_dropped("foo"))
def test_b55_options_are_honoured_or_refused(fault):
    """bitsandbytes-foundation/bitsandbytes#1261: amsgrad was accepted and ignored: 0.8464785 where it gives 0.9351604."""
    p, opt = one(1.0, torch.float64, lr=0.01, betas=(0.9, 0.9), amsgrad=True)
    for t in range(51):
        backward(p, 0.01 if t else 1.0)
        opt.step()
    assert p.item() == pytest.approx(0.9351604, abs=1e-6)
    with pytest.raises(TypeError, match="foo"):
        bwdfuse.AdamW([p], foo=1)


class DecaysAll(AdamW):
    """Every parameter is decayed: also those without a gradient."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if self.state[p]["step"] == 0:
                        p.mul_(1 - group["lr"] * group["weight_decay"])
        return super().step(closure)


@faults(replaced_by(DecaysAll))
def test_b56_without_a_gradient_there_is_no_decay(fault):
    """KellerJordan/Muon#54: parameters that were not used shrank."""
    used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    opt = bwdfuse.AdamW([used, unused], lr=0.1, weight_decay=0.1, bwd_hook=True)
    backward(used, 1.0)
    with pytest.warns(UserWarning, match="had no gradient"):
        opt.step()
    assert unused.item() == 1.0 and opt.state[unused]["step"] == 0


def returns_early(param, grad, state, group, step):
    if group["lr"] > 0 and group["betas"][0] > 0:
        adamw(param, grad, state, group, step)


@faults(kernel(returns_early))
def test_b57_special_cases_keep_every_option(fault):
    """ml-explore/mlx#440: a short cut for a zero option lost the decay."""
    p, opt = one(lr=0.0, weight_decay=0.1)
    backward(p, 1.0)
    opt.step()
    assert p.item() == 1.0 and opt.state[p]["step"] == 1
    assert opt.state[p]["exp_avg"].item() == pytest.approx(0.1)
    p, opt = one(betas=(0.0, 0.9), weight_decay=0.1)
    backward(p, 0.0)
    opt.step()
    assert p.item() == pytest.approx(0.99, abs=1e-7)


class Baked(AdamW):
    """The learning rate of the first day: read once."""

    def __init__(self, params, lr=1e-3, **options):
        super().__init__(params, lr=float(lr), **options)


@faults(replaced_by(Baked))
def test_b58_a_tensor_lr_is_read_at_every_step(fault):
    """pytorch/ao#730, pytorch/pytorch PR#106916: lr as a tensor was baked in, or copied needlessly."""
    lr = torch.tensor(0.1)
    p, opt = one([1.0, -2.0], lr=lr, weight_decay=0.01)
    backward(p, [0.5, -0.25])
    opt.step()
    assert p.tolist() == pytest.approx([0.899, -1.898], abs=1e-6)
    lr.fill_(0.0)
    before = p.detach().clone()
    backward(p, [0.5, -0.25])
    opt.step()
    assert torch.equal(p, before)
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    groups = [{"params": [a], "lr": 0.1, "weight_decay": 0.1}, {"params": [b], "lr": 0.01, "weight_decay": 0.0}]
    opt = bwdfuse.AdamW(groups, bwd_hook=True)
    (0.0 * (a + b)).sum().backward()
    opt.step()
    assert a.item() == pytest.approx(0.99, abs=1e-7) and b.item() == 1.0
    assert len(parameters(opt)) == 2
