"""One AdamW update against torch's fused one, on the same numbers.

    python -m benchmarks.bench_kernel [--json FILE] [--rounds N] [--only TEXT] [--no-peers]

Ratios are median over median, below 1 is faster, by case `adamw/FORMAT/SIZE/THREADS`:

`ratio_vs_torch_fused`: `optimizer.step()` of both, `bwdfuse.AdamW` and `torch.optim.AdamW(fused=True)` over one parameter, as
a training loop calls it.
`ratio_vs_torch_kernel`: our native step on arrays against `torch._fused_adamw_` alone, without either optimizer around it.
`share_of_inplace_limit`: memory traffic of our step over that of scaling one large array in place, as fast as as many threads
of this machine stream, measured in the same run.
`isas`: nanoseconds an element of the native step on each instruction set. `peers`: of every other optimizer that runs here.

Our times include the sum of squares and the count of non-finite gradient elements; torch has neither. A format that torch does
not have is compared with torch's all-float32 update. One thread: CPU time; two: wall time, so let the machine be quiet.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import Any

from benchmarks import _pairs
from bwdfuse import _C
from bwdfuse.bench import kernel

SIZES = {"4Ki": 1 << 12, "64Ki": 1 << 16, "4Mi": 1 << 22, "64Mi": 1 << 26}
LARGEST = "64Mi"
THREADS = (1, 2)
PEERS = [
    "bwdfuse_after",
    "fused_after",
    "foreach_after",
    "compile_after",
    "deepspeed_after",
    "optimi_after",
    "flashoptim_after",
    "bitsandbytes_8bit",
    "torchao_8bit",
]


def per_element(seconds: dict[str, Any], n: int) -> dict[str, Any]:
    """Timings in nanoseconds an element."""
    return {
        name: {key: value if key == "rounds" else value / n * 1e9 for key, value in taken.items()}
        for name, taken in seconds.items()
    }


def updates(rounds: int, only: str) -> dict[str, Any]:
    """Ours against torch's: every format, size and thread count."""
    keys = ("ratio_vs_torch_fused", "ratio_vs_torch_kernel", "share_of_inplace_limit", "ns_an_element")
    result: dict[str, Any] = {key: {} for key in keys} | {"inplace_limit_gb_s": {}}
    print(f"{'':34}{'step():':>9}{'torch':>8}{'ratio':>7}{'kernel:':>10}{'torch':>8}{'ratio':>7}{'of limit':>10}")
    for threads in THREADS:
        kernel.set_threads(threads)
        chosen = [
            (f"adamw/{form_name}/{size}/{threads}t", form, n, size)
            for form_name, form in kernel.FORMATS.items()
            for size, n in SIZES.items()
            if only in f"adamw/{form_name}/{size}/{threads}t" and (threads == 1 or size == LARGEST)
        ]
        limit = kernel.streaming_limit(rounds, threads) if chosen else 0.0
        result["inplace_limit_gb_s"][f"{threads}t"] = limit / 1e9
        for name, form, n, size in chosen:
            found = kernel.measure(n, form, rounds, threads)
            ns = per_element(found["seconds"], n)
            result["ratio_vs_torch_fused"][name] = found["vs_torch_fused"]
            result["ratio_vs_torch_kernel"][name] = found["vs_torch_kernel"]
            result["ns_an_element"][name] = ns
            share = found["traffic"] / found["seconds"]["bwdfuse"]["median"] / limit
            if size == LARGEST:
                result["share_of_inplace_limit"][name] = share
            print(
                f"{name:34}{ns['bwdfuse']['median']:9.3f}{ns['torch']['median']:8.3f}{found['vs_torch_fused']:7.3f}"
                f"{ns['native']['median']:10.3f}{ns['kernel']['median']:8.3f}{found['vs_torch_kernel']:7.3f}{share:10.2f}",
                flush=True,
            )
    kernel.set_threads(1)
    return result


def isas(rounds: int, only: str) -> dict[str, Any]:
    """The native step on every instruction set."""
    result = {}
    for form_name, form in kernel.FORMATS.items():
        for size in ("64Ki", "4Mi"):
            name = f"adamw/{form_name}/{size}/1t"
            if only in name:
                found = per_element(kernel.measure_isas(SIZES[size], form, rounds), SIZES[size])
                result[name] = found
                print(f"{name:34}" + "  ".join(f"{isa} {t['median']:.3f}" for isa, t in found.items()), flush=True)
    return result


def others(rounds: int, only: str) -> dict[str, Any]:
    """Every optimizer that steps after backward."""
    result = {}
    for form_name in ("f32", "bf16"):
        for size in ("64Ki", "4Mi"):
            name = f"adamw/{form_name}/{size}/1t"
            if only in name:
                found = kernel.measure_peers(PEERS, SIZES[size], kernel.FORMATS[form_name].param, rounds)
                ns = per_element(found["seconds"], SIZES[size])
                result[name] = {"ns_an_element": ns, "left_out": found["left_out"]}
                print(f"{name:34}" + "  ".join(f"{peer} {t['median']:.2f}" for peer, t in ns.items()), flush=True)
                for peer, reason in found["left_out"].items():
                    print(f"  {peer}: {reason}")
    return result


def main() -> None:
    options = _pairs.arguments(__doc__).parse_args()
    kernel.set_threads(1)
    for form in kernel.FORMATS.values():
        kernel.check(form)
    print(f"isa {_C.isa_info()['chosen']}; nanoseconds an element")
    result = updates(options.rounds, options.only)
    result["isas"] = isas(options.rounds, options.only)
    result["peers"] = {} if options.no_peers else others(min(options.rounds, 7), options.only)
    _pairs.report(result, options.json)


if __name__ == "__main__":
    main()
