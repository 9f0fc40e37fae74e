"""Sections G to L, as far as they need no GPU and are tested nowhere else: graphs, versions, building."""

import field
import pytest
import torch
from field import faults, replaced_by
from torch import nn

import bwdfuse
from bwdfuse import _C, optim
from bwdfuse.errors import ConfigError


class Recompiles(field.AdamW):
    """Something the compiler guards on changes: at every step."""

    def step(self, closure=None):
        torch._dynamo.reset()
        return super().step(closure)


@faults(replaced_by(Recompiles))
def test_b80_a_compiled_model_is_compiled_once(fault):
    """pytorch/pytorch#118435: gradients that go back to None made the compiler start again at every step."""
    eager, compiled = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(2))
    compiled.load_state_dict(eager.state_dict())
    torch._dynamo.reset()
    run = torch.compile(compiled, backend="aot_eager")
    optimizers = [bwdfuse.AdamW(m.parameters(), lr=0.01, bwd_hook=True) for m in (eager, compiled)]
    for step in range(5):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip((eager, run), optimizers, strict=True):
            with torch.compiler.set_stance("fail_on_recompile" if step >= 2 else "default"):
                model(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def hook_taken_for_granted(monkeypatch):
    monkeypatch.setattr("bwdfuse.attach.refuse_unarmable", lambda *_, **__: None)


@faults(hook_taken_for_granted)
def test_b83_a_torch_without_the_hook_is_named(fault, monkeypatch):
    """axolotl-ai-cloud/axolotl#1598: an old torch ended in a bare AttributeError."""
    p = nn.Parameter(torch.ones(1))
    monkeypatch.delattr(torch.Tensor, "register_post_accumulate_grad_hook")
    with pytest.raises(ConfigError, match=rf"needs torch >= 2\.\d+.*found torch {torch.__version__.split('+')[0]}"):
        optim.AdamW([p], bwd_hook=True)


def built_for_this_machine(monkeypatch):
    info = _C.build_info()
    monkeypatch.setattr(_C, "build_info", lambda: {**info, "flags": info["flags"] + " -march=native"})


@faults(built_for_this_machine)
def test_b91_nothing_is_built_for_the_builders_cpu(fault):
    """deepspeedai/DeepSpeed#7556, #788: kernels of the build machine's CPU on another one."""
    info = _C.build_info()
    assert "-march" not in info["flags"] and not any("-march" in flags for flags in info["isa_flags"].values())
    assert info["isa_flags"]["baseline"] == ""
