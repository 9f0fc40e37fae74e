"""Runs each test of this folder as it is, and once with each fault that the field knew put in: then it must fail."""

import pytest
import torch


def pytest_generate_tests(metafunc):
    faults = getattr(metafunc.function, "faults", ())
    if "fault" in metafunc.fixturenames:
        names = [f"fault: {patch.__name__.replace('_', ' ')}" for patch in faults]
        metafunc.parametrize("fault", [None, *faults], ids=["right", *names], indirect=True)


@pytest.fixture(autouse=True)
def fault(request, monkeypatch):
    """Puts the fault in, or nothing."""
    torch.manual_seed(0)
    patch = getattr(request, "param", None)
    if patch is not None:
        patch(monkeypatch)
    return patch


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    outcome = yield
    if pyfuncitem.funcargs.get("fault") is None:
        return
    if outcome.excinfo is None:
        outcome.force_exception(AssertionError("the fault was put in and the test did not see it"))
    elif issubclass(outcome.excinfo[0], (Exception, pytest.fail.Exception)):
        outcome.force_result(True)
