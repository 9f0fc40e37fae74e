"""Section A: when the step fires, who shares it, and what happens before the first and after the last."""

import copy
from dataclasses import replace

import field
import pytest
import torch
from field import backward, faults, one, refusal_missing, replaced_by
from test_validate import GOOD, ON, changed, message
from torch import nn

import bwdfuse
from bwdfuse import validate
from bwdfuse.errors import AccumulationError, BwdFuseError, ConfigError
from bwdfuse.trainers.facts import Batch, Option


@faults(replaced_by(field.Naive), refusal_missing("accumulation", "batch_split"))
def test_b01_second_micro_batch_never_steps_again(fault):
    """pytorch/pytorch#124523: accumulated micro-batches each took a step: 0.808222 where one step gives 0.9."""
    with pytest.raises(ConfigError, match="micro"):
        validate.check(ON, changed(GOOD, batch=Batch(Option("data.micro", 2), 8, total=Option("data.total", 32))))
    p, opt = one()
    backward(p, 0.5)
    with pytest.raises(AccumulationError):
        backward(p, 1.5)
    assert p.item() == pytest.approx(0.9, abs=1e-6) and opt.state[p]["step"] == 1


@faults(refusal_missing("accumulation", "batch_split"))
def test_b03_derived_accumulation_is_refused_before_the_model_loads(fault):
    """hiyouga/LlamaFactory#5887: refused late, naming neither the option nor the way out."""

    def batch(micro):
        return Batch(Option("data.micro_batch_size_per_gpu", micro), 2, total=Option("data.train_batch_size", 8))

    validate.check(ON, changed(GOOD, batch=batch(4)))
    for micro in (2, 3):
        text = message(changed(GOOD, batch=batch(micro)))
        assert (
            f"data.micro_batch_size_per_gpu={micro}" in text
            and "data.train_batch_size=8" in text
            and "bwd_hook" in text
        )
        assert text.splitlines()[-1].split()  # settings to type


@faults(refusal_missing("clipping"), field.late_readers_unguarded, replaced_by(field.Naive))
def test_b05_clipping_is_refused_and_never_silent(fault):
    """pytorch/torchtitan#990, meta-pytorch/torchtune#1934: gradients were gone when they were to be clipped."""
    assert "optim.clip_grad=1.0" in message(changed(GOOD, clip_grad=1.0))
    p, opt = one([1.0, 1.0])
    backward(p, [3.0, 4.0])
    with pytest.raises(ConfigError, match="clipping"):
        nn.utils.clip_grad_norm_([p], 1.0)


class LastOfTheLoop(field.Naive):
    """The hook finds the loop's last optimizer: a closure over the loop's variable."""

    last = None

    def register(self, param, options):
        type(self).last = torch.optim.AdamW([param], **options)
        param.register_post_accumulate_grad_hook(lambda p: (self.last.step(), setattr(p, "grad", None))[1])


@faults(replaced_by(LastOfTheLoop))
def test_b06_models_armed_in_a_loop_are_each_stepped(fault):
    """pytorch/torchtitan#777: hooks of the first model saw the last one's table."""
    models = [one(1.0) for _ in range(2)]
    for p, opt in models:
        backward(p, 1.0)
        opt.step()
    for p, _ in models:
        assert p.item() == pytest.approx(0.9, abs=1e-6)


@faults(refusal_missing("pipeline_parallel"))
def test_b07_pipeline_parallelism_is_refused(fault):
    """pytorch/torchtitan PR#793: several backwards an update, and gradients scaled after them."""
    assert "engine.pipeline=2" in message(changed(GOOD, pipeline_parallel=2))


class ByName(field.Naive):
    """Registered under each name: a shared parameter gets two hooks."""

    def register(self, param, options):
        super().register(param, options)
        super().register(param, options)


@faults(replaced_by(ByName))
def test_b09_a_tied_parameter_has_one_state_and_one_step(fault):
    """pytorch/pytorch PR#87397, Lightning-AI/pytorch-lightning PR#17710: two half steps give 0.800919."""
    model = nn.ModuleDict({"emb": nn.Linear(1, 1, bias=False), "head": nn.Linear(1, 1, bias=False)})
    model["head"].weight = p = model["emb"].weight
    nn.init.ones_(p)
    opt = bwdfuse.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, bwd_hook=True)
    (2 * model["emb"].weight + 3 * model["head"].weight).sum().backward()
    opt.step()
    assert p.item() == pytest.approx(0.9, abs=1e-6)
    assert len(opt.state) == 1 and opt.state[p]["step"] == 1
    with pytest.raises(ValueError):
        bwdfuse.AdamW([{"params": [p]}, {"params": [p]}])


class StepsAgain(field.Naive):
    """The trainer's own step() steps once more: both sides think that they do it."""

    def register(self, param, options):
        own = torch.optim.AdamW([param], **options)
        param.register_post_accumulate_grad_hook(lambda _: own.step())

    def step(self, closure=None):
        return torch.optim.AdamW.step(self, closure)


@faults(replaced_by(field.Naive), replaced_by(StepsAgain))
def test_b10_one_switch_owns_both_sides(fault):
    """LoganBooker/prodigy-plus-schedule-free#7, kohya-ss/sd-scripts#1834: half enabled, weights never changed."""
    p, opt = one()
    backward(p, 1.0)
    opt.step()
    assert p.item() == pytest.approx(0.9, abs=1e-6)  # not 0.8
    with pytest.raises(BwdFuseError):
        opt.step()  # no hook fired
    opt.param_groups[0]["params"] = [nn.Parameter(torch.ones(1))]  # whose hooks were never registered
    with pytest.raises(BwdFuseError, match="arm"):
        opt.step()


@faults(replaced_by(field.Naive))
def test_b11_the_invisible_step_is_counted(fault):
    """OpenLMLab/LOMO#14: nobody could tell whether weights were updated."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    opt = bwdfuse.AdamW(model.parameters(), bwd_hook=True)
    assert opt.stats()["updates"] == opt.stats()["param_steps"] == 0
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        opt.step()
    assert opt.stats()["updates"] == 3 and opt.stats()["param_steps"] == 12


@faults(field.late_readers_unguarded, replaced_by(field.Naive))
def test_b13_scaling_after_backward_cannot_pass_unnoticed(fault):
    """verl-project/verl PR#436, meta-pytorch/torchtune#1934: the mean over tokens was taken of gradients that were gone."""
    p, opt = one()
    (p * torch.ones(4)).mean().backward()  # the normalisation belongs here
    opt.step()
    assert opt.state[p]["exp_avg"].item() == pytest.approx(0.1 * 1.0)
    (p * torch.ones(4)).sum().backward()
    with pytest.raises(ConfigError):
        nn.utils.clip_grads_with_norm_([p], 1.0, torch.tensor(4.0))
    with pytest.raises(AttributeError):
        p.grad.div_(4)


class Trusting(field.Naive):
    """A gradient is taken for granted: the hook reads it without a look."""

    def register(self, param, options):
        own = torch.optim.AdamW([param], **options)

        def hook(p):
            p.grad.add_(0)
            own.step()
            p.grad = None

        param.register_post_accumulate_grad_hook(hook)


@faults(replaced_by(Trusting))
def test_b14_a_parameter_frozen_later_or_without_a_gradient(fault):
    """kohya-ss/sd-scripts#1369: the hook met a sub-model in a state it did not expect."""
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    for p in b.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))  # somebody else's, and it runs first
    opt = bwdfuse.AdamW([*a.parameters(), *b.parameters()], bwd_hook=True)
    before = copy.deepcopy((a.state_dict(), b.state_dict()))
    b(a(torch.ones(1, 2))).sum().backward()
    with pytest.warns(UserWarning, match="had no gradient"):
        opt.step()
    b.requires_grad_(False)
    b(a(torch.ones(1, 2))).sum().backward()
    opt.step()
    assert not torch.equal(a.weight, before[0]["weight"]) and torch.equal(b.weight, before[1]["weight"])


class Everything(field.Naive):
    """Hooks for frozen parameters too: torch refuses to register those."""

    def register(self, param, options):
        param.register_post_accumulate_grad_hook(lambda p: None)


@faults(replaced_by(Everything))
def test_b17_frozen_parameters_are_skipped_and_never_silently_untrained(fault):
    """pytorch/ao#1209, Outsider565/LoRA-GA#9: model.parameters() with frozen ones crashed."""
    p, frozen = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1), requires_grad=False)
    opt = bwdfuse.AdamW([p, frozen], lr=0.1, weight_decay=0.0, bwd_hook=True)
    assert "1 of 2 parameters trainable" in repr(opt)
    backward(p, 1.0)
    opt.step()
    assert p.item() == pytest.approx(0.9, abs=1e-6) and frozen.item() == 1.0
    frozen.requires_grad_()
    (p + frozen).sum().backward()
    with pytest.raises(BwdFuseError, match=r"params'\]\[1\]"):
        opt.step()


def test_facts_used_here_are_those_that_can_be_honoured():
    validate.check(ON, replace(GOOD))
