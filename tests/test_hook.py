"""The hook itself: guards, layouts, bad input, failures half-way, threads. Weights never change when it refuses."""

import copy
import threading

import pytest
import torch
from same_bits import same_bits
from torch import nn

import bwdfuse
from bwdfuse.errors import AccumulationError, BwdFuseError, ConfigError

pytestmark = pytest.mark.usefixtures("exchange")


def armed(*params, **options):
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    return bwdfuse.AdamW(named, **{"lr": 0.1, "weight_decay": 0.0, "bwd_hook": True, **options})


def test_reads_tensors_the_way_the_fixture_says(exchange):
    assert armed(nn.Parameter(torch.ones(1)))._plan.exchange == (exchange == "exchange")


# ---- one update is one step ------------------------------------------------------------------------------------------


def test_second_backward_raises_names_the_parameter_and_steps_nothing_twice():
    p = nn.Parameter(torch.tensor([1.0]))
    opt = armed(p)
    (0.5 * p).sum().backward()
    once = p.detach().clone()
    with pytest.raises(
        AccumulationError, match=r"'p0' received a second gradient in update 1.*gradient accumulation.*acknowledge"
    ):
        (1.5 * p).sum().backward()
    assert torch.equal(p, once) and opt.state[p]["step"] == 1
    for call in (opt.step, opt.state_dict, lambda: p.sum().backward()):
        with pytest.raises(AccumulationError, match="half done: 1 of 1 parameters"):
            call()
    opt.acknowledge_partial_update()
    assert p.grad is None
    p.sum().backward()
    opt.step()
    assert opt.stats()["updates"] == 1 and opt.state[p]["step"] == 2


def test_zero_grad_does_not_rearm_the_guard():
    p = nn.Parameter(torch.ones(1))
    opt = armed(p)
    p.sum().backward()
    opt.zero_grad()
    with pytest.raises(AccumulationError, match="second gradient"):
        p.sum().backward()


def test_two_losses_over_disjoint_parameters_are_one_update():
    p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    opt = armed(p, q)
    p.sum().backward()
    q.sum().backward()
    opt.step()
    assert opt.stats()["params_stepped"] == 2 and torch.allclose(torch.stack([p, q]), torch.tensor(0.9))


def test_step_without_backward_raises():
    p = nn.Parameter(torch.ones(1))
    opt = armed(p)
    with pytest.raises(BwdFuseError, match="no hook has fired.*backward"):
        opt.step()
    p.sum().backward()
    opt.step()


def test_gradient_put_by_hand_raises_at_step():
    p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    opt = armed(p, q)
    p.sum().backward()
    q.grad = torch.ones(1)
    with pytest.raises(BwdFuseError, match="'p1' holds a gradient that its hook should have consumed"):
        opt.step()
    assert q.item() == 1.0
    q.grad = None
    with pytest.warns(UserWarning):
        opt.step()


def test_retain_graph_and_stale_saved_tensor():
    """The raw write bumps the version, so autograd itself refuses a graph that needs the old value."""
    w = nn.Parameter(torch.ones(2, 2))
    opt = armed(w)
    x = torch.ones(2, 2, requires_grad=True)
    loss = (x @ w @ w).sum()
    loss.backward(retain_graph=True)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_grad_does_not_step():
    p = nn.Parameter(torch.ones(1))
    opt = armed(p)
    torch.autograd.grad((p * p).sum(), p)
    assert p.item() == 1.0 and opt.state[p]["step"] == 0


def test_parameter_replaced_after_arming():
    model = nn.Linear(2, 2, bias=False)
    opt = bwdfuse.AdamW(model.parameters(), bwd_hook=True)
    model.weight = nn.Parameter(torch.ones(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(BwdFuseError, match="no hook has fired.*replaced after arming"):
        opt.step()
    opt.param_groups[0]["params"] = [model.weight]
    with pytest.raises(ConfigError, match=r"replaced after arming.*arm\(model\)"):
        opt.step()
    model.weight.grad = None
    opt.arm(model)
    assert len(opt.state) == 1, "the state of the old weight is dropped"
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    assert opt.stats()["params_stepped"] == 1


def test_data_swapped_under_the_parameter_is_followed():
    p = nn.Parameter(torch.ones(4))
    opt = armed(p)
    p.data = torch.full((4,), 5.0)
    p.sum().backward()
    opt.step()
    assert torch.allclose(p, torch.full((4,), 4.9))


def test_state_swapped_under_the_parameter_is_followed():
    """Nothing of the state may be cached: a trainer that offloads or reloads it replaces tensors or whole dicts."""
    p = nn.Parameter(torch.ones(4))
    opt = armed(p)
    p.sum().backward()
    opt.step()
    fresh = {"step": torch.tensor(6.0), "exp_avg": torch.full((4,), 2.0), "exp_avg_sq": torch.full((4,), 1.0)}
    opt.state[p] = fresh
    p.sum().backward()
    opt.step()
    assert fresh["step"] == 7.0 and torch.allclose(fresh["exp_avg"], torch.tensor(1.9))
    fresh["exp_avg"] = torch.zeros(4)
    p.sum().backward()
    opt.step()
    assert torch.allclose(fresh["exp_avg"], torch.tensor(0.1))


def test_group_dicts_are_replaced_under_the_hook():
    p = nn.Parameter(torch.ones(1))
    opt = armed(p, lr=0.5)
    opt.param_groups[0] = {**opt.param_groups[0], "lr": 0.0}
    p.sum().backward()
    opt.step()
    assert p.item() == 1.0


# ---- layouts ---------------------------------------------------------------------------------------------------------


def reference(params, grads, steps=3):
    """torch's AdamW on contiguous copies."""
    copies = [nn.Parameter(p.detach().clone().contiguous()) for p in params]
    opt = bwdfuse.AdamW(copies, lr=0.1, weight_decay=0.0)
    for _ in range(steps):
        for c, g in zip(copies, grads, strict=True):
            c.grad = g.clone().contiguous()
        opt.step()
    return copies


@pytest.mark.parametrize("steps", [3])
def test_any_layout_gives_the_bits_of_the_contiguous_one(steps):
    base = torch.randn(6, 4)
    params = [
        nn.Parameter(base.clone().t()),
        nn.Parameter(torch.randn(5, 8)[:, ::2]),
        nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(33)[1:]),
        nn.Parameter(torch.tensor(3.0)),
        nn.Parameter(torch.empty(0, 3)),
    ]
    grads = [torch.randn(p.shape) for p in params]
    expected = reference(params, grads, steps)
    strides = [p.stride() for p in params]
    opt = armed(*params)
    for _ in range(steps):
        torch.autograd.backward([(p * g).sum() for p, g in zip(params, grads, strict=True)])
        opt.step()
    for p, e, s in zip(params, expected, strides, strict=True):
        assert torch.equal(p, e) and p.stride() == s


def test_gradients_with_other_strides():
    """Conv1d over a transposed input yields a gradient of strides (5, 1, 1) for a parameter of strides (5, 5, 1)."""
    conv = nn.Conv1d(1, 4, 5, bias=False)
    twin = copy.deepcopy(conv)
    x = torch.randn(2, 16, 1)
    opt, stock = bwdfuse.AdamW(conv.parameters(), bwd_hook=True), bwdfuse.AdamW(twin.parameters())
    for _ in range(5):
        conv(x.mT).square().sum().backward()
        opt.step()
        twin(x.mT).square().sum().backward()
        for p in twin.parameters():
            p.grad = p.grad.contiguous()
        stock.step()
        stock.zero_grad()
    assert same_bits(conv, twin)


def test_expanded_gradient():
    p = nn.Parameter(torch.randn(3, 4))
    q = nn.Parameter(p.detach().clone())
    a, b = armed(p), bwdfuse.AdamW([q], lr=0.1, weight_decay=0.0)
    p.sum().backward()
    a.step()
    q.grad = torch.ones(3, 4)
    b.step()
    assert torch.equal(p, q)


def test_lazily_negated_gradient_keeps_its_sign():
    """A gradient whose negative bit is set has memory of the wrong sign."""
    p = nn.Parameter(torch.ones(3))
    opt = armed(p)
    p.register_hook(lambda g: torch._neg_view(g))
    p.sum().backward()
    opt.step()
    assert torch.allclose(p, torch.full((3,), 1.1)) and torch.allclose(opt.state[p]["exp_avg"], torch.tensor(-0.1))


def test_custom_function_that_returns_no_gradient():
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, g):
            return None, g

    p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    opt = armed(p, q)
    Nothing.apply(p, q).sum().backward()
    with pytest.warns(UserWarning, match="p0"):
        opt.step()
    assert p.item() == 1.0 and opt.state[p]["step"] == 0 and q.item() == pytest.approx(0.9)


# ---- refusals: the parameter keeps every bit -------------------------------------------------------------------------


def refused(opt, param, backward, text):
    before = copy.deepcopy((param.detach(), dict(opt.state[param])))
    with pytest.raises(BwdFuseError, match=text):
        backward()
    assert same_bits(before[0], param.detach()) and same_bits(before[1], dict(opt.state[param]))
    with pytest.raises(AccumulationError, match="half done: 0 of"):
        opt.step()
    opt.acknowledge_partial_update()


def test_sparse_gradient():
    emb = nn.Embedding(5, 2, sparse=True)
    opt = bwdfuse.AdamW(emb.named_parameters(), bwd_hook=True)
    refused(
        opt,
        emb.weight,
        lambda: emb(torch.tensor([1, 1])).sum().backward(),
        "gradient of parameter 'weight'.*sparse_coo.*sparse=False",
    )


def test_gradient_of_another_dtype():
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    p.grad_dtype = torch.float64
    opt = armed(p)
    refused(opt, p, lambda: (p.double() * 2).sum().backward(), r"storage \(param bfloat16, grad float64")


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("lr", float("nan"), "lr of param_groups.0. is nan"),
        ("betas", (0.9, 1.0), "beta2 of param_groups.0. is 1.0"),
        ("eps", float("inf"), "eps"),
        ("weight_decay", -1.0, "weight_decay"),
    ],
)
def test_hyperparameter_spoilt_during_training(key, value, text):
    p = nn.Parameter(torch.ones(2))
    opt = armed(p)
    good = opt.param_groups[0][key]
    opt.param_groups[0][key] = value
    refused(opt, p, lambda: p.sum().backward(), text)
    opt.param_groups[0][key] = good
    p.sum().backward()
    opt.step()


def test_amsgrad_switched_on_during_training():
    p = nn.Parameter(torch.ones(2))
    opt = armed(p)
    opt.param_groups[0]["amsgrad"] = True
    refused(opt, p, lambda: p.sum().backward(), "amsgrad")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda s: s.pop("exp_avg"), "has no 'exp_avg'"),
        (lambda s: s.update(exp_avg=torch.zeros(3)), "exp_avg of parameter 'p0' has 3 elements"),
        (
            lambda s: s.update(exp_avg=torch.zeros(2, dtype=torch.float64)),
            "storage .param float32, grad float32, state float64",
        ),
        (lambda s: s.update(exp_avg=torch.zeros(2, dtype=torch.bfloat16)), "no native step"),
        (lambda s: s.update(exp_avg=[0.0, 0.0]), "is .*, not a tensor"),
        (lambda s: s.update(exp_avg=torch.zeros(1).expand(2)), "one element by two indices"),
        (lambda s: s.update(exp_avg=s["exp_avg_sq"]), "shares memory"),
        (lambda s: s.update(exp_avg=torch.zeros(2, device="meta")), "exp_avg of parameter 'p0'"),
        (lambda s: s.update(step=torch.tensor(-1.0)), "counts updates from 0"),
        (lambda s: s.update(step=torch.tensor(float("nan"))), "counts updates from 0"),
        (lambda s: s.update(step=torch.tensor(3, dtype=torch.int64)), "step of parameter 'p0'"),
        (lambda s: s.update(step=3), "is 3, not a tensor"),
        (lambda s: s.update(step=torch.tensor(2.0**24)), "counts updates"),
    ],
)
def test_spoilt_state(spoil, text):
    p = nn.Parameter(torch.ones(2))
    opt = armed(p)
    spoil(opt.state[p])
    before = p.detach().clone()
    with pytest.raises(BwdFuseError, match=text):
        p.sum().backward()
    assert torch.equal(p, before)


def test_gradient_that_is_the_parameter_itself():
    p = nn.Parameter(torch.ones(2))
    opt = armed(p)
    p.register_hook(lambda g: p.detach())
    refused(opt, p, lambda: p.sum().backward(), "shares memory with its gradient")


def test_unarmed_step_checks_all_before_it_changes_the_first():
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt = bwdfuse.AdamW([p, q])
    (p.sum() + q.sum()).backward()
    opt.step()
    opt.state[q]["exp_avg"] = torch.zeros(3)
    before = copy.deepcopy((p.detach(), q.detach(), dict(opt.state[p])))
    with pytest.raises(BwdFuseError, match="exp_avg"):
        opt.step()
    assert same_bits(before, (p.detach(), q.detach(), dict(opt.state[p])))


# ---- non-finite gradients --------------------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x):
        hidden = self.l1(x)
        hidden.register_hook(lambda g: g * float("nan"))  # l2 is stepped before, l1 sees NaN
        return self.l2(hidden).sum()


@pytest.mark.parametrize("hook", [True, False])
def test_nonfinite_skip_leaves_only_that_parameter(hook):
    model = TwoLayers()
    before = copy.deepcopy(model.state_dict())
    opt = bwdfuse.AdamW(model.named_parameters(), bwd_hook=hook, nonfinite="skip")
    model(torch.ones(1, 2)).backward()
    opt.step()
    assert torch.equal(model.l1.weight, before["l1.weight"]) and not torch.equal(model.l2.weight, before["l2.weight"])
    state = opt.state[model.l1.weight]
    assert state["step"] == 0 and not state["exp_avg"].any() and not state["exp_avg_sq"].any()
    assert opt.stats()["skipped"] == 1 and opt.stats()["native_steps"] == 1


def test_nonfinite_raise_names_the_parameter():
    model = TwoLayers()
    before = copy.deepcopy(model.state_dict())
    opt = bwdfuse.AdamW(model.named_parameters(), bwd_hook=True, nonfinite="raise")
    with pytest.raises(BwdFuseError, match="'l1.weight' has 4 non-finite elements of 4.*skip"):
        model(torch.ones(1, 2)).backward()
    assert torch.equal(model.l1.weight, before["l1.weight"]) and not torch.equal(model.l2.weight, before["l2.weight"])
    with pytest.raises(AccumulationError, match="1 of 2 parameters were stepped"):
        opt.step()
    assert [opt.state[p]["step"].item() for p in model.parameters()] == [0.0, 1.0], "the journal"


def test_nonfinite_raise_after_backward_changes_nothing_at_all():
    model = TwoLayers()
    before = copy.deepcopy(model.state_dict())
    opt = bwdfuse.AdamW(model.named_parameters(), nonfinite="raise")
    model(torch.ones(1, 2)).backward()
    with pytest.raises(BwdFuseError, match="l1.weight"):
        opt.step()
    assert same_bits(before, model.state_dict())


def test_nonfinite_off_does_what_torch_does():
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    ours, stock = armed(p), torch.optim.AdamW([q], lr=0.1, weight_decay=0.0)
    for param, opt in ((p, ours), (q, stock)):
        (param * torch.tensor([float("inf"), 1.0])).sum().backward()
        opt.step()
    assert torch.equal(p.isnan(), q.isnan()) and ours.stats()["grad_norm"] == float("inf")


# ---- loss scaling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
def test_enabled_grad_scaler_is_refused_before_anything_is_changed(sharded):
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    p = nn.Parameter(torch.ones(1))
    opt = armed(p)
    if sharded:
        scaler = ShardedGradScaler(device="cpu", init_scale=65536.0, process_group=None)
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    with pytest.raises(ConfigError, match=r"GradScaler.*bfloat16.*bwd_hook=False"):
        scaler.scale(p.sum())
    assert p.item() == 1.0
    torch.amp.GradScaler("cpu", enabled=False).scale(p.sum()).backward()
    opt.step()
    assert p.item() == pytest.approx(0.9)
    opt.disarm()
    assert scaler.scale(p.sum()).item() == pytest.approx(0.9 * 65536)


CLIPPERS = {
    "norm": lambda p: torch.nn.utils.clip_grad_norm_(p, 1.0),
    "norm of a generator": lambda p: torch.nn.utils.clip_grad_norm_((q for q in p), 1.0),
    "norm of a tensor": lambda p: torch.nn.utils.clip_grad_norm_(p[0], 1.0),
    "norm, imported before": lambda p, clip=torch.nn.utils.clip_grad_norm_: clip(p, float("inf")),
    "known norm": lambda p: torch.nn.utils.clip_grads_with_norm_(p, 1.0, torch.tensor(5.0)),
    "value": lambda p: torch.nn.utils.clip_grad_value_(p, 0.1),
}


@pytest.mark.parametrize("clip", CLIPPERS.values(), ids=CLIPPERS.keys())
def test_clipping_of_what_was_stepped_raises_instead_of_doing_nothing(clip):
    """Stock in-backward stepping: the norm of no gradients is 0, which no bound clips."""
    p, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt = armed(p)
    (p * torch.tensor([3.0, 4.0])).sum().backward()
    with pytest.raises(ConfigError, match=r"parameter 'p0' is stepped inside backward.*max_grad_norm=0.*grad_norm\(\)"):
        clip([p])
    opt.step()
    assert opt.grad_norm() == pytest.approx(5.0)
    # what this optimizer does not step is clipped as ever
    (other * torch.tensor([3.0, 4.0])).sum().backward()
    clip([other])
    assert other.grad is not None
    opt.disarm()
    p.sum().backward()
    clip([p])
    opt.step()


# ---- failures half-way -----------------------------------------------------------------------------------------------


class Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ctx.error


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()])
def test_exception_in_backward_is_never_taken_for_a_whole_update(error):
    first, last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    opt = bwdfuse.AdamW([("first", first.weight), ("last", last.weight)], bwd_hook=True)
    before = first.weight.detach().clone()
    with pytest.raises(type(error)):
        last(Raise.apply(first(torch.ones(1, 2)), error)).sum().backward()
    with pytest.raises(
        AccumulationError,
        match="1 of 2 parameters were stepped before AccumulationError: backward did not reach its end",
    ):
        opt.step()
    assert torch.equal(first.weight, before) and opt.state[last.weight]["step"] == 1
    opt.acknowledge_partial_update()
    last(first(torch.ones(1, 2))).sum().backward()
    opt.step()


def test_exception_before_the_first_hook_changes_nothing():
    layer = nn.Linear(2, 2)
    opt = bwdfuse.AdamW(layer.parameters(), bwd_hook=True)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError):
        Raise.apply(layer(torch.ones(1, 2)), ValueError()).sum().backward()
    assert same_bits(before, layer.state_dict())
    layer(torch.ones(1, 2)).sum().backward()
    opt.step()


def test_checkpoint_heals_a_half_done_update(mlp, train):
    model, twin = mlp(), mlp()
    opt, other = bwdfuse.AdamW(model.parameters(), bwd_hook=True), bwdfuse.AdamW(twin.parameters(), bwd_hook=True)
    train(model, opt, 2)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    with pytest.raises(AccumulationError):
        for _ in range(2):
            model(torch.ones(1, 7)).sum().backward()
    model.load_state_dict(saved[0])
    for p in model.parameters():
        p.grad = None
    opt.load_state_dict(saved[1])
    train(model, opt, 2, first=2)
    train(twin, other, 4)
    assert same_bits(model, twin)


def test_optimizer_deleted_takes_its_hooks_along():
    p = nn.Parameter(torch.ones(1))
    opt = armed(p)
    del opt
    p.sum().backward()
    assert p.item() == 1.0 and p.grad is not None


def test_hook_that_outlives_its_optimizer_says_so():
    p = nn.Parameter(torch.ones(1))
    opt = armed(p)
    hook = opt._plan.slots[0].hook
    del opt
    p.grad = torch.ones(1)
    with pytest.raises(BwdFuseError, match="optimizer of parameter 'p0' is gone"):
        hook(p)


def test_hook_called_with_another_tensor():
    p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    opt = armed(p)
    q.grad = torch.ones(1)
    with pytest.raises(BwdFuseError, match="another tensor"):
        opt._plan.slots[0].hook(q)
    with pytest.raises(BwdFuseError, match="another tensor"):
        armed(nn.Parameter(torch.ones(1)))._plan.slots[0].hook(object())
    assert q.item() == 1.0


def test_rearming_in_the_middle_of_an_update_is_refused():
    p = nn.Parameter(torch.ones(1))
    opt = armed(p)
    p.sum().backward()
    with pytest.raises(AccumulationError, match="middle of an update"):
        opt.arm()
    with pytest.raises(AccumulationError, match="middle of an update"):
        opt.add_param_group({"params": [("q", nn.Parameter(torch.ones(1)))]})
    assert len(opt.param_groups) == 1
    opt.step()


def test_failed_rearming_leaves_the_hooks_as_they_were():
    p = nn.Parameter(torch.ones(1))
    opt = armed(p)
    with pytest.raises(ConfigError, match="meta"):
        opt.add_param_group({"params": [("bad", nn.Parameter(torch.ones(1, device="meta")))]})
    assert opt.armed and len(opt.param_groups) == 1
    p.sum().backward()
    opt.step()
    assert p.item() == pytest.approx(0.9)


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_two_threads_never_step_a_parameter_twice_in_an_update():
    """One thread is inside the kernel, without the GIL, when the other's hook comes for the same parameter.

    Only hooks race here: two backwards at once over one model race in torch itself as soon as any hook clears a gradient.
    """
    p = nn.Parameter(torch.zeros(1 << 20))
    opt = armed(p)
    opt._begin_backward = lambda: None
    hook, start, refused = opt._plan.slots[0].hook, threading.Barrier(2), []

    def run():
        start.wait()
        for _ in range(20):
            p.grad = torch.ones_like(p)
            try:
                hook(p)
            except AccumulationError as exc:
                refused.append(str(exc))

    for update in range(1, 6):
        threads = [threading.Thread(target=run) for _ in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert opt.state[p]["step"].item() == update
        opt.acknowledge_partial_update()
    assert len(refused) == 5 * 39, "40 calls an update, of which one steps"


def test_backward_from_another_thread_counts_as_the_same_update():
    p = nn.Parameter(torch.ones(1))
    opt = armed(p)
    caught = []

    def run():
        try:
            p.sum().backward()
        except AccumulationError as exc:
            caught.append(str(exc))

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(caught) == 1 and "second gradient" in caught[0] and opt.state[p]["step"] == 1


def test_other_threads_run_while_a_large_step_does():
    """The GIL is free during the kernel: a Python thread makes progress inside one call of the hook."""
    p = nn.Parameter(torch.zeros(1 << 24))
    opt = armed(p)
    p.grad = torch.ones_like(p)
    hook = opt._plan.slots[0].hook
    ticks, running = [0], threading.Event()

    def count():
        while not running.is_set():
            ticks[0] += 1

    opt._begin_backward = lambda: ticks.__setitem__(0, 0)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        hook(p)
        seen = ticks[0]
    finally:
        running.set()
        thread.join()
    assert seen > 0
    opt._plan.end_backward()
    opt.step()
