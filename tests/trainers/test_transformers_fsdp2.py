"""transformers under FSDP2, two real processes: accelerate swaps the parameters, so everything hangs on when we arm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp2")
    script = Path(__file__).with_name("hf_fsdp2.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, str(script), str(folder)], capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert done.returncode == 0 and len(lines) == 1, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(lines[0].removeprefix("FOUND"))


def test_on_equals_off_bit_for_bit(found):
    assert found["losses"] == found["tensors"] == {"off": True, "on": True, "callback": True}
    assert found["native_steps"] == 6 * found["params"] > 0


def test_the_norm_is_of_the_whole_gradient(found):
    """A sum over the ranks; stock's is rounded to float32."""
    assert len(found["norms"]["on"]) == 6 and min(found["norms"]["on"]) > 0
    assert found["norms"]["on"] == found["norms"]["callback"] == pytest.approx(found["norms"]["off"], rel=2**-20)


@pytest.mark.parametrize("direction", ["on on", "off on", "on off", "on callback", "callback on"])
def test_sharded_checkpoints_go_in_every_direction(found, direction):
    assert found["resumed"][direction]
