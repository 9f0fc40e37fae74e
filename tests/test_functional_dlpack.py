"""Arrays that lend their memory by DLPack: stepped in place like ndarrays, refused by name before anything is written."""

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest
from test_functional import ARRAYS, GOOD, good_arrays

from bwdfuse.functional import adamw_

torch = pytest.importorskip("torch")


class Lender:
    """Lends an ndarray as another library would, in one of the ways that the protocol allows."""

    def __init__(self, array, **fault):
        self.array, self.fault, self.asked = array, fault, []

    def __dlpack_device__(self):
        return self.fault.get("device", (1, 0))

    def __dlpack__(self, **wishes):
        self.asked.append(wishes)
        if "error" in self.fault:
            raise self.fault["error"]
        if "capsule" in self.fault:
            return self.fault["capsule"]
        if self.fault.get("legacy"):
            if wishes:
                raise TypeError("unexpected keyword argument 'max_version'")
            return torch.from_numpy(self.array).__dlpack__()
        return self.array.__dlpack__(**wishes)


def tensors(n, dtype=torch.float32):
    return [torch.from_numpy(a).to(dtype) for a in good_arrays(n)]


@pytest.mark.parametrize("n", [0, 1, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_tensors_are_stepped_in_place_without_ml_dtypes(n, dtype):
    lent = tensors(n, dtype)
    numpy_dtype = {torch.float32: np.float32, torch.bfloat16: ml_dtypes.bfloat16}[dtype]
    expected = [t.float().numpy().astype(numpy_dtype) for t in lent]
    where = [t.data_ptr() for t in lent]
    assert adamw_(*lent, **GOOD) == adamw_(*expected, **GOOD)
    assert where == [t.data_ptr() for t in lent]
    for tensor, array in zip(lent, expected, strict=True):
        assert (tensor.float().numpy() == array.astype(np.float32)).all()


def test_producers_may_be_mixed_and_are_asked_for_no_copy():
    objects, expected = good_arrays(9), good_arrays(9)
    lent = [objects[0], Lender(objects[1]), Lender(objects[2], legacy=True), torch.from_numpy(objects[3])]
    adamw_(*lent, **GOOD)
    adamw_(*expected, **GOOD)
    for a, b in zip(objects, expected, strict=True):
        assert (a == b).all()
    assert lent[1].asked == [{"max_version": (1, 0), "copy": False}]
    assert lent[2].asked == [{"max_version": (1, 0), "copy": False}, {}]


def test_shapes_are_compared_and_zero_dimensional_is_one_element():
    scalar = [torch.tensor(1.0), torch.tensor(0.5), torch.tensor(0.0), torch.tensor(0.0)]
    adamw_(*scalar, step=1, lr=0.1, weight_decay=0.0)
    assert abs(float(scalar[0]) - 0.9) < 1e-6
    with pytest.raises(ValueError, match=r"grad has shape \(3, 2\) but param has shape \(2, 3\)"):
        adamw_(torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(2, 3), torch.zeros(2, 3), step=1)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


#: What can be wrong with what is lent -> (maker from a good ndarray, exception, word of the message)
BAD = {
    "requires a gradient": (lambda a: torch.from_numpy(a).requires_grad_(), BufferError, "gradient"),
    "strided": (lambda a: torch.zeros(2 * a.size)[::2], ValueError, "contiguous"),
    "expanded": (lambda a: torch.zeros(1).expand(a.size), ValueError, "contiguous"),
    "int32": (lambda a: torch.zeros(a.size, dtype=torch.int32), TypeError, "code 0 of 32 bits"),
    "complex": (lambda a: torch.zeros(a.size, dtype=torch.complex64), TypeError, "code 5 of 64 bits"),
    "float8": (
        lambda a: Lender(a, capsule=torch.zeros(a.size).to(torch.float8_e5m2).__dlpack__(max_version=(1, 0))),
        TypeError,
        "8 bits",
    ),
    "longer": (lambda a: torch.zeros(a.size + 1), ValueError, "shape"),
    "folded": (lambda a: torch.zeros(a.size, 1), ValueError, "shape"),
    "read-only": (lambda a: Lender(read_only(a)), ValueError, "read-only"),
    "on a GPU": (lambda a: Lender(a, device=(2, 0)), TypeError, "device type 2"),
    "device of a wrong kind": (lambda a: Lender(a, device="cpu"), TypeError, "device type 0"),
    "no capsule": (lambda a: Lender(a, capsule=7), TypeError, "returned 7"),
    "nothing": (lambda a: Lender(a, capsule=None), TypeError, "returned None"),
    "raises": (lambda a: Lender(a, error=RuntimeError("no export today")), RuntimeError, "no export today"),
    "interrupted": (lambda a: Lender(a, error=KeyboardInterrupt()), KeyboardInterrupt, ""),
}


@pytest.mark.parametrize("which", range(4), ids=ARRAYS)
@pytest.mark.parametrize("kind", BAD)
def test_bad_lender_is_refused_and_nothing_is_written(kind, which):
    make, exception, word = BAD[kind]
    objects = good_arrays(6)
    lent = [torch.from_numpy(a) for a in objects]
    before = [a.copy() for a in objects]
    lent[which] = make(before[which])
    if kind == "read-only" and ARRAYS[which] == "grad":
        adamw_(*lent, **GOOD)  # as good as any
        return
    with pytest.raises(exception) as info:
        adamw_(*lent, **GOOD)
    assert word in str(info.value)
    for i, (array, was) in enumerate(zip(objects, before, strict=True)):
        assert i == which or (array == was).all()


def test_a_used_capsule_is_refused():
    capsule = torch.zeros(3).__dlpack__(max_version=(1, 0))
    torch.from_dlpack(type("Once", (), {"__dlpack__": lambda s, **k: capsule, "__dlpack_device__": lambda s: (1, 0)})())
    with pytest.raises(TypeError, match="no DLPack tensor of version 1"):
        adamw_(Lender(np.zeros(3), capsule=capsule), *tensors(3)[1:], step=1)


def test_overlap_is_found_across_kinds():
    shared = good_arrays(6)[0]
    with pytest.raises(ValueError, match="param and exp_avg share memory"):
        adamw_(shared, torch.zeros(6), torch.from_numpy(shared), torch.zeros(6), step=1)


def test_a_subclass_of_ndarray_does_not_slip_through_by_dlpack():
    masked = np.ma.zeros(3, np.float32)
    assert hasattr(masked, "__dlpack__")
    with pytest.raises(TypeError, match="param is a .*MaskedArray.* pass a plain numpy.ndarray"):
        adamw_(masked, *good_arrays(3)[1:], step=1)


@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_given_back(fails):
    """The producer gets its memory back after the call, also after one that was refused."""
    arrays = good_arrays(100)
    gone = [weakref.ref(a) for a in arrays]
    lent = [torch.from_numpy(a) for a in arrays]  # whose storage keeps the array for as long as anybody borrows it
    del arrays
    if fails:
        with pytest.raises(ValueError):
            adamw_(*lent, step=0)
        with pytest.raises(ValueError):
            adamw_(*lent[:3], lent[2], step=1)
    else:
        adamw_(*lent, step=1)
    assert all(ref() is not None for ref in gone)
    del lent
    gc.collect()
    assert not any(ref() is not None for ref in gone)
