"""What two gloo processes do: each function is one scenario, called on every rank, asserting on every rank."""

import copy
import sys
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import bwdfuse


def build(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).to(
        dtype
    )  # one row over two ranks: an empty shard


def shard(model, mesh, **options):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator)


def train(model, opt, steps, *, first=0):
    """Each rank its own data; the loss is a mean over ranks, as FSDP reduces it."""
    for step in range(first, first + steps):
        model(batch(step, dist.get_rank())).square().mean().backward()
        opt.step()
        opt.zero_grad()


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(model):
    return [full(p.detach()) for p in model.parameters()]


def fsdp2_fused_equals_unfused_and_one_process(mesh):
    off, on = shard(build(), mesh), shard(build(), mesh)
    opt_off, opt_on = bwdfuse.AdamW(off.parameters(), lr=0.01), bwdfuse.AdamW(on.parameters(), lr=0.01, bwd_hook=True)
    train(off, opt_off, 5)
    train(on, opt_on, 5)
    assert all(torch.equal(a, b) for a, b in zip(weights(off), weights(on), strict=True))
    for p, q in zip(off.parameters(), on.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            moments = opt_off.state[p][name], opt_on.state[q][name]
            assert isinstance(moments[1], DTensor) and torch.equal(full(moments[0]), full(moments[1]))
        assert opt_on.state[q]["step"] == 5
    assert opt_on.stats()["native_steps"] == 20 and opt_on.stats()["grad_norm"] is None
    alone = build()
    opt = bwdfuse.AdamW(alone.parameters(), lr=0.01)
    for step in range(5):
        loss = sum(alone(batch(step, rank)).square().mean() for rank in range(dist.get_world_size()))
        (loss / dist.get_world_size()).backward()
        last = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in alone.parameters()])).item()
        opt.step()
        opt.zero_grad()
    for a, b in zip(weights(on), weights(alone), strict=True):
        assert torch.allclose(a, b, atol=1e-6), "another order of summation over ranks, nothing else"
    assert opt_on.grad_norm() == pytest.approx(last, rel=1e-5) and opt_on.stats()["grad_norm"] == opt_on.grad_norm()


def fsdp2_mixed_precision(mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [shard(build(), mesh, mp_policy=policy) for _ in range(2)]
    for model, hook in zip(models, (False, True), strict=True):
        train(model, bwdfuse.AdamW(model.parameters(), lr=0.01, bwd_hook=hook), 3)
    assert all(torch.equal(a, b) for a, b in zip(weights(models[0]), weights(models[1]), strict=True))


def armed_before_fully_shard_raises(mesh):
    model = build()
    with pytest.raises(bwdfuse.ConfigError, match="2 ranks and unsharded parameters"):
        bwdfuse.AdamW(model.parameters(), bwd_hook=True)
    opt = bwdfuse.AdamW(model.parameters())
    shard(model, mesh)
    opt.param_groups[0]["params"] = list(model.parameters())
    opt.arm(model)
    train(model, opt, 1)
    assert opt.stats()["params_stepped"] == 4


def ddp_is_refused_before_and_after_arming(mesh):
    p = nn.Parameter(torch.ones(1))
    with pytest.raises(bwdfuse.ConfigError, match="DistributedDataParallel.*fully_shard"):
        bwdfuse.AdamW([p], bwd_hook=True)
    # armed while alone, as in a notebook that starts its process group later
    world, dist.get_world_size = dist.get_world_size, lambda *_: 1
    opt = bwdfuse.AdamW([p], bwd_hook=True)
    dist.get_world_size = world
    with pytest.raises(bwdfuse.ConfigError, match="replicas would diverge"):
        (p * (1 + 2 * dist.get_rank())).sum().backward()
    assert p.item() == 1.0 and opt.state[p]["step"] == 0


def ignored_parameters_are_stepped_beside_sharded_ones(mesh):
    models = [build() for _ in range(2)]
    for model, hook in zip(models, (False, True), strict=True):
        fully_shard(model, mesh=mesh, ignored_params={model[0].bias})
        opt = bwdfuse.AdamW(model.parameters(), lr=0.01, bwd_hook=hook)
        for step in range(3):
            model(
                batch(step, 0)
            ).square().mean().backward()  # the same data everywhere: nobody reduces an ignored gradient
            opt.step()
            opt.zero_grad()
        assert opt.grad_norm() > 0
    assert not isinstance(models[1][0].bias, DTensor)
    assert all(torch.equal(a, b) for a, b in zip(weights(models[0]), weights(models[1]), strict=True))


def second_micro_batch_raises_on_every_rank(mesh):
    model = shard(build(), mesh)
    opt = bwdfuse.AdamW(model.parameters(), bwd_hook=True)
    model(batch(0, 0)).sum().backward()
    before = weights(model)
    with pytest.raises(bwdfuse.AccumulationError, match="second gradient"):
        model(batch(1, 0)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    del opt


def checkpoint_round_trip(mesh):
    """DCP: two ranks write, two ranks read back to the same bits; torch's optimizer reads it as well."""
    model = shard(build(), mesh)
    opt = bwdfuse.AdamW(model.parameters(), lr=0.01, bwd_hook=True)
    train(model, opt, 3)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({"model": model.state_dict(), "optim": get_optimizer_state_dict(model, opt)}, checkpoint_id=folder[0])
    saved = copy.deepcopy(
        [full(opt.state[p][k]) for p in model.parameters() for k in ("exp_avg", "exp_avg_sq", "step")]
    )
    train(model, opt, 2, first=3)
    expected = weights(model)
    for hook in (True, False):
        again = shard(build(), mesh)
        other = bwdfuse.AdamW(again.parameters(), lr=0.5, bwd_hook=hook)
        state = {"model": again.state_dict(), "optim": get_optimizer_state_dict(again, other)}
        dcp.load(state, checkpoint_id=folder[0])
        again.load_state_dict(state["model"])
        set_optimizer_state_dict(again, other, state["optim"])
        loaded = [full(other.state[p][k]) for p in again.parameters() for k in ("exp_avg", "exp_avg_sq", "step")]
        assert all(torch.equal(a, b) for a, b in zip(saved, loaded, strict=True))
        train(again, other, 2, first=3)
        assert all(torch.equal(a, b) for a, b in zip(expected, weights(again), strict=True))
    stock_model = shard(build(), mesh)
    stock = torch.optim.AdamW(stock_model.parameters())
    state = {"optim": get_optimizer_state_dict(stock_model, stock)}
    dcp.load(state, checkpoint_id=folder[0])
    set_optimizer_state_dict(stock_model, stock, state["optim"])
    p = next(iter(stock_model.parameters()))
    assert torch.equal(full(stock.state[p]["exp_avg"]), saved[0])


def main(scenarios):
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in sys.argv[1:]:
                scenarios[name](mesh)
                dist.barrier()
                if dist.get_rank() == 0:
                    print("passed", name, flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(globals())
