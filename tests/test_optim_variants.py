"""Adam, amsgrad, and every storage: which rule runs, which dtype the states have, what is refused."""

import copy
import pickle
import warnings

import pytest
import torch
from same_bits import same_bits
from torch import nn

import bwdfuse
from bwdfuse.errors import BwdFuseError, ConfigError

CLASSES = {"AdamW": bwdfuse.AdamW, "Adam": bwdfuse.Adam}
#: dtype of the parameters, of their gradients (None: theirs), the option, and the dtype that the states then have.
STORAGES = [
    (torch.float32, None, None, torch.float32),
    (torch.float32, None, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16, None, torch.float32),
    (torch.float32, torch.bfloat16, "bfloat16", torch.bfloat16),
    (torch.bfloat16, None, None, torch.bfloat16),
    (torch.bfloat16, None, "float32", torch.float32),
    (torch.bfloat16, torch.float32, None, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.float32, torch.float32),
    (torch.float16, None, None, torch.float32),
    (torch.float16, torch.float32, None, torch.float32),
    (torch.float64, None, None, torch.float64),
]


def build(cls, dtype, grad_dtype=None, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5)).to(dtype)
    if grad_dtype is not None:
        for param in model.parameters():
            param.grad_dtype = grad_dtype
    return model, CLASSES[cls](model.parameters(), lr=0.01, weight_decay=0.1, **options)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_fused_equals_unfused_and_resumes_bit_for_bit(train, cls, storage, amsgrad, exchange):
    dtype, grad_dtype, asked, expected = storage
    options = {"state_dtype": asked, "amsgrad": amsgrad}
    off, opt_off = build(cls, dtype, grad_dtype, **options)
    on, opt_on = build(cls, dtype, grad_dtype, **options, bwd_hook=True)
    assert train(off, opt_off, 4) == train(on, opt_on, 4)
    assert same_bits(off, on) and same_bits(opt_off.state_dict(), opt_on.state_dict())
    names = ["step", "exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad
    for state in opt_on.state.values():
        assert list(state) == names
        assert {state[name].dtype for name in names[1:]} == {expected}
    resumed, opt_resumed = build(cls, dtype, grad_dtype, **options, bwd_hook=True)
    resumed.load_state_dict(on.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is rounded
        opt_resumed.load_state_dict(copy.deepcopy(opt_on.state_dict()))
    assert train(on, opt_on, 3, first=4) == train(resumed, opt_resumed, 3, first=4)
    assert same_bits(on, resumed) and same_bits(opt_on.state_dict(), opt_resumed.state_dict())


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("cls", CLASSES)
def test_float64_is_torch_s(train, cls, amsgrad):
    """In float64 the two round differently in the last bits alone: 10 steps, values below 4."""
    ours, optimizer = build(cls, torch.float64, amsgrad=amsgrad, bwd_hook=True)
    stock, _ = build(cls, torch.float64)
    train(ours, optimizer, 10)
    train(stock, getattr(torch.optim, cls)(stock.parameters(), lr=0.01, weight_decay=0.1, amsgrad=amsgrad), 10)
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        assert (a - b).abs().max() <= 10 * 8 * 2.0**-50


def test_float16_survives_zero_gradients_where_stock_makes_nan():
    """1e-8 is zero in float16: stock's denominator is zero there, and 0 / 0 is NaN."""
    stock, ours = (nn.Parameter(torch.ones(5, dtype=torch.float16)) for _ in range(2))
    for param, optimizer in (
        (stock, torch.optim.AdamW([stock], foreach=False)),
        (ours, bwdfuse.AdamW([ours], bwd_hook=True)),
    ):
        (param * 0.0).sum().backward()
        optimizer.step()
    assert stock.isnan().all()
    assert torch.equal(ours, torch.full_like(ours, 1 - 1e-3 * 1e-2))


@pytest.mark.parametrize("cls", CLASSES)
def test_decay_is_coupled_in_adam_alone(cls):
    """A zero gradient: AdamW decays by lr * weight_decay; Adam's first step is lr in the sign of the penalty."""
    param = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = CLASSES[cls]([param], lr=0.1, weight_decay=0.5, eps=0.0 if cls == "Adam" else 1e-8, bwd_hook=True)
    (param * 0.0).sum().backward()
    optimizer.step()
    assert param.item() == pytest.approx(2.0 - 0.1 if cls == "Adam" else 2.0 * (1 - 0.05), abs=1e-15)
    assert optimizer.grad_norm() == 0.0  # of the gradient, not of the penalty


def test_amsgrad_keeps_the_largest_denominator():
    """betas (.9, .9), one gradient of 1 and then small ones: the maximum holds the step size down (worked in float64)."""
    param = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = bwdfuse.AdamW([param], lr=0.01, betas=(0.9, 0.9), weight_decay=0.0, amsgrad=True, bwd_hook=True)
    m = v = largest = 0.0
    expected = 1.0
    for t in range(1, 52):
        g = 1.0 if t == 1 else 0.01
        m, v = 0.9 * m + 0.1 * g, 0.9 * v + 0.1 * g * g
        largest = max(largest, v)
        expected -= 0.01 / (1 - 0.9**t) * m / (largest**0.5 / (1 - 0.9**t) ** 0.5 + 1e-8)
        (param * g).sum().backward()
        optimizer.step()
    assert param.item() == pytest.approx(expected, abs=1e-13)
    assert expected == pytest.approx(0.9351604, abs=1e-6)  # 0.8464785 without the maximum


@pytest.mark.parametrize("cls", CLASSES)
def test_amsgrad_of_a_group_or_file_must_be_the_optimizer_s(train, cls):
    model, optimizer = build(cls, torch.float32, amsgrad=True, bwd_hook=True)
    plain, opt_plain = build(cls, torch.float32, bwd_hook=True)
    train(model, optimizer, 1)
    train(plain, opt_plain, 1)
    before = copy.deepcopy(opt_plain.state_dict())
    with pytest.raises(ConfigError, match=rf"{cls}\(amsgrad=True\): every param group.*build {cls}\(amsgrad=True\)"):
        opt_plain.load_state_dict(optimizer.state_dict())
    assert same_bits(before, opt_plain.state_dict())
    with pytest.raises(ConfigError, match=rf"build {cls}\(amsgrad=False\)"):
        optimizer.load_state_dict(opt_plain.state_dict())
    with pytest.raises(ConfigError, match="amsgrad=True"):
        opt_plain.add_param_group({"params": [nn.Parameter(torch.ones(2))], "amsgrad": True})
    with pytest.raises(ConfigError, match="amsgrad=True"):
        CLASSES[cls]([{"params": [nn.Parameter(torch.ones(2))], "amsgrad": True}])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "amsgrad": True})
    optimizer.param_groups[0]["amsgrad"] = False
    with pytest.raises(ConfigError, match="amsgrad=False"):
        train(model, optimizer, 1)


def test_files_of_the_other_class_are_refused():
    """torch's Adam takes `decoupled_weight_decay` from the file and turns into the other rule without a word."""
    param = nn.Parameter(torch.ones(3))
    saved = {name: getattr(torch.optim, name)([param]).state_dict() for name in CLASSES}
    for name, cls in CLASSES.items():
        other = "Adam" if name == "AdamW" else "AdamW"
        with pytest.raises(ConfigError, match=rf"that is the rule of {other}; build bwdfuse.{other}"):
            cls([param]).load_state_dict(saved[other])
        cls([param]).load_state_dict(saved[name])
    with pytest.raises(ConfigError, match="build bwdfuse.AdamW"):
        bwdfuse.Adam([param], decoupled_weight_decay=True)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_keep_rule_and_state_dtype(train, cls, copier):
    model, optimizer = build(cls, torch.float32, amsgrad=True, state_dtype="bfloat16", bwd_hook=True)
    train(model, optimizer, 2)
    twin, opt_twin = copier((model, optimizer))
    assert (opt_twin.state_dtype, opt_twin._rule) == (torch.bfloat16, optimizer._rule)
    assert train(model, optimizer, 2, first=2) == train(twin, opt_twin, 2, first=2)
    assert same_bits(optimizer.state_dict(), opt_twin.state_dict())


@pytest.mark.parametrize("position", [0, 1])
def test_rounding_states_of_a_file_is_said(train, position):
    """float32 states of bfloat16 parameters: torch rounds them to the parameter's dtype without a word."""
    model, optimizer = build("AdamW", torch.bfloat16, state_dtype=torch.float32)
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    _, narrow = build("AdamW", torch.bfloat16)
    with pytest.warns(UserWarning, match="float32 and were rounded to torch.bfloat16.*state_dtype=torch.float32"):
        narrow.load_state_dict(saved)
    for i, param in enumerate(narrow.param_groups[0]["params"]):
        assert torch.equal(narrow.state[param]["exp_avg"], saved["state"][i]["exp_avg"].bfloat16())
    _, wide = build("AdamW", torch.bfloat16, state_dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wide.load_state_dict(saved)
        wide.load_state_dict(narrow.state_dict())  # from bfloat16 nothing is lost
    saved["state"][0]["exp_avg"].fill_(7.0)
    assert not (wide.state_dict()["state"][0]["exp_avg"] == 7.0).any()  # a copy


def test_state_goes_to_torch_in_its_own_dtype(train):
    model, optimizer = build("AdamW", torch.float16)
    train(model, optimizer, 2)
    stock = torch.optim.AdamW(model.parameters(), eps=1e-4)
    stock.load_state_dict(optimizer.state_dict())
    assert stock.state_dict()["state"][0]["exp_avg"].dtype == torch.float16


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.float64, torch.float32), (torch.float64, "bfloat16"), (torch.float16, torch.bfloat16)],
)
def test_storages_without_a_step_are_refused_before_training(dtype, state_dtype):
    param = nn.Parameter(torch.ones(3, dtype=dtype))
    with pytest.raises(ConfigError, match=rf"a {dtype} parameter has no step with such states; set state_dtype=None"):
        bwdfuse.AdamW([param], state_dtype=state_dtype, bwd_hook=True)
    assert not param._post_accumulate_grad_hooks


def test_a_gradient_dtype_without_a_step_is_refused_and_nothing_is_changed():
    param = nn.Parameter(torch.ones(3))
    param.grad_dtype = torch.float16
    optimizer = bwdfuse.AdamW([param], bwd_hook=True)
    with pytest.raises(BwdFuseError, match=r"storage \(param float32, grad float16, state float32\)"):
        param.sum().backward()
    assert torch.equal(param, torch.ones(3)) and optimizer.state[param]["step"] == 0


def test_tensor_betas_are_read_live():
    """As torch reads them: two tensors of any shape with one element."""
    betas = (torch.tensor([[0.9]]), torch.tensor(0.99))
    ours, stock = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    plain = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = bwdfuse.Adam([ours], betas=betas, bwd_hook=True)
    reference = torch.optim.Adam([stock], betas=(0.9, 0.99))
    unchanged = bwdfuse.Adam([plain], betas=(0.9, 0.99), bwd_hook=True)
    for step in range(4):
        if step == 2:
            betas[0].fill_(0.5)
            reference.param_groups[0]["betas"] = (0.5, 0.99)
        for param, opt in ((ours, optimizer), (stock, reference), (plain, unchanged)):
            (param * (step + 1.0)).sum().backward()
            opt.step()
            opt.zero_grad()
    # tensors hold 0.9 in float32
    torch.testing.assert_close(ours, stock, atol=1e-6, rtol=0)
    assert (ours - plain).abs().max() > 1e-5
