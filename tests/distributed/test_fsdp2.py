"""Real processes with gloo: FSDP2, DDP's refusal, DCP. The scenarios are in ranks.py; one launch runs them all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCENARIOS = [
    "fsdp2_fused_equals_unfused_and_one_process",
    "fsdp2_mixed_precision",
    "armed_before_fully_shard_raises",
    "ddp_is_refused_before_and_after_arming",
    "ignored_parameters_are_stepped_beside_sharded_ones",
    "second_micro_batch_raises_on_every_rank",
    "checkpoint_round_trip",
]


def launch(names, ranks, script="ranks.py"):
    script = Path(__file__).with_name(script)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(script),
        *names,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.fixture(scope="module")
def together():
    """All scenarios in one pair of processes; a failing one ends it, and is then named by its own test."""
    return launch(SCENARIOS, 2)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(together, name):
    if f"passed {name}" not in together.stdout:
        alone = launch([name], 2)
        assert alone.returncode == 0, alone.stdout[-3000:] + alone.stderr[-6000:]
