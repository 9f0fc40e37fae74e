"""bwdfuse.AdamW as an optimizer: torch's contract, and fused = unfused = torch."""

import copy
import io
import pickle

import pytest
import torch
from same_bits import same_bits
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import bwdfuse
from bwdfuse.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_equals_unfused_bit_for_bit(mlp, train, dtype, exchange):
    off, on = mlp(dtype), mlp(dtype)
    opt_off, opt_on = bwdfuse.AdamW(off.parameters(), lr=0.01), bwdfuse.AdamW(on.parameters(), lr=0.01, bwd_hook=True)
    assert train(off, opt_off, 10) == train(on, opt_on, 10)
    assert same_bits(off, on)
    assert same_bits(opt_off.state_dict(), opt_on.state_dict())
    assert opt_off.grad_norm() == opt_on.grad_norm() > 0


def torch_kernel(param, grad, state, group, step):
    """torch's own fused AdamW where the native one stands."""
    torch._fused_adamw_(
        [param.detach()],
        [grad],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [torch.tensor(step)],
        lr=float(group["lr"]),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mechanism_equals_stock_through_the_kernel_seam(mlp, train, monkeypatch, dtype, exchange):
    stock, ours = mlp(dtype), mlp(dtype)
    opt_stock = torch.optim.AdamW(stock.parameters(), lr=0.01, fused=True)
    monkeypatch.setattr(bwdfuse.AdamW, "_kernel", staticmethod(torch_kernel))
    opt = bwdfuse.AdamW(ours.parameters(), lr=0.01, bwd_hook=True)
    assert train(stock, opt_stock, 10) == train(ours, opt, 10)
    assert same_bits(stock, ours)
    assert same_bits(opt_stock.state_dict()["state"], opt.state_dict()["state"])
    assert opt.stats()["native_steps"] == 0 and opt.stats()["param_steps"] == 40


def test_close_to_torch(mlp, train):
    """One fp32 ULP of the largest addend a step at most, of values below 1: 10 steps stay within 10 * 2**-24 * 2."""
    stock, ours = mlp(), mlp()
    train(stock, torch.optim.AdamW(stock.parameters(), lr=1e-3), 10)
    train(ours, bwdfuse.AdamW(ours.parameters(), lr=1e-3, bwd_hook=True), 10)
    for a, b in zip(stock.parameters(), ours.parameters(), strict=True):
        assert (a - b).abs().max() <= 20 * 2.0**-24


@pytest.mark.parametrize("maximize", [False, True])
def test_known_values(maximize):
    """Worked by hand from the formula of the paper."""
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    opt = bwdfuse.AdamW([p], lr=0.1, weight_decay=0.01, bwd_hook=True, maximize=maximize)
    sign = -1.0 if maximize else 1.0
    (p * torch.tensor([0.5, -0.25]) * sign).sum().backward()
    opt.step()
    assert torch.allclose(p, torch.tensor([0.899, -1.898]), atol=1e-6)
    assert torch.allclose(opt.state[p]["exp_avg"], torch.tensor([0.05, -0.025]), atol=1e-8)
    assert torch.allclose(opt.state[p]["exp_avg_sq"], torch.tensor([2.5e-4, 6.25e-5]), atol=1e-9)
    assert opt.state[p]["step"] == 1.0 and p.grad is None


def test_gradients_are_gone_after_backward_and_stay_without_the_hook(mlp):
    for hook in (True, False):
        model = mlp()
        opt = bwdfuse.AdamW(model.parameters(), bwd_hook=hook)
        model(torch.ones(1, 7)).sum().backward()
        assert all((p.grad is None) == hook for p in model.parameters())
        opt.step()
        assert all((p.grad is None) == hook for p in model.parameters())


def test_is_a_torch_optimizer(mlp):
    opt = bwdfuse.AdamW(mlp().named_parameters(), bwd_hook=True)
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.param_groups[0]["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    stock = torch.optim.AdamW(mlp().named_parameters())
    assert set(opt.param_groups[0]) == set(stock.param_groups[0])
    assert opt.defaults == stock.defaults
    for scheduler in (torch.optim.lr_scheduler.CosineAnnealingLR, torch.optim.lr_scheduler.StepLR):
        scheduler(opt, 10)
    torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=10, cycle_momentum=False)


@pytest.mark.filterwarnings("error")
def test_scheduler_is_read_live(mlp, train):
    stock, ours = mlp(), mlp()
    results = []
    for model, opt in (
        (stock, torch.optim.AdamW(stock.parameters(), lr=0.1)),
        (ours, bwdfuse.AdamW(ours.parameters(), lr=0.1, bwd_hook=True)),
    ):
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: step / 10)
        train(model, opt, 1, scheduler=scheduler)
        results.append(scheduler.get_last_lr())
    assert results[0] == results[1] == [pytest.approx(0.01)]
    assert same_bits(stock, ours), "lr was 0 in the first update: no parameter may have moved"


def test_lr_tensor_is_read_live(one):
    lr = torch.tensor(0.1)
    p, opt = one(1.0, lr=lr, weight_decay=0.0, bwd_hook=True)
    p.sum().backward()
    opt.step()
    assert p.item() == pytest.approx(0.9)
    lr.fill_(0.0)
    before = p.detach().clone()
    p.sum().backward()
    opt.step()
    assert torch.equal(p, before) and opt.state[p]["step"] == 2


def test_param_groups_and_add_param_group():
    p, q, r = (nn.Parameter(torch.ones(3)) for _ in range(3))
    opt = bwdfuse.AdamW([{"params": [p], "lr": 0.1}, {"params": [q], "lr": 0.01}], weight_decay=0.0, bwd_hook=True)
    opt.add_param_group({"params": [r], "lr": 0.5})
    (p.sum() + q.sum() + r.sum()).backward()
    opt.step()
    for param, value in ((p, 0.9), (q, 0.99), (r, 0.5)):
        assert torch.allclose(param, torch.full((3,), value), atol=1e-6)
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": [p]})
    with pytest.raises(ConfigError, match="amsgrad"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(1))], "amsgrad": True})
    assert len(opt.param_groups) == 3
    (p.sum() + q.sum() + r.sum()).backward()
    opt.step()


def test_empty_group_round_trips(train):
    p = nn.Parameter(torch.ones(2))
    opt = bwdfuse.AdamW([{"params": [p]}, {"params": []}], bwd_hook=True)
    for _ in range(3):
        p.sum().backward()
        opt.step()
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    p.sum().backward()
    opt.step()
    assert opt.state[p]["step"] == 4


def test_tied_weight_is_stepped_once_with_the_whole_gradient():
    p = nn.Parameter(torch.tensor([1.0]))
    opt = bwdfuse.AdamW([p], lr=0.1, weight_decay=0.0, bwd_hook=True)
    (2 * p + 3 * p).sum().backward()
    opt.step()
    assert opt.state[p]["exp_avg"].item() == pytest.approx(0.5) and opt.state[p]["step"] == 1
    with pytest.raises(ConfigError, match="listed twice"), pytest.warns(UserWarning, match="duplicate"):
        bwdfuse.AdamW([p, p])


def test_frozen_parameter_is_left_alone_and_raises_once_it_has_a_gradient():
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    opt = bwdfuse.AdamW([p, q], lr=0.1, bwd_hook=True)
    (p + q).sum().backward()
    opt.step()
    assert torch.equal(q, torch.ones(2)) and opt.stats()["params_stepped"] == 1
    q.requires_grad_(True)
    (p + q).sum().backward()
    with pytest.raises(bwdfuse.BwdFuseError, match="was frozen when the hooks were armed.*arm()"):
        opt.step()
    opt.acknowledge_partial_update()
    opt.arm()
    (p + q).sum().backward()
    opt.step()
    assert not torch.equal(q, torch.ones(2))


def test_unused_parameter_is_neither_stepped_nor_decayed_and_named_once():
    p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    opt = bwdfuse.AdamW([("used", p), ("expert.7", q)], lr=0.1, weight_decay=0.1, bwd_hook=True)
    p.sum().backward()
    with pytest.warns(UserWarning, match="expert.7"):
        opt.step()
    p.sum().backward()
    opt.step()
    assert q.item() == 1.0 and opt.state[q]["step"] == 0 and opt.stats()["params_stepped"] == 1
    q.sum().backward()
    opt.step()
    assert q.item() == pytest.approx(1 * (1 - 0.01) - 0.1) and opt.state[q]["step"] == 1


def test_closure(one):
    p, opt = one(1.0, lr=0.1, weight_decay=0.0, bwd_hook=True)

    def closure():
        loss = (2 * p).sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 2.0
    assert p.item() == pytest.approx(0.9)


def test_step_hooks_run(one):
    p, opt = one(1.0, bwd_hook=True)
    seen = []
    handles = [
        opt.register_step_pre_hook(lambda *_: seen.append("pre")),
        opt.register_step_post_hook(lambda *_: seen.append("post")),
        register_optimizer_step_pre_hook(lambda *_: seen.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: seen.append("global post")),
    ]
    for _ in range(2):
        p.sum().backward()
        opt.step()
        for handle in handles:
            handle.remove()
    assert seen == ["global pre", "pre", "post", "global post"], "and none once they are removed"
    assert opt.stats()["updates"] == 2


def test_step_appears_in_a_profile(one):
    p, opt = one(1.0)
    p.sum().backward()
    with torch.profiler.profile() as profile:
        opt.step()
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}
    assert opt.stats()["updates"] == 1


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("hook", [False, True])
def test_copies_go_on_like_the_original(mlp, train, copier, hook):
    model = mlp()
    opt = bwdfuse.AdamW(model.parameters(), lr=0.01, bwd_hook=hook)
    train(model, opt, 3)
    model2, opt2 = copier((model, opt))
    assert opt2.armed == hook
    train(model, opt, 3, first=3)
    train(model2, opt2, 3, first=3)
    assert same_bits(model, model2) and same_bits(opt.state_dict(), opt2.state_dict())


def save_and_load(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("hook", [False, True])
def test_resume_is_exact_and_loads_safely(mlp, train, hook):
    straight = mlp()
    opt = bwdfuse.AdamW(straight.parameters(), lr=0.01, bwd_hook=hook)
    train(straight, opt, 3)
    saved = save_and_load({"model": straight.state_dict(), "opt": opt.state_dict()})
    train(straight, opt, 3, first=3)
    resumed = mlp()
    resumed.load_state_dict(saved["model"])
    opt2 = bwdfuse.AdamW(resumed.parameters(), lr=0.5, bwd_hook=not hook)
    opt2.load_state_dict(saved["opt"])
    train(resumed, opt2, 3, first=3)
    assert same_bits(straight, resumed) and same_bits(opt.state_dict(), opt2.state_dict())


@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}, {"capturable": True}, {}])
def test_state_goes_to_torch_and_back(mlp, train, flags, monkeypatch):
    """Through torch's kernel on both sides the weights stay equal to the bit; flags of the file do not stick."""
    monkeypatch.setattr(bwdfuse.AdamW, "_kernel", staticmethod(torch_kernel))
    stock = mlp()
    opt = torch.optim.AdamW(stock.parameters(), lr=0.01, fused=True)
    train(stock, opt, 3)
    saved = save_and_load({"model": stock.state_dict(), "opt": opt.state_dict()})
    for group in saved["opt"]["param_groups"]:
        group.update({"fused": None, "foreach": None, **flags})
    model = mlp()
    model.load_state_dict(saved["model"])
    ours = bwdfuse.AdamW(model.parameters(), bwd_hook=True)
    ours.load_state_dict(saved["opt"])
    train(stock, opt, 1, first=3)
    train(model, ours, 1, first=3)
    assert same_bits(stock, model)
    back = torch.optim.AdamW(model.parameters(), fused=False)
    back.load_state_dict(save_and_load(ours.state_dict()))
    assert (
        back.param_groups[0]["lr"] == 0.01
        and not back.param_groups[0]["capturable"]
        and back.param_groups[0]["foreach"] is None
    )
    train(model, back, 1, first=4)


@pytest.mark.parametrize("fused", [True, False, None])
def test_stock_goes_on_with_the_step_it_was_built_with(mlp, train, monkeypatch, fused):
    """torch takes `fused` from the file: stock -> ours -> stock must not leave its own kernel on the way."""
    monkeypatch.setattr(bwdfuse.AdamW, "_kernel", staticmethod(torch_kernel))
    model = mlp()
    ours = bwdfuse.AdamW(model.parameters(), lr=0.01, fused=fused, bwd_hook=True)
    train(model, ours, 2)
    ours.load_state_dict(torch.optim.AdamW(model.parameters(), fused=not fused, foreach=False).state_dict())
    stock = torch.optim.AdamW(model.parameters(), fused=fused)
    stock.load_state_dict(ours.state_dict())
    assert ours.param_groups[0]["fused"] is stock.param_groups[0]["fused"] is fused


def test_loaded_step_of_any_kind_becomes_float32(mlp, train):
    model = mlp()
    opt = bwdfuse.AdamW(model.parameters(), bwd_hook=True)
    train(model, opt, 2)
    for kind in (2, 2.0, torch.tensor(2), torch.tensor([2.0], dtype=torch.float64)):
        state = copy.deepcopy(opt.state_dict())
        for entry in state["state"].values():
            entry["step"] = kind
        opt.load_state_dict(state)
        for p in model.parameters():
            step = opt.state[p]["step"]
            assert step.dtype == torch.float32 and step.shape == () and step == 2
    train(model, opt, 1)


def break_missing(d):
    del d["state"][1]["exp_avg_sq"]


def break_shape(d):
    d["state"][1]["exp_avg"] = torch.zeros(3)


def break_kind(d):
    d["state"][1]["exp_avg"] = d["state"][1]["exp_avg"].numpy()


def break_step(d):
    d["state"][1]["step"] = torch.tensor(float("nan"))


def break_amsgrad(d):
    d["param_groups"][0]["amsgrad"] = True


def break_version(d):
    d["bwdfuse_format"] = 99


def break_groups(d):
    d["param_groups"].append(d["param_groups"][0])


def break_lr(d):
    d["param_groups"][0]["lr"] = float("nan")


def break_betas(d):
    d["param_groups"][0]["betas"] = (0.9, 1.5)


@pytest.mark.parametrize(
    ("breakage", "text"),
    [
        (break_missing, "lacks exp_avg_sq"),
        (break_shape, r"has shape \(3,\)"),
        (break_kind, r"has no tensor \(ndarray\)"),
        (break_step, "step of parameter 1 .* is nan"),
        (break_amsgrad, "amsgrad"),
        (break_version, "upgrade bwdfuse"),
        (break_groups, "different number of parameter groups"),
        (break_lr, "lr=nan"),
        (break_betas, r"betas\[1\]"),
    ],
)
def test_bad_checkpoint_is_refused_and_changes_nothing(mlp, train, breakage, text):
    model = mlp()
    opt = bwdfuse.AdamW(model.parameters(), bwd_hook=True)
    train(model, opt, 2)
    before = copy.deepcopy(opt.state_dict())
    bad = copy.deepcopy(before)
    breakage(bad)
    with pytest.raises(ValueError, match=text):
        opt.load_state_dict(bad)
    assert same_bits(before, opt.state_dict())
    train(model, opt, 1)


def test_unknown_keys_are_kept_and_missing_group_options_defaulted(mlp, train):
    model = mlp()
    opt = bwdfuse.AdamW(model.parameters(), bwd_hook=True)
    train(model, opt, 1)
    state = copy.deepcopy(opt.state_dict())
    state["state"][0]["note"] = torch.ones(2)
    state["param_groups"][0]["mine"] = "x"
    del state["param_groups"][0]["maximize"], state["bwdfuse_format"]
    opt.load_state_dict(state)
    assert opt.param_groups[0]["mine"] == "x" and opt.param_groups[0]["maximize"] is False
    train(model, opt, 1)
    assert torch.equal(opt.state_dict()["state"][0]["note"], torch.ones(2))


def test_parameter_without_saved_state_starts_at_step_one(one):
    p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    stock = torch.optim.AdamW([p, q], lr=0.1, weight_decay=0.0)
    for _ in range(3):
        p.sum().backward()
        stock.step()
        stock.zero_grad()
    opt = bwdfuse.AdamW([p, q], bwd_hook=True)
    opt.load_state_dict(stock.state_dict())
    q.sum().backward()
    with pytest.warns(UserWarning, match="had no gradient"):
        opt.step()
    assert q.item() == pytest.approx(0.9) and opt.state[q]["step"] == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": -1.0}, "lr=-1"),
        ({"eps": -1e-8}, "eps"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]=1.0"),
        ({"betas": (0.9, float("nan"))}, r"betas\[1\]=nan"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"foreach": True}, "foreach"),
        ({"capturable": True}, "capturable"),
        ({"differentiable": True}, "differentiable"),
        ({"nonfinite": "ignore"}, "'off', 'skip' or 'raise'"),
        ({"lr": torch.tensor([0.1, 0.2])}, "one element"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"betas": (torch.tensor([0.9, 0.8]), torch.tensor(0.9))}, r"betas\[0\].*one element"),
        ({"betas": (0.9, torch.tensor(0.99))}, "both to tensors"),
        ({"betas": 0.9}, "set a pair"),
        ({"betas": (0.9,)}, "set a pair"),
        ({"state_dtype": torch.float16}, r"state_dtype=torch.float16.*torch.float32, torch.bfloat16 or None"),
        ({"state_dtype": "int8"}, "state_dtype='int8'"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options, text):
    p = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match=text):
        bwdfuse.AdamW([p], bwd_hook=True, **options)
    assert not p._post_accumulate_grad_hooks
    with pytest.raises(TypeError, match="unexpected keyword"):
        bwdfuse.AdamW([p], foo=1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.Parameter(torch.ones(2, device="meta")), "meta device"),
        (lambda: nn.Parameter(torch.ones(2).to(torch.float8_e5m2)), "float8_e5m2"),
        (lambda: nn.Parameter(torch.ones(2, dtype=torch.cfloat)), "complex64"),
        (
            lambda: nn.Parameter(torch.ones(2, requires_grad=False), requires_grad=False),
            "no parameter .* requires a gradient",
        ),
    ],
)
def test_parameters_that_cannot_be_armed_are_refused(make, text):
    good = make()
    with pytest.raises(ConfigError, match=text):
        bwdfuse.AdamW([good], bwd_hook=True)
    mixed = nn.Parameter(torch.ones(2))
    if good.requires_grad:
        with pytest.raises(ConfigError, match=text):
            bwdfuse.AdamW([("fine", mixed), ("bad", good)], bwd_hook=True)
        assert not mixed._post_accumulate_grad_hooks, "a refused arming must leave no hook behind"


def test_foreign_optimizer_in_backward_is_refused():
    from torch.distributed.optim import _apply_optimizer_in_backward

    p = nn.Parameter(torch.ones(2))
    _apply_optimizer_in_backward(torch.optim.SGD, [p], {"lr": 0.1})
    with pytest.raises(ConfigError, match="_apply_optimizer_in_backward"):
        bwdfuse.AdamW([p], bwd_hook=True)


def test_second_optimizer_on_an_armed_parameter_is_refused(one):
    p, opt = one(1.0, bwd_hook=True)
    with pytest.raises(ConfigError, match=r"another bwdfuse optimizer: call its disarm\(\)"):
        bwdfuse.AdamW([p], bwd_hook=True)
    opt.disarm()
    second = bwdfuse.AdamW([p], bwd_hook=True)
    second.arm()
    p.sum().backward()
    second.step()
    assert opt.state[p]["step"] == 0 and second.state[p]["step"] == 1


def test_stale_gradient_at_arming_is_refused(one):
    p = nn.Parameter(torch.ones(2))
    p.sum().backward()
    with pytest.raises(ConfigError, match="zero_grad"):
        bwdfuse.AdamW([p], bwd_hook=True)


def test_disarm_gives_torch_s_behaviour_back(one):
    p, opt = one(1.0, lr=0.1, weight_decay=0.0, bwd_hook=True)
    p.sum().backward()
    opt.step()
    opt.disarm()
    p.sum().backward()
    assert p.grad is not None and p.item() == pytest.approx(0.9)
    opt.step()
    assert p.item() == pytest.approx(0.8, abs=1e-6) and opt.stats()["updates"] == 2


def test_stats_and_repr(mlp, train):
    model = mlp()
    opt = bwdfuse.AdamW(model.parameters(), bwd_hook=True)
    assert opt.stats() == dict(updates=0, params_stepped=0, param_steps=0, native_steps=0, grad_norm=0.0, skipped=0)
    train(model, opt, 3)
    stats = opt.stats()
    assert (stats["updates"], stats["params_stepped"], stats["param_steps"], stats["native_steps"]) == (3, 4, 12, 12)
    assert "armed: steps inside backward; 4 of 4 parameters" in repr(opt)
    opt.disarm()
    assert "not armed" in repr(opt)


def test_grad_norm_is_exact_even_where_float32_squares_leave_its_range():
    p, q = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    opt = bwdfuse.AdamW([p, q], bwd_hook=True)
    for scale in (1.0, 1e-30, 1e30):
        (3 * scale * p + 4 * scale * q).sum().backward()
        assert opt.grad_norm() == pytest.approx(5 * scale, rel=1e-6), "also before step() closes the update"
        opt.step()
        assert opt.grad_norm() == opt.stats()["grad_norm"] == pytest.approx(5 * scale, rel=1e-6)


def test_saved_state_while_half_done_is_refused(one):
    p, opt = one(1.0, bwd_hook=True)
    p.sum().backward()
    with pytest.raises(bwdfuse.AccumulationError):
        p.sum().backward()
    with pytest.raises(bwdfuse.AccumulationError, match="half done"):
        opt.state_dict()
