"""Speed of this package beside torch's optimizers and others: what ``python -m bwdfuse bench`` and ``benchmarks/`` run."""
