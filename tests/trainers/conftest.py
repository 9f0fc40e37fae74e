"""Runs of verl's trainer, each made once and shared by the tests that compare them."""

import sys
from pathlib import Path

import pytest
from verl_runs import Run, Trainer

# trl is installed beside the environment's packages (see the Makefile); this process may import it, verl's may not.
sys.path.append(str(Path(sys.prefix) / "trl"))

ON = ("optim.bwd_hook=true", "optim.clip_grad=null")
#: A bound that clips nothing: verl without our flag insists on one.
UNCLIPPED = "optim.clip_grad=1e9"
#: torch's optimizer with the kernel that the seam puts behind our hooks.
STOCK = (UNCLIPPED, "+optim.override_optimizer_config.fused=True")


@pytest.fixture(scope="session")
def trainer(tmp_path_factory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("verl"))


def finished(run: Run) -> Run:
    assert run.returncode == 0, run.log[-6000:]
    return run


@pytest.fixture(scope="session")
def ours_off(trainer) -> Run:
    return finished(trainer("ours_off", "optim.optimizer_impl=bwdfuse.optim", UNCLIPPED))


@pytest.fixture(scope="session")
def ours_on(trainer) -> Run:
    return finished(trainer("ours_on", *ON))


@pytest.fixture(scope="session")
def stock(trainer) -> Run:
    return finished(trainer("stock", *STOCK))


@pytest.fixture(scope="session")
def seam(trainer) -> Run:
    """Ours on, with torch's fused kernel behind the hooks."""
    return finished(trainer("seam", *ON, modules=("torch_kernel",)))
