"""Section B: learning rate, schedulers, logging: what trainers expect of an optimizer."""

import warnings

import field
import pytest
import torch
from field import backward, faults, one, parameters, replaced_by
from torch import nn
from torch.optim import lr_scheduler

import bwdfuse


@faults(replaced_by(field.Naive))
def test_b18_warm_up_reaches_the_hook(fault):
    """huggingface/transformers#30371: schedulers of their own, stepped at the wrong times; hardly anything was learnt."""
    p, opt = one([1.0, 1.0])
    schedule = lr_scheduler.LambdaLR(opt, [0.0, 0.5, 1.0, 1.0].__getitem__)
    for update in range(3):
        backward(p, 1.0)
        opt.step()
        schedule.step()
        if update == 0:
            assert torch.equal(p, torch.ones(2))
    assert p.tolist() == pytest.approx([0.85, 0.85], abs=1e-6)


@faults(replaced_by(field.Naive))
def test_b20_options_of_the_users_scheduler_arrive(fault):
    """huggingface/transformers PR#34559: a scheduler that was built anew lost its keyword options."""
    transformers = pytest.importorskip("transformers")
    p, opt = one()
    schedule = transformers.get_scheduler(
        "cosine_with_min_lr",
        opt,
        num_warmup_steps=0,
        num_training_steps=4,
        scheduler_specific_kwargs={"min_lr_rate": 0.1},
    )
    moved = 0.0
    for _ in range(4):
        moved += opt.param_groups[0]["lr"]
        backward(p, 1.0)
        opt.step()
        schedule.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.01)
    assert 1.0 - p.item() == pytest.approx(moved, abs=1e-6)  # a constant gradient moves by lr


class Wrapper:
    """A wrapper that only looks like an optimizer: no subclass of torch's."""

    def __init__(self, params, **options):
        self.inner = bwdfuse.Adam(params, **options)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


@faults(replaced_by(Wrapper))
def test_b22_it_is_an_optimizer_for_schedulers_and_accelerate(fault):
    """pytorch/ao#959, NVIDIA/apex#978, kozistr/pytorch_optimizer#484: schedulers refused a duck-typed wrapper."""
    accelerate = pytest.importorskip("accelerate")
    p, opt = one()
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.defaults["lr"] == 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in (
            lambda o: lr_scheduler.LambdaLR(o, lambda _: 1.0),
            lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
            lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10, cycle_momentum=False),
        ):
            schedule = make(opt)
            backward(p, 1.0)
            opt.step()
            schedule.step()
    prepared = accelerate.Accelerator(cpu=True).prepare(opt)
    backward(p, 1.0)
    prepared.step()
    assert opt.stats()["updates"] == 4
    opt.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.01})
    assert len(parameters(opt)) == 2


class NormOfWhatIsLeft(field.Naive):
    """The norm of what is left after backward: nothing."""

    def grad_norm(self):
        return float(sum(p.grad.square().sum() for p in parameters(self) if p.grad is not None)) ** 0.5


@faults(replaced_by(NormOfWhatIsLeft))
def test_b23_the_norm_is_that_of_the_gradients(fault):
    """jiaweizzhao/GaLore#66: the reported norm was 0 all the time."""
    p, opt = one([1.0, 1.0])
    backward(p, [3.0, 4.0])
    opt.step()
    assert opt.grad_norm() == pytest.approx(5.0, rel=1e-6)
    backward(p, [0.0, 0.0])
    opt.step()
    assert opt.grad_norm() == 0.0
