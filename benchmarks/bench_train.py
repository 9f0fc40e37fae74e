"""One training step of a Llama with random weights: time, live tensor memory and page faults, by optimizer.

    python -m benchmarks.bench_train [--json FILE] [--rounds N] [--only TEXT] [--no-peers] [--threads N] [--tokens N]

Cases are `SIZE/DTYPE`: S, M, L of 13, 70, 148 million parameters, f32 and bf16; one sequence. Ratios are median over median
of the whole step, below 1 is faster: `ratio_vs_fused_after_backward` against torch's fused AdamW after backward,
`ratio_vs_apply_fused` against the same inside backward (`_apply_optimizer_in_backward`). `ratio_floor` is the same step
without any optimizer. Losses and weights are compared before anything is timed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import sys
from typing import Any

from benchmarks import _pairs
from bwdfuse.bench import kernel, timing, train

TORCH = ["bwdfuse", "bwdfuse_after", "apply_fused"]
OTHERS = ["apply_default", "deepspeed_after", "optimi_release", "flashoptim_release", "lomo", "adalomo"]
#: Ten copies of L and their states do not fit where the others do.
WITH_OTHERS = ("S", "M")


def table(case: str, found: dict[str, Any]) -> None:
    print(f"{case}: {found['parameters'] / 1e6:.1f} million parameters in {found['tensors']} tensors")
    reference = found["seconds"][train.REFERENCE]["median"]
    for name, taken in sorted(found["seconds"].items(), key=lambda pair: pair[1]["median"]):
        peak = found["memory"][name]
        print(
            f"  {name:20}{taken['median'] * 1e3:8.1f} ms  {taken['median'] / reference:6.3f} of {train.REFERENCE}"
            f"{found['page_faults'][name]:9.0f} faults {peak['above_rest_mib']:8.1f} MiB above rest, "
            f"{peak['gradients_mib']:7.1f} of gradients"
        )
    for name, reason in found["left_out"].items():
        print(f"  {name}: {reason}")
    sys.stdout.flush()


def main() -> None:
    parser = _pairs.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="of torch and of this package (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of the one sequence (default %(default)s)")
    options = parser.parse_args()
    kernel.set_threads(options.threads)
    cases: dict[str, dict[str, Any]] = {}
    for size in train.SHAPES:
        for dtype_name, dtype in train.DTYPES.items():
            case = f"{size}/{dtype_name}"
            if options.only not in case:
                continue
            names = TORCH + (OTHERS if size in WITH_OTHERS and not options.no_peers else [])
            model, ids, loss = train.llama(size, dtype, options.tokens)
            cases[case] = train.measure(model, ids, loss, names, options.rounds, threads=options.threads)
            table(case, cases[case])
            del model
            gc.collect()
    result: dict[str, Any] = {
        key: {case: found["ratio_vs"][name] for case, found in cases.items()}
        for key, name in (("ratio_vs_fused_after_backward", train.REFERENCE), ("ratio_vs_apply_fused", "apply_fused"))
    }
    result["ratio_floor"] = {
        case: timing.ratio(found["seconds"], train.FLOOR, train.REFERENCE) for case, found in cases.items()
    }
    result |= {"threads": options.threads, "tokens": options.tokens, "cases": cases}
    _pairs.report(result, options.json)


if __name__ == "__main__":
    main()
