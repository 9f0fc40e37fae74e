"""The kernels give the same bits on every instruction set, the right values, and touch nothing else."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from kernel_reference import (
    BF16,
    F16,
    F32,
    FORMATS,
    HYPER,
    ISAS,
    RULES,
    bits,
    digest,
    exact_step,
    random_arrays,
    real_of,
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


@pytest.fixture(params=RULES)
def rule(request):
    return request.param


def special_arrays(fmt, rule):
    """Every combination of special values in the four arrays (exp_avg_sq without the impossible negatives)."""
    grid = np.meshgrid(SPECIAL, SPECIAL, SPECIAL, SPECIAL[~(SPECIAL < 0)])
    arrays = [a.ravel() for a in grid]
    if rule.endswith("_amsgrad"):
        arrays.append(np.random.default_rng(0).permutation(arrays[3]))
    param, grad, state = FORMATS[fmt]
    return [a.astype(d) for a, d in zip(arrays, (param, grad, state, state, state)[: len(arrays)], strict=True)]


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
    for rule in RULES:
        arrays = random_arrays(n, fmt, seed=n, rule=rule)
        assert_all_isas_agree(arrays, rule=rule, step=1 + n, betas=BETAS[n % len(BETAS)], maximize=bool(n % 2))


def test_same_bits_for_special_values(fmt, rule):
    arrays = special_arrays(fmt, rule)
    assert_all_isas_agree(arrays, rule=rule, step=3, weight_decay=0.1)
    assert_all_isas_agree(arrays, rule=rule, step=3, eps=0.0, lr=0.0, maximize=True)


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
def test_same_bits_for_extreme_hypers(fmt, rule, hyper):
    assert_all_isas_agree(random_arrays(1000, fmt, seed=5, rule=rule), rule=rule, **hyper)


#: Per format, the digests of adamw, adamw_amsgrad, adam and adam_amsgrad.
PINNED = {
    "f32": "65c11a4ef6e476cc 0aae12d8e1a9d662 7c45e535cc918d3b ce090ac418d24a07",
    "bf16 with f32 states": "517a277afed00af6 94154b1c25685f05 7b6377a02dbb7041 d57845bfdae8f7a1",
    "bf16": "0c1a36e7d87f64c2 4e94c2864048c1e9 0ddc002d88c08834 f30625bba4a9047f",
    "f32 with bf16 states": "9e276173c6c8a4b9 6f628966b399a0fb a0cae6fce5d428c2 48841db5c6cbb803",
    "f32 with bf16 grad": "fc9c6f2f7ddd42af aef4c52408e950c6 9d3e97659c84bd2d e1bc458364e730bb",
    "f32 with bf16 grad and states": "2701711b0e932a7d 0915edceb6ca53f8 1b896dc962d3da12 0e81b32b0fd870ca",
    "bf16 with f32 grad and states": "0ec7886cd5dc00c2 c6ff341ec9d66065 d050db151ba6e521 60906b1387476592",
    "bf16 with f32 grad": "0b951b67dd79298d 7eaf775c601e1d89 79ed049a061bdd6d 66b8e2f2ad8025a4",
    "f16 with f32 states": "41ec59fa14d98000 7f49d74d48ed1cb6 117e0b4cd8aed579 f6d4d392a466cf07",
    "f16 with f32 grad and states": "f6b69e2ffec8d240 9d7bbd0f1553b895 33389cc9dbe4b069 23af3124f9cdf3c2",
    "f64": "578cc4a1b11b838d 4b9814b88863974f 3c25be23b752de8b 7a2a85d115d54df3",
}


def test_bits_are_those_of_every_release(fmt, isa):
    """A failure here means that runs resumed across versions change: raise the major version, or find the mistake."""
    raw = np.arange(1, 5 * 4001 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)
    values = ((raw.astype(np.float64) / 2**23) - 1).reshape(5, 4001)
    param, grad, state = FORMATS[fmt]
    digests = []
    for rule in ("adamw", "adamw_amsgrad", "adam", "adam_amsgrad"):
        arrays = [
            values[0].astype(param),
            values[1].astype(grad),
            (values[2] * 0.1).astype(state),
            (values[3] ** 2).astype(state),
        ]
        if rule.endswith("_amsgrad"):
            arrays.append((values[4] ** 2).astype(state))
        step(arrays, rule=rule, isa=isa, lr=0.5, weight_decay=0.1)
        digests.append(digest(arrays))
    assert digests == PINNED[fmt].split()


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
def test_values_are_those_of_the_maths(fmt, isa, rule, betas, maximize):
    """Within 4 ULP of the largest addend of the exact value (six roundings of half of one to one ULP meet in the parameter, never
    all at their worst); a store to a smaller format adds half a ULP of its own.

    Where Adam's penalty and gradient cancel, the error would say something of the data alone; so they have one sign.
    """
    real, wider = real_of(fmt)
    arrays = random_arrays(4099, fmt, seed=11, scale=(1.0, 0.3, 0.1, 0.3), rule=rule)
    if not rule.startswith("adamw"):
        arrays[0] = np.copysign(
            arrays[0], -arrays[1].astype(arrays[0].dtype) if maximize else arrays[1].astype(arrays[0].dtype)
        )
    kwargs = {**HYPER, "lr": 1e-2, "weight_decay": 0.1, "betas": betas, "step": 7, "maximize": maximize}
    exact = exact_step(rule, arrays, **kwargs, real=wider)
    step(arrays, rule=rule, isa=isa, **kwargs)
    results = dict(zip(("param", "grad", *_C.rules()[rule]["states"]), arrays, strict=True))
    for name, (want, largest) in exact.items():
        got = results[name]
        allowed = 4 * ulp(largest, real)
        if got.dtype != real:
            allowed = allowed + 0.5 * ulp(abs(want) * 1.01, got.dtype)
        assert (abs(got.astype(wider) - want) <= allowed).all(), name


def test_maximum_propagates_nan_as_torch_does(fmt, isa):
    """A NaN that entered exp_avg_sq, and one that stands in max_exp_avg_sq, both stay to be seen."""
    arrays = [a[:4].copy() for a in random_arrays(4, fmt, rule="adamw_amsgrad")]
    arrays[3][0] = np.nan
    arrays[4][1] = np.nan
    step(arrays, rule="adamw_amsgrad", isa=isa)
    assert (np.isnan(arrays[4].astype(np.float64)) == [True, True, False, False]).all()
    assert (np.isnan(arrays[0].astype(np.float64)) == [True, True, False, False]).all()


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 64, 100, 1024, 16383, 16384, 16385, 40000])
def test_sum_of_squares_has_the_promised_bits(fmt, isa, n):
    arrays = random_arrays(n, fmt, seed=n)
    want = sum_of_squares(arrays[1])
    assert step(arrays, isa=isa) == (want, 0)


def test_sum_of_doubles_overflows_to_inf_and_counts_nothing(isa):
    """Squares of doubles can leave the range of a double, though every element is finite."""
    arrays = [np.full(40_000, x) for x in (1.0, 1e200, 0.0, 0.0)]
    assert step(arrays, isa=isa) == (np.inf, 0)
    arrays[1][17] = np.nan
    assert step(arrays, isa=isa)[1] == 1


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


def neighbourhood(dtype):
    """Around every number of a 16-bit format: itself, the tie above it, and the float32 numbers beside both."""
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    above = np.nextafter(values, dtype.type(np.inf))
    values, above = values.astype(np.float32), above.astype(np.float32)
    ties = (values.astype(np.float64) + above) / 2
    ties = np.where(np.isfinite(ties), ties, values).astype(np.float32)
    around = [values, ties]
    for toward in (-np.inf, np.inf):
        around += [np.nextafter(values, np.float32(toward)), np.nextafter(ties, np.float32(toward))]
    limits = np.array([65504, 65519.996, 65520, 65536, 1e30, 3.4e38, 1e-45, 2.0**-25, 2.0**-24 * 1.5], np.float32)
    return np.concatenate([*around, limits, -limits])


def stored(values, dtype, isa):
    """float32 values as a step stores them in a parameter: 0 - exp_avg / denom with nothing else in the way.

    beta1 of 0.5 halves exp_avg, since the gradient is zero. So it is doubled first, but for the largest, which denom doubles.
    """
    out = np.empty(values.shape, dtype)
    for large in (False, True):
        chosen = (abs(values) >= 1) == large
        some = values[chosen]
        arrays = [np.zeros(some.shape, dtype), *(np.zeros(some.shape, F32) for _ in range(3))]
        arrays[2][:] = -some if large else -2 * some
        lr = 1.0 if large else 0.5
        step(arrays, rule="adam", isa=isa, betas=(0.5, 0.0), eps=1.0, lr=lr, weight_decay=0.0)
        out[chosen] = arrays[0]
    return out


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_store_rounds_to_nearest_even(isa, dtype):
    values = neighbourhood(dtype)
    values = values[values != 0]  # zero's sign is lost in the sums
    assert values.size > 6 * 65536
    got, want = stored(values, dtype, isa), values.astype(dtype)
    wrong = bits(got) != bits(want)
    assert not wrong.any(), (values[wrong][:5], got[wrong][:5], want[wrong][:5])


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_16_bit_number_is_read_exactly(isa, dtype):
    """A step of lr zero writes the parameter that it read; with beta1 of zero exp_avg becomes the gradient."""
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    arrays = [values.copy(), *(np.zeros(values.shape, d) for d in (dtype, F32, F32))]
    step(arrays, isa=isa, lr=0.0)
    assert (bits(arrays[0]) == bits(values)).all()
    values = values[np.isfinite(values.astype(F32))]
    arrays = [np.zeros(values.shape, dtype), values.copy(), *(np.zeros(values.shape, F32) for _ in range(2))]
    assert step(arrays, isa=isa, betas=(0.0, 0.5)) == (sum_of_squares(values), 0)
    assert (arrays[2] == values.astype(F32)).all()


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
