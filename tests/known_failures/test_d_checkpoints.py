"""Section D: state, saved and resumed."""

import copy
import io
import json

import field
import pytest
import torch
from field import altered, backward, checkpoints_unchecked, faults, one, parameters
from torch import nn

import bwdfuse
from bwdfuse.errors import ConfigError

STEP = 1e-6  # of a first step of lr 0.1: eps and rounding


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def model_and_optimizer(hook=True, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return model, bwdfuse.AdamW(model.parameters(), lr=0.01, bwd_hook=hook, **options)


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def forgets_state(self, state_dict):
    field.AdamW.load_state_dict(self, {**state_dict, "state": {}})


@faults(altered("state left behind", load_state_dict=forgets_state))
def test_b31_resume_is_exact(fault):
    """meta-pytorch/torchtune#2360, PR#2818, #2750: state in many small optimizers was not found again. Sharded: tests/distributed."""
    straight, opt = model_and_optimizer()
    train(straight, opt, 5)
    file = saved({"model": straight.state_dict(), "optimizer": opt.state_dict()})
    train(straight, opt, 5, first=5)
    resumed, again = model_and_optimizer()
    resumed.load_state_dict(file["model"])
    again.load_state_dict(file["optimizer"])
    train(resumed, again, 5, first=5)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(opt.state[a]["exp_avg_sq"], again.state[b]["exp_avg_sq"])


def keeps_dtypes(self, state_dict):
    field.AdamW.load_state_dict(self, state_dict)
    for i, param in enumerate(parameters(self)):
        self.state[param].update(copy.deepcopy(state_dict["state"][i]))


@faults(altered("as the file has it", load_state_dict=keeps_dtypes))
def test_b32_states_go_where_the_parameter_is_whatever_the_file_says(fault):
    """pytorch/pytorch#103256, #104767, huggingface/transformers#24708: step and moments stayed where the file put them."""
    model, opt = model_and_optimizer()
    train(model, opt, 2)
    file = copy.deepcopy(opt.state_dict())
    for entry in file["state"].values():
        for name in entry:
            entry[name] = entry[name].double()
    twin = copy.deepcopy(model)
    again = bwdfuse.AdamW(twin.parameters(), bwd_hook=True)
    with pytest.warns(UserWarning, match="float64 and were rounded to torch.float32$"):
        again.load_state_dict(file)
    train(model, opt, 1, first=2)
    train(twin, again, 1, first=2)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b) and again.state[b]["exp_avg"].dtype == torch.float32


def takes_flags(self, state_dict):
    field.AdamW.load_state_dict(self, state_dict)
    for group, old in zip(self.param_groups, state_dict["param_groups"], strict=True):
        group.update({name: old[name] for name in ("capturable", "foreach", "fused")})


@faults(altered("flags of the file", load_state_dict=takes_flags))
def test_b34_flags_of_the_implementation_do_not_come_from_the_file(fault):
    """pytorch/pytorch#80809: resume asserted, since the file said how the other optimizer was built."""
    model, opt = model_and_optimizer()
    stock = torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=0.01)
    train_params = stock.param_groups[0]["params"]
    for p in train_params:
        p.grad = torch.ones_like(p)
    stock.step()
    file = copy.deepcopy(stock.state_dict())
    file["param_groups"][0].update(fused=True, capturable=True, foreach=None)
    opt.load_state_dict(file)
    train(model, opt, 1)
    plain = torch.optim.AdamW(copy.deepcopy(model).parameters(), fused=False)
    plain.load_state_dict(opt.state_dict())
    assert not plain.param_groups[0]["capturable"]
    for p in plain.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    plain.step()


def needs_every_key(self, state_dict):
    for group in state_dict["param_groups"]:
        _ = group["maximize"], group["decoupled_weight_decay"]
    field.AdamW.load_state_dict(self, state_dict)


@faults(altered("every key demanded", load_state_dict=needs_every_key))
def test_b35_stock_goes_on_here_and_ours_there(fault):
    """NVIDIA/apex#577: a stock file lacked the fused optimizer's own key."""
    ours, opt = model_and_optimizer()
    theirs = copy.deepcopy(ours)
    for p in theirs.parameters():
        p._post_accumulate_grad_hooks = None
    stock = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    train(theirs, stock, 3)
    file = copy.deepcopy(stock.state_dict())
    for name in ("maximize", "decoupled_weight_decay"):
        del file["param_groups"][0][name]
    file["param_groups"][0]["somebody's"] = 1
    ours.load_state_dict(theirs.state_dict())
    opt.load_state_dict(file)
    train(ours, opt, 1, first=3)
    train(theirs, stock, 1, first=3)
    back = torch.optim.AdamW(ours.parameters())
    back.load_state_dict(opt.state_dict())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-7
        assert back.state[a]["step"] == 4
    assert opt.param_groups[0]["somebody's"] == 1


class Note:
    pass


def pickles_a_class(self):
    return {**field.AdamW.state_dict(self), "note": Note()}


@faults(altered("an object of its own in the file", state_dict=pickles_a_class))
def test_b39_the_file_holds_tensors_and_numbers_only(fault):
    """modelscope/ms-swift PR#10161, NovaSky-AI/SkyRL PR#1403: safe loading rejected the checkpoint."""
    model, opt = model_and_optimizer()
    train(model, opt, 1)
    opt.load_state_dict(saved(opt.state_dict()))


def one_counter_for_all(self, state_dict):
    field.AdamW.load_state_dict(self, state_dict)
    latest = max(float(entry["step"]) for entry in self.state.values())
    for entry in self.state.values():
        entry["step"].fill_(latest)


@faults(altered("one step counter for all", load_state_dict=one_counter_for_all))
def test_b40_a_parameter_that_was_never_used_starts_at_step_one(fault):
    """NVIDIA-NeMo/Automodel PR#2779: keys were missing for parameters without a gradient. Through DCP, into a fresh optimizer."""
    dcp_state = pytest.importorskip("torch.distributed.checkpoint.state_dict")

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def fresh():
        model = Two()
        return model, bwdfuse.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, bwd_hook=True)

    model, opt = fresh()
    with pytest.warns(UserWarning, match="had no gradient"):
        for _ in range(3):
            backward(model.used, 1.0)
            opt.step()
    file = saved(dcp_state.get_optimizer_state_dict(model, opt))
    model, opt = fresh()
    dcp_state.set_optimizer_state_dict(model, opt, copy.deepcopy(file))
    backward(model.unused, 1.0)
    opt.acknowledge_partial_update() if opt._plan.poison else None
    assert torch.allclose(model.unused, torch.full((2,), 0.9), atol=STEP)
    assert opt.state[model.unused]["step"] == 1


@faults(checkpoints_unchecked)
def test_b42_the_file_has_a_format_number(fault):
    """bitsandbytes-foundation/bitsandbytes PR#1647: a newer layout of the state broke resume."""
    model, opt = model_and_optimizer()
    file = copy.deepcopy(opt.state_dict())
    assert file["bwdfuse_format"] == 1
    with pytest.raises(ConfigError, match="upgrade"):
        opt.load_state_dict({**file, "bwdfuse_format": 99})
    del file["bwdfuse_format"]  # as stock torch writes it
    opt.load_state_dict(file)


def counts_in_groups(self):
    state = field.AdamW.state_dict(self)
    for group in state["param_groups"]:
        steps = [float(state["state"][i]["step"]) for i in group["params"]]
        group["step"] = max(steps) if steps else None
    return state


@faults(altered("a counter in each group", state_dict=counts_in_groups))
def test_b44_an_empty_group_comes_through(fault):
    """NVIDIA/TransformerEngine PR#3318: the counter of an empty group was null, and resume took a wrong step."""
    p = nn.Parameter(torch.ones(2))
    opt = bwdfuse.AdamW([{"params": [p]}, {"params": []}], lr=0.1, bwd_hook=True)
    for _ in range(3):
        backward(p, 1.0)
        opt.step()
    file = saved(opt.state_dict())
    numbers = json.loads(json.dumps(file["param_groups"]))
    assert all("step" not in group or group["step"] is not None for group in numbers)
    again = bwdfuse.AdamW([{"params": [p]}, {"params": []}], lr=0.1)
    again.load_state_dict(file)
    assert again.state[p]["step"] == 3


def test_a_first_step_is_what_these_tests_take_it_for():
    p, opt = one()
    backward(p, 1.0)
    opt.step()
    assert abs(p.item() - 0.9) <= STEP
