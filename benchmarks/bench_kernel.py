"""One AdamW step against torch's fused one, on the same numbers, one thread.

    python -m benchmarks.bench_kernel [--json FILE] [--rounds N] [--only TEXT] [--isa NAME]

Times include the sum of squares and the count of non-finite gradient elements on our side; torch has neither. For each
case `ratio_vs_torch_fused` is median time over median time, below 1 is faster; `share_of_inplace_limit` is the memory
traffic of the step over that of scaling one large array in place, which is as fast as this machine streams.
bfloat16 with float32 states is compared with torch's all-float32 step, since torch has no such format.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import ml_dtypes
import numpy as np
import torch

from benchmarks import _pairs
from bwdfuse import _C

HYPER = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
STEP = 10
BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
#: name -> dtypes of param and grad, and of the states
FORMATS = {"f32": (F32, F32), "bf16": (BF16, BF16), "bf16+f32 states": (BF16, F32)}
SIZES = {"64Ki": 1 << 16, "64Mi": 1 << 26}


def native_step(arrays, isa):
    _C.adamw_(*arrays, step=STEP, **HYPER, maximize=False, isa=isa)


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


def check(dtypes, isa):
    """Both sides agree before anything is timed: within a unit of the storage format at param's own size."""
    ours, theirs = make(10_007, dtypes), make(10_007, dtypes if dtypes != FORMATS["bf16+f32 states"] else (F32, F32))
    native_step([as_array(t) for t in ours], isa)
    torch_step(theirs, torch.tensor(float(STEP)))
    unit = 2.0**-7 if dtypes[0] == BF16 else 2.0**-22
    difference = (ours[0].double() - theirs[0].double()).abs()
    assert (difference <= unit * theirs[0].double().abs() + 1e-6).all(), difference.max()


def streaming_limit(rounds):
    """Bytes a second of scaling 256 MiB in place: one read and one write of each byte."""
    array = torch.ones(1 << 26)
    timing = _pairs.paired({"scale": lambda: array.mul_(1.0001)}, rounds)["scale"]
    return 2 * array.nbytes / timing["median"]


def bench(n, dtypes, isa, rounds):
    ours = make(n, dtypes)
    theirs = make(n, dtypes if dtypes != FORMATS["bf16+f32 states"] else (F32, F32))
    arrays, step = [as_array(t) for t in ours], torch.tensor(float(STEP))
    cases = {"bwdfuse": lambda: native_step(arrays, isa), "torch fused": lambda: torch_step(theirs, step)}
    timings = _pairs.paired(cases, rounds, calls=max(1, (1 << 20) // n))
    # grad is read, the other three are read and written.
    traffic = ours[1].nbytes + 2 * sum(t.nbytes for t in (ours[0], *ours[2:]))
    return timings, traffic / timings["bwdfuse"]["median"]


def main():
    parser = _pairs.arguments(__doc__)
    parser.add_argument("--isa", choices=_C.isa_info()["possible"], default=_C.isa_info()["chosen"])
    options = parser.parse_args()
    torch.set_num_threads(1)

    for dtypes in FORMATS.values():
        check(dtypes, options.isa)
    limit = streaming_limit(options.rounds)
    result = {"isa": options.isa, "ratio_vs_torch_fused": {}, "share_of_inplace_limit": {}, "ns_an_element": {}}
    print(f"isa {options.isa}, in-place limit {limit / 1e9:.1f} GB/s")
    print(f"{'case':34}{'ns an element':>16}{'torch':>9}{'ratio':>8}")
    for format_name, dtypes in FORMATS.items():
        for size_name, n in SIZES.items():
            name = f"adamw/{format_name}/{size_name}/1t"
            if options.only not in name:
                continue
            timings, rate = bench(n, dtypes, options.isa, options.rounds)
            result["ratio_vs_torch_fused"][name] = _pairs.ratio(timings, "bwdfuse", "torch fused")
            result["ns_an_element"][name] = {
                case: {k: v if k == "rounds" else v / n * 1e9 for k, v in t.items()} for case, t in timings.items()
            }
            if n == max(SIZES.values()):
                result["share_of_inplace_limit"][name] = rate / limit
            ours, theirs = (timings[k]["median"] / n * 1e9 for k in ("bwdfuse", "torch fused"))
            print(f"{name:34}{ours:16.3f}{theirs:9.3f}{ours / theirs:8.3f}")
    _pairs.report(result, options.json)


if __name__ == "__main__":
    main()
