"""Section F: sizes, memory layouts and dtypes."""

import copy

import field
import numpy as np
import pytest
import torch
from field import adamw, backward, demands_equal_strides, faults, kernel, options_dropped, raw_memory, replaced_by
from torch import nn

import bwdfuse
from bwdfuse import functional
from bwdfuse.errors import BwdFuseError


@faults(kernel(raw_memory))
def test_b61_strides_are_followed(fault):
    """bitsandbytes-foundation/bitsandbytes#1185, PR#1187: equal gradients, different updates, where memory was not row-major."""
    grad = torch.tensor([[1.0, -1.0]] * 3)
    p = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    whole = torch.arange(12.0).view(3, 4)
    sliced = nn.Parameter(whole[:, ::2])
    expanded = nn.Parameter(torch.zeros(3, 2))
    opt = bwdfuse.AdamW([p, sliced, expanded], lr=1.0, weight_decay=0.0, eps=0.0, bwd_hook=True)
    (p * grad).sum().backward()
    (sliced * grad).sum().backward()
    expanded.backward(torch.tensor([[1.0], [-1.0], [1.0]]).expand(3, 2))
    opt.step()
    assert torch.allclose(p, torch.tensor([[-1.0, 4.0], [0.0, 5.0], [1.0, 6.0]]), atol=1e-5)
    assert torch.allclose(sliced, torch.tensor([[-1.0, 3.0], [3.0, 7.0], [7.0, 11.0]]), atol=1e-5)
    assert torch.equal(whole[:, 1::2], torch.tensor([[1.0, 3.0], [5.0, 7.0], [9.0, 11.0]]))  # nothing in between
    assert torch.allclose(expanded, torch.tensor([[-1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]]), atol=1e-5)


@faults(kernel(demands_equal_strides))
def test_b63_a_gradient_of_another_layout_is_taken(fault):
    """pytorch/pytorch#110758, #126585: the fused step failed on strides that convolutions return."""

    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(1, 4, 5)

        def forward(self, x):
            return self.conv(x.mT)

    image = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    for model, x in ((Transposed(), torch.randn(2, 9, 1)), (image, torch.randn(2, 3, 9, 9))):
        ours, stock = model, copy.deepcopy(model)
        opt = bwdfuse.AdamW(ours.parameters(), lr=0.01, bwd_hook=True)
        reference = torch.optim.AdamW(stock.parameters(), lr=0.01)
        strides = [p.stride() for p in ours.parameters()]
        for _ in range(5):
            for m, o in ((ours, opt), (stock, reference)):
                m(x).square().mean().backward()
                o.step()
                o.zero_grad()
        for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
            assert (a - b).abs().max() <= 1e-6
        assert strides == [p.stride() for p in ours.parameters()]


def nothing_after_an_empty_one(param, grad, state, group, step):
    group["seen empty"] = group.get("seen empty") or param.numel() == 0
    if not group["seen empty"]:
        adamw(param, grad, state, group, step)


@faults(kernel(nothing_after_an_empty_one))
def test_b64_an_empty_parameter_is_no_obstacle(fault):
    """NVIDIA/TransformerEngine#3207, NVIDIA-NeMo/Automodel PR#2997: other updates vanished beside an empty tensor."""
    for order in (1, -1):
        params = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.empty(0))][::order]
        opt = bwdfuse.AdamW(params, lr=0.1, weight_decay=0.0, bwd_hook=True)
        for p in sorted(params, key=torch.numel):
            backward(p, 1.0)
        opt.step()
        assert max(params, key=torch.numel).item() == pytest.approx(0.9, abs=1e-6)
    opt = bwdfuse.AdamW([nn.Parameter(torch.empty(0, 3))], bwd_hook=True)
    backward(opt.param_groups[0]["params"][0], 1.0)
    opt.step()
    assert opt.stats()["params_stepped"] == 1


@faults(options_dropped("master_weights"))
def test_b66_master_weights_are_not_accepted_and_ignored(fault):
    """NVIDIA/apex#1728: the option gave no master copy for bfloat16. Here parameters are kept in float32 instead."""
    with pytest.raises(TypeError, match="master_weights"):
        bwdfuse.AdamW([nn.Parameter(torch.ones(1, dtype=torch.bfloat16))], master_weights=True)


def tails_forgotten(monkeypatch):
    right = functional.adamw_

    def step(*arrays, **options):
        whole = len(arrays[0]) // 8 * 8
        return right(*(a[:whole] for a in arrays), **options)

    monkeypatch.setattr(functional, "adamw_", step)


@pytest.mark.parametrize("threads", [1, 4])
@faults(tails_forgotten)
def test_b68_every_tail_is_stepped_and_nothing_beyond(fault, threads):
    """deepspeedai/DeepSpeed#1983, PR#3109: some sizes crashed or erred, and a loose tolerance hid it."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    before = bwdfuse.get_num_threads()
    bwdfuse.set_num_threads(threads)
    try:
        for n in (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 1023, 1024, 1025):
            for dtype, state in (("f4", "f4"), ("f8", "f8"), (ml_dtypes.bfloat16, ml_dtypes.bfloat16), ("f2", "f4")):
                rng = np.random.default_rng(n)
                guarded = [np.full(n + 3, 7, t) for t in (dtype, dtype, state, state)]
                for array in guarded:
                    array[:n] = rng.random(n)
                p, g, m, v = (a[:n].astype(np.float64) for a in guarded)
                functional.adamw_(*(a[:n] for a in guarded), step=1, lr=0.1, weight_decay=0.0)
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                want = p - 0.1 / (1 - 0.9) * m / (np.sqrt(v / (1 - 0.999)) + 1e-8)
                error = abs(guarded[0][:n].astype(np.float64) - want)
                rounding = {2: 2.0**-8 if dtype != "f2" else 2.0**-11, 4: 0.0, 8: 0.0}[guarded[0].itemsize]
                assert (error <= 1e-6 + rounding * np.maximum(abs(want), 2.0**-14)).all(), (n, dtype)
                assert all((a[n:] == 7).all() for a in guarded)
    finally:
        bwdfuse.set_num_threads(before)


class Densifies(field.Naive):
    """A sparse gradient made dense: stepped without a word."""

    def register(self, param, options):
        own = torch.optim.AdamW([param], **options)

        def hook(p):
            p.grad = p.grad.to_dense()
            own.step()
            p.grad = None

        param.register_post_accumulate_grad_hook(hook)


@faults(replaced_by(Densifies), replaced_by(field.Naive))
def test_b69_a_sparse_gradient_is_refused_by_name(fault):
    """pytorch/pytorch#82486: a sparse gradient met dense code."""
    emb = nn.Embedding(5, 2, sparse=True)
    before = emb.weight.detach().clone()
    opt = bwdfuse.AdamW(emb.named_parameters(), bwd_hook=True)
    with pytest.raises(BwdFuseError, match=r"gradient of parameter 'weight'.*sparse=False"):
        emb(torch.tensor([1, 1])).sum().backward()
    assert torch.equal(emb.weight, before)
    assert opt.stats()["param_steps"] == 0
