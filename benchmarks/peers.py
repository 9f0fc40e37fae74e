"""Which optimizers can be measured on this machine, and why the others cannot. The adapters are in bwdfuse/bench/peers.py.

python -m benchmarks.peers [--only TEXT]
"""

from __future__ import annotations

from benchmarks import _pairs
from bwdfuse.bench import peers, train


def main() -> None:
    options = _pairs.arguments(__doc__).parse_args()
    result: dict[str, dict[str, str]] = {}
    for name, peer in peers.PEERS.items():
        if options.only in name:
            result[name] = {}
            for dtype_name, dtype in train.DTYPES.items():
                _, left_out = peers.usable([name], dtype)
                result[name][dtype_name] = left_out.get(name, "runs, result checked")
            print(f"{name}: {result[name]}" + (f" ({peer.note})" if peer.note else ""), flush=True)
    _pairs.report({"peers": result}, options.json)


if __name__ == "__main__":
    main()
