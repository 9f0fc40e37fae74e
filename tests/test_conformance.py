"""torch's own test data for Adam and AdamW: every option is honoured, with torch's result, or refused; every error is one."""

import copy
import math

import pytest
import torch
from torch import nn

import bwdfuse
from bwdfuse.errors import ConfigError

common = pytest.importorskip("torch.testing._internal.common_optimizers")

INFOS = [info for info in common.optim_db if info.name in ("Adam", "AdamW")]
STEPS = 12
#: Options that choose one of torch's implementations or are for CUDA graphs: refused here, by name.
REFUSED = ("capturable", "foreach", "differentiable")


def inputs():
    """Every set of options, those for CUDA also without the flag that is CUDA's alone; with each implementation flag."""
    for info in INFOS:
        seen = []
        for device in ("cpu", "cuda"):
            for given in info.optim_inputs_func(device):
                plain = {k: v for k, v in given.kwargs.items() if k != "capturable"}
                for kwargs in (given.kwargs, plain, *({**plain, flag: True} for flag in info.supported_impls)):
                    if str(kwargs) not in seen:
                        seen.append(str(kwargs))
                        yield pytest.param(
                            info, kwargs, id=f"{info.name}-{given.desc}-{'-'.join(kwargs) or 'defaults'}"
                        )


def params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((7, 5), (33,), (1, 1))
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def gradients(tensors, step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) for p in tensors]


def train(tensors, optimizer, scheduler=None, steps=STEPS):
    """Updates with gradients that do not depend on the parameters, through a real backward; returns the learning rates."""
    rates = []
    for step in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        loss = sum((p * g).sum() for p, g in zip(tensors, gradients(tensors, step), strict=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for one in scheduler or ():
            one.step(loss.detach()) if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau) else one.step()
    return rates


def assert_close(ours, theirs, steps=STEPS):
    """Both round every statement of every step; two float32 ULP of a value below 4 a step bound their distance."""
    for a, b in zip(ours, theirs, strict=True):
        assert not torch.isnan(a).any()
        assert (a - b).abs().max() <= steps * 2 * 4 * 2.0**-24


@pytest.mark.parametrize("bwd_hook", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize(("info", "kwargs"), list(inputs()))
def test_options(info, kwargs, bwd_hook, counted):
    ours = getattr(bwdfuse, info.name)
    tensors = params()
    named = [flag for flag in REFUSED if kwargs.get(flag)]
    if named:
        with pytest.raises(ConfigError, match="|".join(named)):
            ours(tensors, **kwargs, bwd_hook=bwd_hook)
        assert all(not p._post_accumulate_grad_hooks for p in tensors)
        counted("refused")
        return
    expected = params()
    train(expected, info.optim_cls(expected, **copy.deepcopy(kwargs)))
    train(tensors, ours(tensors, **copy.deepcopy(kwargs), bwd_hook=bwd_hook))
    assert_close(tensors, expected)
    counted("honoured")


@pytest.mark.parametrize("bwd_hook", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize(
    ("info", "makers"),
    [
        pytest.param(info, makers, id=f"{info.name}-{i}")
        for info in INFOS
        for i, makers in enumerate(info.scheduler_inputs)
    ],
)
def test_schedulers(info, makers, bwd_hook, counted):
    expected, tensors = params(), params()
    stock = info.optim_cls(expected, lr=0.01)
    optimizer = getattr(bwdfuse, info.name)(tensors, lr=0.01, bwd_hook=bwd_hook)
    rates = train(expected, stock, [make(stock) for make in makers], 30)
    assert train(tensors, optimizer, [make(optimizer) for make in makers], 30) == rates
    assert_close(tensors, expected, 30)
    counted("honoured")


@pytest.mark.parametrize("bwd_hook", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize(
    ("info", "number"),
    [
        pytest.param(info, i, id=f"{info.name}-{error.optimizer_error_input.desc}")
        for info in INFOS
        for i, error in enumerate(info.optim_error_inputs_func("cpu", torch.float32))
    ],
)
def test_error_inputs(info, number, bwd_hook, counted):
    """What torch refuses is refused, with the same type of exception; what torch warns of (it would be stepped twice), too."""
    error = info.optim_error_inputs_func("cpu", torch.float32)[number]
    given = error.optimizer_error_input
    assert error.error_on == common.OptimizerErrorEnum.CONSTRUCTION_ERROR
    tensors = params() if given.params is None else given.params
    expected = ValueError if error.error_type is UserWarning else error.error_type
    with pytest.raises(expected), pytest.warns() if error.error_type is UserWarning else pytest.MonkeyPatch().context():
        getattr(bwdfuse, info.name)(tensors, **given.kwargs, bwd_hook=bwd_hook)
    counted("refused")


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_signature_is_torch_s(name):
    """Every parameter of torch's constructor, in its order and with its default; ours come after."""
    import inspect

    theirs = list(inspect.signature(getattr(torch.optim, name)).parameters.values())
    ours = list(inspect.signature(getattr(bwdfuse, name)).parameters.values())
    assert [(p.name, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.kind) for p in theirs]
    for a, b in zip(ours, theirs, strict=False):
        assert a.default == b.default or (math.isclose(a.default, b.default))
    assert {p.name for p in ours[len(theirs) :]} == {"bwd_hook", "nonfinite", "state_dtype"}


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_state_is_torch_s(name, amsgrad):
    """Names, shapes, dtypes and order of the state, and what stands in a group."""
    theirs, ours = params(), params()
    stock = getattr(torch.optim, name)(theirs, amsgrad=amsgrad)
    optimizer = getattr(bwdfuse, name)(ours, amsgrad=amsgrad, bwd_hook=True)
    train(theirs, stock, steps=1)
    train(ours, optimizer, steps=1)
    a, b = stock.state_dict(), optimizer.state_dict()
    assert a["param_groups"] == [{k: v for k, v in g.items()} for g in b["param_groups"]]
    for i in a["state"]:
        assert list(a["state"][i]) == list(b["state"][i])
        for key, value in a["state"][i].items():
            assert (value.dtype, value.shape) == (b["state"][i][key].dtype, b["state"][i][key].shape)
    stock.load_state_dict(b)
    optimizer.load_state_dict(stock.state_dict())
