"""The examples run as a reader would run them, and both ways train the same."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    if name == "accelerate_loop":
        pytest.importorskip("transformers")
        # a process has one state; another run may want another precision
        pytest.importorskip("accelerate").state.AcceleratorState._reset_state(reset_partial_state=True)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def updates(monkeypatch):
    """Whether each update that a bwdfuse optimizer closes was armed: a run that fell back to stock would show."""
    from bwdfuse.optim import AdamW

    closed = []
    step = AdamW.step

    def counting(self, *args, **kwargs):
        step(self, *args, **kwargs)
        closed.append(self.armed)

    monkeypatch.setattr(AdamW, "step", counting)
    return closed


@pytest.mark.parametrize("name", ["plain_loop", "accelerate_loop"])
def test_both_ways_train_the_same(name, monkeypatch):
    """Without stock's clipping, losses agree to float32 rounding, amplified by training."""
    main = load(name).main
    closed = updates(monkeypatch)
    stock = main(["--clip", "inf"])
    assert closed == []
    fused = main(["--bwd-hook"])
    assert closed == [True] * len(fused)
    assert fused == pytest.approx(stock, rel=1e-3)
    assert fused[-1] < 0.8 * fused[0]


def test_accelerate_in_bfloat16(monkeypatch):
    main = load("accelerate_loop").main
    closed = updates(monkeypatch)
    losses = main(["--bwd-hook", "--mixed-precision", "bf16", "--epochs", "1"])
    assert closed == [True] * len(losses) and losses[-1] < losses[0]


@pytest.mark.parametrize(("first", "second"), [("on", "on"), ("off", "on"), ("on", "off")])
def test_checkpoints_go_both_ways(tmp_path, first, second):
    main = load("plain_loop").main
    flags = {"on": ["--bwd-hook"], "off": ["--clip", "inf"]}
    whole = main([*flags["on"], "--steps", "20"])
    checkpoint = ["--checkpoint", str(tmp_path / "state.pt")]
    main([*flags[first], *checkpoint, "--steps", "10"])
    rest = main([*flags[second], *checkpoint, "--steps", "20"])
    exact = first == second == "on"
    assert rest == (whole[10:] if exact else pytest.approx(whole[10:], rel=1e-3))


@pytest.mark.parametrize("name", ["plain_loop", "accelerate_loop"])
def test_as_a_program(name):
    load(name)  # skips where its libraries are missing
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--bwd-hook"]
    root = str(EXAMPLES.parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert len(losses) >= 2 and losses[-1] < losses[0]
    if name == "plain_loop":
        assert done.stdout.count("gradients after backward 0") == len(losses)


@pytest.mark.parametrize("name", ["plain_loop", "accelerate_loop"])
def test_the_difference_shown_is_ten_lines_and_true(name):
    """Every line that the docstring takes away or adds stands in the script."""
    doc, code = (EXAMPLES / f"{name}.py").read_text().split('"""', 2)[1:]
    changed = [line.strip() for line in doc.splitlines() if line.startswith(("    +", "    -"))]
    assert 0 < len(changed) <= 10
    statements = [line.strip() for line in code.splitlines()]
    assert [line for line in changed if line[1:].strip() not in statements] == []
