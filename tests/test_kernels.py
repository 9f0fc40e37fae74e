"""The kernels give the same bits on every instruction set, the right values, and touch nothing else."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from kernel_reference import (
    BF16,
    F32,
    FORMATS,
    HYPER,
    ISAS,
    adamw_float64,
    bits,
    digest,
    random_arrays,
    step,
    sum_of_squares,
    ulp,
)

from bwdfuse import _C

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")

# Every remainder of every vector width and of the 64-element block, then the edges of the 1024-element tile and of the
# 16384-element chunk of the sums.
SIZES = [*range(132), *(m + d for m in (192, 256, 1024, 2048, 16384, 32768, 49152) for d in (-17, -1, 0, 1, 15, 16))]
BETAS = [(0.9, 0.999), (0.0, 0.99), (0.5, 0.0), (0.95, 0.98)]

DENORMAL = 1e-42
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, DENORMAL, -DENORMAL, 1.2e-38, 3e38, -3e38, 1e19, 1e-23, 1.0, -1.0], np.float32
)


@pytest.fixture(params=FORMATS)
def fmt(request):
    return request.param


@pytest.fixture(params=ISAS)
def isa(request):
    return request.param


def special_arrays(fmt):
    """Every combination of special values in the four arrays (exp_avg_sq without the impossible negatives)."""
    grid = np.meshgrid(SPECIAL, SPECIAL, SPECIAL, SPECIAL[~(SPECIAL < 0)])
    param, grad, state = FORMATS[fmt]
    return [a.ravel().astype(d) for a, d in zip(grid, (param, grad, state, state), strict=True)]


def assert_all_isas_agree(arrays, **kwargs):
    outcomes = {}
    for isa in ISAS:
        copies = [a.copy() for a in arrays]
        sums = step(copies, isa=isa, **kwargs)
        assert (bits(copies[1]) == bits(arrays[1])).all(), f"{isa} wrote to grad"
        outcomes[isa] = (digest(copies), repr(sums))
    assert len(set(outcomes.values())) == 1, outcomes


def test_several_isas_are_compared():
    """Guards the tests below against a build or a machine that has nothing to compare."""
    info = _C.isa_info()
    assert info["built"][-1] == "baseline" and set(info["possible"]) <= set(info["built"])
    if len(info["possible"]) == 1:
        pytest.skip("this machine runs the baseline alone")


@pytest.mark.parametrize("n", SIZES)
def test_same_bits_on_every_isa(fmt, n):
    arrays = random_arrays(n, fmt, seed=n)
    assert_all_isas_agree(arrays, step=1 + n, betas=BETAS[n % len(BETAS)], maximize=bool(n % 2))


def test_same_bits_for_special_values(fmt):
    assert_all_isas_agree(special_arrays(fmt), step=3)
    assert_all_isas_agree(special_arrays(fmt), step=3, eps=0.0, lr=0.0, maximize=True)


@pytest.mark.parametrize(
    "hyper",
    [
        dict(lr=0.0),
        dict(lr=1e-45),
        dict(lr=1e-30, eps=1e-3),
        dict(lr=3e38),
        dict(lr=1.0, weight_decay=1.0),
        dict(lr=1.0, weight_decay=1e3),
        dict(eps=0.0),
        dict(eps=3e38),
        dict(step=1e15),
        dict(betas=(0.999999999, 0.9999999999)),
    ],
    ids=str,
)
def test_same_bits_for_extreme_hypers(fmt, hyper):
    assert_all_isas_agree(random_arrays(1000, fmt, seed=5), **hyper)


def test_bits_are_those_of_every_release(fmt, isa):
    """A failure here means that runs resumed across versions change: raise the major version, or find the mistake."""
    raw = np.arange(1, 4 * 4001 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)
    values = ((raw.astype(np.float64) / 2**23) - 1).reshape(4, 4001)
    param, grad, state = FORMATS[fmt]
    arrays = [
        values[0].astype(param),
        values[1].astype(grad),
        (values[2] * 0.1).astype(state),
        (values[3] ** 2).astype(state),
    ]
    step(arrays, isa=isa, lr=0.5, weight_decay=0.1)
    pinned = {
        "f32": "65c11a4ef6e476cc",
        "bf16 with f32 states": "517a277afed00af6",
        "bf16": "0c1a36e7d87f64c2",
    }
    assert digest(arrays) == pinned[fmt]


@pytest.mark.parametrize("offset", [1, 3, 7, 8, 15, 17])
def test_any_start_and_nothing_beside_it(fmt, isa, offset):
    """Elements may start anywhere; bytes before and after the arrays stay as they were."""
    for n in (0, 1, 15, 16, 17, 63, 64, 65, 129, 1025):
        expected = random_arrays(n, fmt, seed=n)
        padded, views = [], []
        for array in expected:
            buffer = np.full(offset + n + 70, 0x5A, np.uint8).repeat(array.itemsize).view(array.dtype)
            buffer[offset : offset + n] = array
            padded.append(buffer)
            views.append(buffer[offset : offset + n])
        step(expected, isa=isa)
        step(views, isa=isa)
        assert digest(views) == digest(expected)
        for buffer in padded:
            assert (buffer[:offset].view(np.uint8) == 0x5A).all(), "wrote before the array"
            assert (buffer[offset + n :].view(np.uint8) == 0x5A).all(), "wrote past the array"


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("betas", BETAS)
def test_values_are_those_of_the_maths(fmt, isa, betas, maximize):
    """Within 3 ULP of the largest addend of float64 maths; a bfloat16 store adds half a ULP of its own."""
    arrays = random_arrays(4099, fmt, seed=11, scale=(1.0, 0.3, 0.1, 0.3))
    kwargs = {**HYPER, "lr": 1e-2, "betas": betas, "step": 7, "maximize": maximize}
    exact = adamw_float64(*arrays, **kwargs)
    step(arrays, isa=isa, **kwargs)
    for name, got, (want, largest) in zip(
        ("exp_avg", "exp_avg_sq", "param"), (arrays[2], arrays[3], arrays[0]), exact, strict=True
    ):
        allowed = 3 * ulp(largest) + (0.5 * ulp(abs(want) * 1.01, BF16) if got.dtype == BF16 else 0)
        assert (abs(got.astype(np.float64) - want) <= allowed).all(), name


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 64, 100, 1024, 16383, 16384, 16385, 40000])
def test_sum_of_squares_has_the_promised_bits(fmt, isa, n):
    arrays = random_arrays(n, fmt, seed=n)
    want = sum_of_squares(arrays[1])
    assert step(arrays, isa=isa) == (want, 0)


def test_sum_neither_overflows_nor_underflows(isa):
    n = 4096
    for exponent in (127, -149):
        arrays = [np.zeros(n, F32), np.full(n, 2.0**exponent, F32), np.zeros(n, F32), np.zeros(n, F32)]
        assert step(arrays, isa=isa)[0] == n * 2.0 ** (2 * exponent)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_nonfinite_elements_are_counted_one_by_one(fmt, isa, bad):
    n = 50_001
    where = np.array([0, 1, 63, 64, 16383, 16384, 16390, 40000, n - 1])
    arrays = random_arrays(n, fmt, seed=1)
    arrays[1][where] = bad
    total, count = step(arrays, isa=isa)
    assert count == len(where)
    assert not np.isfinite(total)
    assert np.isnan(total) == np.isnan(bad)


@pytest.mark.parametrize("beta2", [0.999, 0.5])
def test_infinite_state_does_not_turn_into_nan(isa, beta2):
    """exp_avg_sq at inf, after one overflow of grad^2, freezes its element as in torch; it must not poison it.

    Nor may a beta2 that float32 holds exactly, whose low part could be zero: 0 * inf is NaN.
    """
    param, grad, exp_avg, exp_avg_sq = (np.full(64, x, F32) for x in (1.0, 0.5, 0.1, np.inf))
    step([param, grad, exp_avg, exp_avg_sq], isa=isa, weight_decay=0.0, betas=(0.9, beta2))
    assert (param == 1.0).all() and (exp_avg_sq == np.inf).all() and np.isfinite(exp_avg).all()


def test_infinite_param_stays_infinite(isa):
    arrays = [np.full(64, x, F32) for x in (-np.inf, 0.5, 0.1, 1.0)]
    step(arrays, isa=isa, weight_decay=0.0)
    assert (arrays[0] == -np.inf).all()


@pytest.mark.parametrize("payload", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001])
def test_nan_stays_nan_in_a_bf16_store(isa, payload):
    """A payload of ones would carry out of the exponent when it is rounded, and come back as zero."""
    arrays = [np.ones(64, d) for d in (BF16, BF16, F32, F32)]
    arrays[2][:] = np.array([payload], np.uint32).view(F32)
    step(arrays, isa=isa)
    assert np.isnan(arrays[0].astype(F32)).all()


def test_huge_gradient_does_not_overflow_early(isa):
    """(1 - beta2) * grad * grad is taken from the left, so 5e20 squares to 2.5e38 and not to inf."""
    arrays = [np.full(16, x, F32) for x in (1.0, 5e20, 0.0, 0.0)]
    step(arrays, isa=isa)
    assert np.isfinite(arrays[3]).all()


def every_bf16_neighbourhood():
    """Around every bfloat16: itself, the tie above it, and the floats beside both."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    return np.concatenate([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(np.float32)


def test_bf16_store_rounds_to_nearest_even(isa):
    """With betas of 0 exp_avg becomes grad; a float32 gradient is not a format, so the value travels through param."""
    values = every_bf16_neighbourhood()
    finite = np.isfinite(values)
    stored = np.zeros(values.shape, BF16)
    # exp_avg <- 0.5 * exp_avg + 0.5 * grad: sums of two bfloat16 reach the neighbourhoods in float32.
    low, high = values.astype(BF16), np.where(finite, values, np.nan).astype(BF16)
    with np.errstate(all="ignore"):
        want = (0.5 * low.astype(np.float32) + 0.5 * np.roll(high, 1).astype(np.float32)).astype(BF16)
    stored[:] = low
    ones = np.ones(values.shape, BF16)
    step([ones, np.roll(high, 1), stored, ones.copy()], isa=isa, betas=(0.5, 0.9))
    same = bits(stored) == bits(want)
    assert same.all(), np.flatnonzero(~same)[:5]


@pytest.mark.parametrize("name", ISAS)
def test_environment_forces_an_isa(name):
    script = "import json; from bwdfuse import _C; print(json.dumps(_C.isa_info()['chosen']))"
    out = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "BWDFUSE_ISA": name},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(out.stdout) == name


def test_unknown_isa_is_refused_at_import():
    out = subprocess.run(
        [sys.executable, "-c", "from bwdfuse import _C"],
        env={**os.environ, "BWDFUSE_ISA": "sse9"},
        capture_output=True,
        text=True,
    )
    assert out.returncode != 0
    assert "ImportError: BWDFUSE_ISA=sse9" in out.stderr
    assert all(name in out.stderr.splitlines()[-1] for name in ISAS)


def test_widest_isa_is_chosen_by_default():
    if os.environ.get("BWDFUSE_ISA"):
        pytest.skip("BWDFUSE_ISA is set")
    info = _C.isa_info()
    assert info["chosen"] == info["possible"][0]


def test_rules_describe_adamw():
    rule = _C.rules()["adamw"]
    assert rule["states"] == ("exp_avg", "exp_avg_sq")
    assert rule["hypers"] == ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize")
    assert rule["defaults"] == dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2, maximize=0.0)


def test_build_info_says_what_was_compiled():
    info = _C.build_info()
    assert "-ffp-contract=off" in info["flags"]
    assert info["cuda"].startswith("CPU-only build: ")
