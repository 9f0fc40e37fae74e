"""What stepping one parameter inside backward costs, beside torch's own optimizer-in-backward and others.

`ratio_vs_apply_fused`: our cost of one parameter over that of `_apply_optimizer_in_backward` with `AdamW(fused=True)`.
`flatness`: the cost of one of 10,000 parameters over that of one of 100. Cost: what the optimizer adds to the same backward
without one. Results are checked before anything is timed; what cannot run is in `left_out`, with the reason.

    python -m benchmarks.bench_hook [--json FILE] [--rounds N] [--only TEXT] [--no-peers]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import Any

import torch

from benchmarks import _pairs
from bwdfuse.bench import hook

#: parameters x elements
CASES = {
    "10x1024": (10, 1024),
    "100x1024": (100, 1024),
    "1000x1024": (1000, 1024),
    "10000x1024": (10000, 1024),
    "1000x64": (1000, 64),
    "300x4096": (300, 4096),
    "100x65536": (100, 65536),
}
FEW, MANY = "100x1024", "10000x1024"
TORCH = ["bwdfuse", "apply_fused", "python_hook", "apply_default", "fused_after", "foreach_after"]
OTHERS = ["optimi_release", "flashoptim_release", "deepspeed_after", "deepspeed_hook", "lomo", "adalomo"]


def rounds_for(count: int, wanted: int) -> int:
    """More of what is short, fewer of what is long."""
    return max(5, wanted * 1000 // max(count, 250))


def main() -> None:
    options = _pairs.arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    cases: dict[str, dict[str, Any]] = {}
    for name, (count, size) in CASES.items():
        if options.only in name:
            names = TORCH + ([] if options.no_peers else OTHERS)
            cases[name] = hook.measure(names, count, size, rounds_for(count, options.rounds))
            costs = cases[name]["us_per_parameter"].items()
            print(f"{name}: {cases[name]['ratio_vs']['apply_fused']:.3f} of apply_fused; µs a parameter:", flush=True)
            print("  " + ", ".join(f"{peer} {us:.2f}" for peer, us in sorted(costs, key=lambda pair: pair[1])))
            for peer, reason in cases[name]["left_out"].items():
                print(f"  {peer}: {reason}")
    result: dict[str, Any] = {
        f"ratio_vs_{peer}": {name: case["ratio_vs"][peer] for name, case in cases.items()}
        for peer in ("apply_fused", "python_hook")
    }
    result["us_per_parameter"] = {name: case["us_per_parameter"] for name, case in cases.items()}
    if FEW in cases and MANY in cases:
        few, many = (cases[name]["us_per_parameter"] for name in (FEW, MANY))
        result["flatness"] = {peer: many[peer] / few[peer] for peer in many if peer in few}
        print(f"one of 10,000 parameters over one of 100: {result['flatness']['bwdfuse']:.2f}")
    _pairs.report({**result, "cases": cases}, options.json)


if __name__ == "__main__":
    main()
