"""One AdamW update against torch's fused one, on the same numbers, one thread.

    python -m benchmarks.bench_kernel [--json FILE] [--rounds N] [--only TEXT]

Two comparisons, each median over median, below 1 is faster:

`ratio_vs_torch_fused`: `optimizer.step()` of both, `bwdfuse.AdamW` and `torch.optim.AdamW(fused=True)` over one parameter, as
a training loop calls it.
`ratio_vs_torch_kernel`: our native step on arrays against `torch._fused_adamw_` alone, without either optimizer around it.

Our times include the sum of squares and the count of non-finite gradient elements; torch has neither. bfloat16 with
float32 states is compared with torch's all-float32 update, since torch has no such format. `share_of_inplace_limit` is the
memory traffic of the update over that of scaling one large array in place, as fast as this machine streams.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import ml_dtypes
import numpy as np
import torch

import bwdfuse
from benchmarks import _pairs
from bwdfuse import _C

HYPER = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
STEP = 10
BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
#: name -> dtypes of param and grad, and of the states
FORMATS = {"f32": (F32, F32), "bf16": (BF16, BF16), "bf16+f32 states": (BF16, F32)}
SIZES = {"64Ki": 1 << 16, "64Mi": 1 << 26}


def native_step(arrays):
    hypers = (HYPER["lr"], *HYPER["betas"], HYPER["eps"], HYPER["weight_decay"], False)
    _C.step_("adamw", tuple(arrays), hypers, step=STEP, isa=None)


def torch_step(tensors, step):
    param, grad, exp_avg, exp_avg_sq = tensors
    torch._fused_adamw_(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        lr=HYPER["lr"],
        beta1=HYPER["betas"][0],
        beta2=HYPER["betas"][1],
        weight_decay=HYPER["weight_decay"],
        eps=HYPER["eps"],
        amsgrad=False,
        maximize=False,
    )


def as_array(tensor):
    """The tensor's memory as an array: both sides then work on memory that one allocator placed."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(BF16)
    return tensor.numpy()


def make(n, dtypes):
    """Tensors that look like a parameter in training."""
    generator = torch.Generator().manual_seed(0)
    scales = (0.02, 1e-3, 1e-4, 1e-3)
    values = [torch.randn(n, generator=generator).mul_(s) for s in scales]
    values[3].square_()
    names = [dtypes[0], dtypes[0], dtypes[1], dtypes[1]]
    return [v.to(torch.bfloat16) if d == BF16 else v for v, d in zip(values, names, strict=True)]


def optimizer(cls, tensors, **options):
    """An optimizer of one parameter that goes on from these tensors; its gradient stays."""
    param = torch.nn.Parameter(tensors[0])
    param.grad = tensors[1]
    made = cls([param], **HYPER, **options)
    made.state[param] = {"step": torch.tensor(STEP - 1.0), "exp_avg": tensors[2], "exp_avg_sq": tensors[3]}
    return made


def theirs_of(dtypes):
    return FORMATS["f32"] if dtypes == FORMATS["bf16+f32 states"] else dtypes


def check(dtypes):
    """All four agree before anything is timed: within a unit of the storage format at param's own size."""
    n = 10_007
    results = {name: make(n, dtypes) for name in ("native", "bwdfuse")}
    results |= {name: make(n, theirs_of(dtypes)) for name in ("kernel", "torch")}
    native_step([as_array(t) for t in results["native"]])
    torch_step(results["kernel"], torch.tensor(float(STEP)))
    optimizer(bwdfuse.AdamW, results["bwdfuse"]).step()
    optimizer(torch.optim.AdamW, results["torch"], fused=True).step()
    unit = 2.0**-7 if dtypes[0] == BF16 else 2.0**-22
    expected = results["torch"][0].double()
    for name, tensors in results.items():
        difference = (tensors[0].double() - expected).abs()
        if not (difference <= unit * expected.abs() + 1e-6).all():
            raise SystemExit(f"{name} and torch differ by {difference.max().item():.3g}: nothing was timed")


def streaming_limit(rounds):
    """Bytes a second of scaling 256 MiB in place: one read and one write of each byte."""
    array = torch.ones(1 << 26)
    timing = _pairs.paired({"scale": lambda: array.mul_(1.0001)}, rounds)["scale"]
    return 2 * array.nbytes / timing["median"]


def bench(n, dtypes, rounds):
    """Timings of both updates and both kernels, and the bytes that one of our updates moves."""
    ours, theirs = make(n, dtypes), make(n, theirs_of(dtypes))
    arrays, step = [as_array(t) for t in ours], torch.tensor(float(STEP))
    cases = {
        "bwdfuse": optimizer(bwdfuse.AdamW, ours).step,
        "torch": optimizer(torch.optim.AdamW, theirs, fused=True).step,
        "native": lambda: native_step(arrays),
        "kernel": lambda: torch_step(theirs, step),
    }
    timings = _pairs.paired(cases, rounds, calls=max(1, (1 << 20) // n))
    # grad is read, the other three are read and written.
    return timings, ours[1].nbytes + 2 * sum(t.nbytes for t in (ours[0], *ours[2:]))


def main():
    options = _pairs.arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    for dtypes in FORMATS.values():
        check(dtypes)
    limit = streaming_limit(options.rounds)
    keys = ("ratio_vs_torch_fused", "ratio_vs_torch_kernel", "share_of_inplace_limit", "ns_an_element")
    result = {key: {} for key in keys}
    print(f"isa {_C.isa_info()['chosen']}, in-place limit {limit / 1e9:.1f} GB/s; ns an element")
    print(f"{'':32}{'step():':>12}{'torch':>9}{'ratio':>8}{'kernel:':>12}{'torch':>9}{'ratio':>8}")
    for format_name, dtypes in FORMATS.items():
        for size_name, n in SIZES.items():
            name = f"adamw/{format_name}/{size_name}/1t"
            if options.only not in name:
                continue
            timings, traffic = bench(n, dtypes, options.rounds)
            ns = {case: t["median"] / n * 1e9 for case, t in timings.items()}
            result["ratio_vs_torch_fused"][name] = _pairs.ratio(timings, "bwdfuse", "torch")
            result["ratio_vs_torch_kernel"][name] = _pairs.ratio(timings, "native", "kernel")
            result["ns_an_element"][name] = {
                case: {k: v if k == "rounds" else v / n * 1e9 for k, v in t.items()} for case, t in timings.items()
            }
            if n == max(SIZES.values()):
                result["share_of_inplace_limit"][name] = traffic / timings["bwdfuse"]["median"] / limit
            print(
                f"{name:32}{ns['bwdfuse']:12.3f}{ns['torch']:9.3f}{ns['bwdfuse'] / ns['torch']:8.3f}"
                f"{ns['native']:12.3f}{ns['kernel']:9.3f}{ns['native'] / ns['kernel']:8.3f}"
            )
    _pairs.report(result, options.json)


if __name__ == "__main__":
    main()
