"""One update of one parameter, as a training loop calls it, and the native step alone. Knows AdamW alone.

Times are of the whole `optimizer.step()`. Ours include the sum of squares and the count of non-finite gradient elements, which
others do not have. A storage format that another optimizer lacks is compared with the nearest that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

import bwdfuse
from bwdfuse._native import native
from bwdfuse.bench import peers, timing

STEP = 10
HYPERS = (peers.LR, *peers.BETAS, peers.EPS, peers.WEIGHT_DECAY, False)
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


class Format(NamedTuple):
    """Storage of param, gradient and states, and what torch's optimizer is given in its place."""

    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    torch: torch.dtype


FORMATS = {
    "f32": Format(F32, F32, F32, F32),
    "bf16": Format(BF16, BF16, BF16, BF16),
    "bf16+f32 states": Format(BF16, BF16, F32, F32),
    "f32+bf16 states": Format(F32, F32, BF16, F32),
    "f16+f32 states": Format(F16, F16, F32, F32),
    "f64": Format(F64, F64, F64, F64),
}


def make(n: int, form: Format) -> list[torch.Tensor]:
    """param, grad, exp_avg and exp_avg_sq that look like a parameter's in training."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=generator).mul_(scale) for scale in (0.02, 1e-3, 1e-4, 1e-3)]
    tensors[3].square_()
    return [tensor.to(dtype) for tensor, dtype in zip(tensors, (*form[:3], form.state), strict=True)]


def for_torch(n: int, form: Format) -> list[torch.Tensor]:
    """The same numbers in what torch is given."""
    return [tensor.to(form.torch) for tensor in make(n, form)]


def going_on(cls: type, tensors: list[torch.Tensor], **options: Any) -> torch.optim.Optimizer:
    """An optimizer of one parameter that goes on from these tensors; its gradient stays."""
    param = torch.nn.Parameter(tensors[0])
    if tensors[1].dtype != param.dtype:
        param.grad_dtype = tensors[1].dtype
    param.grad = tensors[1]
    made = cls([param], **peers.OPTIONS, **options)
    made.state[param] = {"step": torch.tensor(STEP - 1.0), "exp_avg": tensors[2], "exp_avg_sq": tensors[3]}
    return made


def ours(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    """This package's, with the states' own dtype."""
    state = tensors[2].dtype
    return going_on(bwdfuse.AdamW, tensors, state_dtype=None if state == tensors[0].dtype else state)


def as_array(tensor: torch.Tensor):
    """The tensor's memory as an array: both sides then work on memory that one allocator placed."""
    if tensor.dtype == BF16:
        import ml_dtypes

        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def native_step(tensors: list[torch.Tensor], isa: str | None = None) -> Callable[[], object]:
    """The native step alone, on an instruction set of choice."""
    arrays = tuple(map(as_array, tensors))
    step_ = native().step_
    return lambda: step_("adamw", arrays, HYPERS, step=STEP, isa=isa)


def torch_kernel(tensors: list[torch.Tensor]) -> Callable[[], object]:
    """torch's fused kernel alone."""
    param, grad, exp_avg, exp_avg_sq = tensors
    step = torch.tensor(float(STEP))
    beta1, beta2 = peers.BETAS

    def run() -> None:
        torch._fused_adamw_(
            [param],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            [],
            [step],
            lr=peers.LR,
            beta1=beta1,
            beta2=beta2,
            weight_decay=peers.WEIGHT_DECAY,
            eps=peers.EPS,
            amsgrad=False,
            maximize=False,
        )

    return run


def check(form: Format) -> None:
    """All agree before anything is timed: within two units of the storage at param's own size, and eight roundings of the real
    type on the way to the step.

    Raises:
        peers.WrongResult: they do not.
    """
    n = 10_007
    expected = make(n, form)[0].double()
    grad, exp_avg, exp_avg_sq = (tensor.double() for tensor in make(n, form)[1:])
    beta1, beta2 = peers.BETAS
    root = ((beta2 * exp_avg_sq + (1 - beta2) * grad * grad) / (1 - beta2**STEP)).sqrt() + peers.EPS
    rate = peers.LR / (1 - beta1**STEP)
    expected *= 1 - peers.LR * peers.WEIGHT_DECAY
    expected -= rate * (beta1 * exp_avg + (1 - beta1) * grad) / root
    length = rate * (beta1 * exp_avg.abs() + (1 - beta1) * grad.abs()) / root
    results = {"bwdfuse": make(n, form), "torch": for_torch(n, form)}
    ours(results["bwdfuse"]).step()
    going_on(torch.optim.AdamW, results["torch"], fused=True).step()
    for name, tensors in results.items():
        storage, real = torch.finfo(tensors[0].dtype), torch.finfo(F64 if tensors[0].dtype == F64 else F32).eps
        unit = storage.eps * expected.abs().clamp(min=storage.smallest_normal)
        distance = (tensors[0].double() - expected).abs()
        if not (distance <= 2 * unit + 8 * real * length).all():
            raise peers.WrongResult(
                f"{name}: weights differ from AdamW in float64 by {float(distance.max()):.3g}; nothing was timed"
            )


def traffic(tensors: list[torch.Tensor]) -> int:
    """Bytes that one update moves: grad is read, the other three are read and written."""
    return tensors[1].nbytes + 2 * sum(tensor.nbytes for tensor in (tensors[0], *tensors[2:]))


def streaming_limit(rounds: int, threads: int, mebi: int = 256) -> float:
    """Bytes a second of scaling one large array in place: one read and one write of each byte."""
    tensor = torch.ones(mebi << 18)
    taken = timing.paired({"scale": lambda: tensor.mul_(1.0001)}, rounds, threads=threads)["scale"]
    return 2 * tensor.nbytes / taken["median"]


def set_threads(count: int) -> None:
    """For torch and for this package."""
    torch.set_num_threads(count)
    bwdfuse.set_num_threads(count)


def calls_for(n: int) -> int:
    """Calls of one timing: some milliseconds."""
    return max(1, (1 << 20) // n)


def measure(n: int, form: Format, rounds: int, threads: int, *, kernels: bool = True) -> dict[str, Any]:
    """`step()` of both, and with ``kernels`` both kernels alone.

    Returns:
        ``seconds`` (a `Timing` each), the ratios ``vs_torch_fused`` and ``vs_torch_kernel``, ``traffic`` in bytes.
    """
    mine, other = make(n, form), for_torch(n, form)
    cases: dict[str, Callable[[], object]] = {
        "bwdfuse": ours(mine).step,
        "torch": going_on(torch.optim.AdamW, other, fused=True).step,
    }
    if kernels:
        cases |= {"native": native_step(mine), "kernel": torch_kernel(other)}
    seconds = timing.paired(cases, rounds, calls=calls_for(n), threads=threads)
    return {
        "seconds": seconds,
        "vs_torch_fused": timing.ratio(seconds, "bwdfuse", "torch"),
        "vs_torch_kernel": timing.ratio(seconds, "native", "kernel") if kernels else None,
        "traffic": traffic(mine),
    }


def measure_isas(n: int, form: Format, rounds: int) -> dict[str, timing.Timing]:
    """The native step on every instruction set that this machine has; one thread."""
    tensors = make(n, form)
    cases = {isa: native_step(tensors, isa) for isa in native().isa_info()["possible"]}
    return timing.paired(cases, rounds, calls=calls_for(n))


def measure_peers(names: Iterable[str], n: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """One parameter of `n` elements stepped by every optimizer that steps after backward; one thread.

    Returns:
        ``seconds`` (a `Timing` each) and ``left_out`` (why, by name).
    """
    found, left_out = peers.usable(names, dtype, elements=n)
    grad = torch.randn(n // 1024, 1024, generator=torch.Generator().manual_seed(0)).mul_(1e-3).to(dtype)
    cases: dict[str, Callable[[], object]] = {}
    for name, peer in found.items():
        model = peers.Bag([torch.full_like(grad, 0.02)])
        next(model.parameters()).grad = grad
        cases[name] = peer.build(model)
    seconds = timing.paired(cases, rounds, calls=calls_for(n))
    return {"seconds": seconds, "left_out": left_out}
