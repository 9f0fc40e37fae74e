"""The NumPy entry point: known values, and every wrong argument named and refused before anything is written."""

import inspect
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bwdfuse import _C
from bwdfuse.functional import StepResult, adamw_

ARRAYS = ("param", "grad", "exp_avg", "exp_avg_sq")
BF16 = np.dtype(ml_dtypes.bfloat16)


def arrays(param, grad, dtype=np.float32):
    param, grad = np.array(param, dtype), np.array(grad, dtype)
    return [param, grad, np.zeros_like(param), np.zeros_like(param)]


def test_first_step_from_the_formula():
    a = arrays([1.0, -2.0], [0.5, -0.25])
    result = adamw_(*a, step=1, lr=0.1, weight_decay=0.01)
    np.testing.assert_allclose(a[0], [0.899, -1.898], rtol=1e-7)
    np.testing.assert_allclose(a[2], [0.05, -0.025], rtol=1e-7)
    np.testing.assert_allclose(a[3], [0.00025, 0.0000625], rtol=1e-6)
    assert result == StepResult(grad_sq_sum=0.3125, nonfinite=0)


def test_eps_stands_outside_the_root():
    a = arrays([1.0], [1e-3])
    adamw_(*a, step=1, lr=0.1, eps=1e-3, weight_decay=0.0)
    np.testing.assert_allclose(a[0], [0.95], rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_zero_lr_moves_the_states_alone(dtype):
    """Also where a product with a rounded 1 - lr * weight_decay would lose a bit: in the smallest numbers."""
    param = np.array([1.0, -2.0, 0.0, 3e38, 1.2e-38, 1.5e-38, 2.9e-38, 1e-40, 1e-45], dtype)
    a = arrays(param, np.full(param.shape, 0.5), dtype)
    adamw_(*a, step=1, lr=0.0)
    assert (a[0] == param).all()
    assert (a[2] != 0).all() and (a[3] != 0).all()


def test_maximize_is_a_step_for_the_negative_gradient():
    rng = np.random.default_rng(0)
    values, grad = rng.standard_normal(100), rng.standard_normal(100)
    up, down = arrays(values, grad), arrays(values, -grad)
    adamw_(*up, step=1, maximize=True)
    adamw_(*down, step=1)
    for i in (0, 2, 3):
        assert (up[i] == down[i]).all()


def test_bfloat16_rounds_the_float32_result_once():
    single, half = arrays([1.0, -2.0], [0.5, -0.25]), arrays([1.0, -2.0], [0.5, -0.25], BF16)
    adamw_(*single, step=1, lr=0.1)
    adamw_(*half, step=1, lr=0.1)
    for i in (0, 2, 3):
        assert (half[i] == single[i].astype(BF16)).all()


def test_bfloat16_with_float32_states():
    single, mixed = arrays([1.0, -2.0], [0.5, -0.25]), arrays([1.0, -2.0], [0.5, -0.25])
    mixed[:2] = [a.astype(BF16) for a in mixed[:2]]
    adamw_(*single, step=1, lr=0.1)
    adamw_(*mixed, step=1, lr=0.1)
    assert (mixed[0] == single[0].astype(BF16)).all()
    assert (mixed[2] == single[2]).all() and (mixed[3] == single[3]).all()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4)])
def test_any_shape(shape):
    a = arrays(np.ones(shape), np.ones(shape))
    adamw_(*a, step=1, lr=0.1, weight_decay=0.0)
    assert a[0].shape == shape
    np.testing.assert_allclose(a[0], 0.9, rtol=1e-6)


def test_defaults_are_the_rules_own():
    defaults = _C.rules()["adamw"]["defaults"]
    signature = {k: p.default for k, p in inspect.signature(adamw_).parameters.items()}
    beta1, beta2 = signature["betas"]
    assert defaults == dict(
        lr=signature["lr"],
        beta1=beta1,
        beta2=beta2,
        eps=signature["eps"],
        weight_decay=signature["weight_decay"],
        maximize=float(signature["maximize"]),
    )


def test_needs_no_torch():
    script = """
import sys
sys.modules["torch"] = None
import numpy as np
from bwdfuse.functional import adamw_
a = [np.ones(3, "f4") for _ in range(4)]
adamw_(*a, step=1)
assert "ml_dtypes" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_other_threads_run_during_a_step():
    """The GIL is released: a counter advances while one long step runs."""
    import threading

    a = [np.ones(1 << 23, np.float32) for _ in range(4)]
    running, ticks = threading.Event(), 0

    def work():
        running.set()
        adamw_(*a, step=1)
        running.clear()

    thread = threading.Thread(target=work)
    old = sys.getswitchinterval()
    # Longer than the step: without a release inside it, the other thread would get no turn.
    sys.setswitchinterval(1)
    try:
        thread.start()
        running.wait()
        while running.is_set():
            ticks += 1
        thread.join()
    finally:
        sys.setswitchinterval(old)
    assert ticks > 0


def misaligned(n):
    return np.frombuffer(bytearray(4 * n + 1), np.float32, n, 1)


def read_only(n):
    array = np.zeros(n, np.float32)
    array.flags.writeable = False
    return array


# What can be wrong with an array of n elements -> (a maker, the exception, a word that the message must hold)
BAD_ARRAYS = {
    "list": (lambda n: [0.0] * n, TypeError, "ndarray"),
    "none": (lambda n: None, TypeError, "ndarray"),
    "masked": (lambda n: np.ma.zeros(n, np.float32), TypeError, "ndarray"),
    "float64": (lambda n: np.zeros(n), TypeError, "float64"),
    "float16": (lambda n: np.zeros(n, np.float16), TypeError, "float16"),
    "longdouble": (lambda n: np.zeros(n, np.longdouble), TypeError, np.dtype(np.longdouble).name),
    "int32": (lambda n: np.zeros(n, np.int32), TypeError, "int32"),
    "complex": (lambda n: np.zeros(n, np.complex64), TypeError, "complex64"),
    "object": (lambda n: np.zeros(n, object), TypeError, "object"),
    "structured": (lambda n: np.zeros(n, [("x", "f4")]), TypeError, "dtype"),
    "other float": (lambda n: np.zeros(n, ml_dtypes.float8_e4m3fn), TypeError, "float8_e4m3fn"),
    "swapped": (lambda n: np.zeros(n, np.dtype(np.float32).newbyteorder()), ValueError, "byte order"),
    "longer": (lambda n: np.zeros(n + 1, np.float32), ValueError, "shape"),
    "folded": (lambda n: np.zeros((n, 1), np.float32), ValueError, "shape"),
    "every other": (lambda n: np.zeros(2 * n, np.float32)[::2], ValueError, "contiguous"),
    "reversed": (lambda n: np.zeros(n, np.float32)[::-1], ValueError, "contiguous"),
    "broadcast": (lambda n: np.broadcast_to(np.zeros(1, np.float32), n), ValueError, "contiguous"),
    "misaligned": (misaligned, ValueError, "misaligned"),
    "read-only": (read_only, ValueError, "read-only"),
    "bfloat16": (lambda n: np.zeros(n, BF16), TypeError, "bfloat16"),
}
NOT_NUMBERS = [None, "0.1", b"1", [0.1], {}, 1j, object(), 10**400]
NOT_FINITE = [float("nan"), float("inf"), -float("inf")]
BAD_NUMBERS = {
    "step": [0, 0.5, -1, *NOT_FINITE],
    "lr": [-1e-3, 1e39, *NOT_FINITE],
    "eps": [-1e-8, 1e39, *NOT_FINITE],
    "weight_decay": [-0.01, 1e39, *NOT_FINITE],
}
GOOD = dict(step=1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, maximize=False)


def bytes_of(objects):
    return [o.tobytes() if isinstance(o, np.ndarray) else repr(o) for o in objects]


def refused(objects, exception, *words, **kwargs):
    before = bytes_of(objects)
    with pytest.raises(exception) as info:
        adamw_(*objects, **{**GOOD, **kwargs})
    assert type(info.value) is exception
    assert bytes_of(objects) == before, "an array was changed"
    message = str(info.value)
    for word in words:
        assert word in message, message
    assert "pass " in message or "must be" in message, message


def good_arrays(n):
    rng = np.random.default_rng(n)
    return [rng.random(n, np.float32) for _ in ARRAYS]


#: As good as any beside float32.
FINE = {("grad", "read-only"), ("grad", "bfloat16"), ("param", "bfloat16"), ("param", "float16")}
#: Every bad kind in every place where it is bad.
WRONG = [(which, kind) for kind in BAD_ARRAYS for which in range(4) if (ARRAYS[which], kind) not in FINE]


@pytest.mark.parametrize(("which", "kind"), WRONG, ids=lambda v: ARRAYS[v] if isinstance(v, int) else v)
def test_wrong_array(which, kind):
    make, exception, word = BAD_ARRAYS[kind]
    objects = good_arrays(6)
    objects[which] = make(6)
    # A wrong shape of param shows in the first array that differs from it.
    named = ARRAYS[which] if word != "shape" or which else "param"
    if kind in ("bfloat16", "float16", "float64") and which < 3:
        named = "dtype"
    refused(objects, exception, named, word)


def test_read_only_gradient_is_fine():
    objects = good_arrays(6)
    objects[1].flags.writeable = False
    adamw_(*objects, **GOOD)


@pytest.mark.parametrize("shift", [0, 1, 5])
@pytest.mark.parametrize("pair", [(a, b) for a in range(4) for b in range(4) if a != b])
def test_overlap_is_refused(pair, shift):
    n = 6
    shared = np.random.default_rng(0).random(n + shift, np.float32)
    objects = good_arrays(n)
    objects[pair[0]], objects[pair[1]] = shared[:n], shared[shift:]
    refused(objects, ValueError, ARRAYS[pair[0]], ARRAYS[pair[1]], "share memory")


def test_neighbours_do_not_overlap():
    block = np.random.default_rng(0).random((4, 6), np.float32)
    adamw_(*block, **GOOD)


@pytest.mark.parametrize("name", BAD_NUMBERS)
def test_wrong_number(name):
    for value in BAD_NUMBERS[name]:
        refused(good_arrays(3), ValueError, f"{name}={value!r}", **{name: value})
    for value in NOT_NUMBERS:
        refused(good_arrays(3), TypeError, f"{name}={value!r}", **{name: value})


@pytest.mark.parametrize("bad", [1.0, -0.1, 2, float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1])
def test_wrong_beta(which, bad):
    betas = [0.9, 0.999]
    betas[which] = bad
    refused(good_arrays(3), ValueError, f"betas[{which}]={bad!r}", "[0, 1)", betas=tuple(betas))


@pytest.mark.parametrize("betas", [None, 0.9, (0.9,), (0.9, 0.99, 0.999), "ab", {0.9, 0.99}, ("a", 0.9), (0.9, None)])
def test_betas_that_are_no_pair(betas):
    refused(good_arrays(3), TypeError, "betas", betas=betas)


@pytest.mark.parametrize("value", [0, 1, None, "no", 1.0])
def test_maximize_must_be_a_bool(value):
    refused(good_arrays(3), TypeError, f"maximize={value!r}", "True or False", maximize=value)


def test_an_exception_inside_a_number_passes_through():
    class Interrupted:
        def __float__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adamw_(*good_arrays(3), **{**GOOD, "lr": Interrupted()})


def test_wrong_calls():
    with pytest.raises(TypeError):
        adamw_(*good_arrays(3))
    with pytest.raises(TypeError):
        adamw_(*good_arrays(3)[:3], step=1)
    with pytest.raises(TypeError):
        adamw_(*good_arrays(3), step=1, momentum=0.9)


@settings(max_examples=300, deadline=None)
@given(
    n=st.integers(0, 40),
    broken=st.dictionaries(st.integers(0, 3), st.sampled_from(sorted(BAD_ARRAYS)), max_size=4),
    numbers=st.fixed_dictionaries(
        {
            name: st.one_of(st.just(GOOD[name]), st.floats(), st.sampled_from(NOT_NUMBERS))
            for name in ("step", "lr", "eps", "weight_decay")
        }
    ),
    betas=st.one_of(st.just((0.9, 0.999)), st.tuples(st.floats(), st.floats()), st.sampled_from([None, (), (0.9,)])),
    maximize=st.sampled_from([True, False, False, 1]),
)
def test_fuzzed_calls_step_or_change_nothing(n, broken, numbers, betas, maximize):
    """Whatever is passed: either a step that is right in shape, or TypeError or ValueError and not a byte changed."""
    objects = good_arrays(n)
    for which, kind in broken.items():
        objects[which] = BAD_ARRAYS[kind][0](n)
    before = bytes_of(objects)
    try:
        result = adamw_(*objects, **numbers, betas=betas, maximize=maximize)
    except (TypeError, ValueError) as error:
        assert bytes_of(objects) == before
        assert "pass " in str(error) or "must be" in str(error)
    else:
        assert before[1] == bytes_of(objects)[1]
        assert isinstance(result, StepResult)
        assert all(b >= 0 and b < 1 for b in betas) and isinstance(maximize, bool)
        assert numbers["step"] >= 1 and all(numbers[k] >= 0 for k in ("lr", "eps", "weight_decay"))
