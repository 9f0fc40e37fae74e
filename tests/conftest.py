"""Fixtures shared by the tests of hooks and optimizers; counts of what torch's own test data met, printed after the run."""

import pytest
import torch

import bwdfuse


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=["exchange", "attributes"])
def exchange(request, monkeypatch):
    """Every test that asks for it runs with torch's DLPack exchange table and with the fallback of older torches."""
    from bwdfuse._optimizer import BackwardOptimizer

    monkeypatch.setattr(BackwardOptimizer, "_exchange", request.param == "exchange")
    return request.param


@pytest.fixture
def mlp():
    """Builds the same small model at every call."""

    def build(dtype=torch.float32):
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5)).to(dtype)

    return build


@pytest.fixture
def train():
    """Runs `steps` updates of a model and returns losses; the data depends on the step number alone."""

    def run(model, optimizer, steps, *, first=0, scheduler=None):
        losses = []
        dtype = next(model.parameters()).dtype
        for step in range(first, first + steps):
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(16, 7, generator=generator).to(dtype)
            target = torch.randn(16, 5, generator=generator).to(dtype)
            loss = torch.nn.functional.mse_loss(model(batch), target)
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return run


@pytest.fixture
def one():
    """A scalar-like parameter and its optimizer: `p, opt = one(1.0, lr=0.1)`."""

    def build(value=1.0, **options):
        param = torch.nn.Parameter(torch.tensor([value]) if isinstance(value, float) else torch.tensor(value))
        return param, bwdfuse.AdamW([param], **options)

    return build


COUNTS = pytest.StashKey[dict]()


def pytest_configure(config):
    config.stash[COUNTS] = {"honoured": 0, "refused": 0}


@pytest.fixture
def counted(request):
    """counted("honoured") or counted("refused"), once the test has shown it."""

    def count(outcome):
        request.config.stash[COUNTS][outcome] += 1

    return count


def pytest_terminal_summary(terminalreporter, config):
    counts = config.stash.get(COUNTS, None)
    if counts is None or not any(counts.values()):
        return
    failed = sum("test_conformance.py" in report.nodeid for report in terminalreporter.stats.get("failed", ()))
    terminalreporter.write_line(
        f"torch's optimizer test data: honoured {counts['honoured']}, refused {counts['refused']}, failed {failed}"
    )
