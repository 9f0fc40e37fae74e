"""What gloo processes do with FSDP1: each function is one scenario, called on every rank, asserting on every rank."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import batch, main, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.multiprocessing.reductions import StorageWeakRef

import bwdfuse
from bwdfuse import _fsdp1 as fsdp1

CPU = torch.device("cpu")
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def fused_adamw(param, grad, state, group, step):
    """torch's kernel where ours stands: behind the same hooks, all bits must be stock's."""
    torch._fused_adamw_(
        [param],
        [grad],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [torch.tensor(step, dtype=torch.float32)],
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=None,
    )


class TorchsKernel(bwdfuse.AdamW):
    _kernel = staticmethod(fused_adamw)


def build(tied=False):
    """Odd sizes: pieces start anywhere in the flat parameter, and some lie on one rank alone."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7, bias=False), nn.Linear(7, 7), nn.Linear(7, 1))
    if tied:
        model[3].weight = model[2].weight
    return model


def wrap(model, *, nested=True, **options):
    policy = ModuleWrapPolicy({nn.Linear}) if nested else None
    return FSDP(model, auto_wrap_policy=policy, device_id=CPU, **{"use_orig_params": True, **options})


def pieces(model):
    return [param.detach().clone() for param in model.parameters()]


def moments(model, opt):
    states = [opt.state[param] for param in model.parameters() if opt.state.get(param)]
    return [state[name].clone() for state in states for name in ("exp_avg", "exp_avg_sq", "step")]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def equals_stock(tied=False, **options):
    """Weights, states and norm after five updates: torch's kernel behind our slots against torch; native on against off."""
    models = [wrap(build(tied), **options) for _ in range(4)]
    opts = [
        torch.optim.AdamW(models[0].parameters(), lr=0.01, fused=True),
        TorchsKernel(models[1].parameters(), lr=0.01, bwd_hook=True),
        bwdfuse.AdamW(models[2].parameters(), lr=0.01),
        bwdfuse.AdamW(models[3].parameters(), lr=0.01, bwd_hook=True),
    ]
    for model, opt in zip(models, opts, strict=True):
        train(model, opt, 5)
    for stock, ours in ((0, 1), (2, 3)):
        assert same(pieces(models[stock]), pieces(models[ours]))
        assert same(moments(models[stock], opts[stock]), moments(models[ours], opts[ours]))
    differ = torch.tensor(not same(moments(models[0], opts[0]), moments(models[2], opts[2])), dtype=torch.int)
    dist.all_reduce(differ)
    assert differ, "two kernels that never differ compare nothing"
    here = sum(param.numel() > 0 for param in models[3].parameters())
    assert opts[3].stats()["native_steps"] == 5 * here and opts[3].stats()["params_stepped"] == here
    assert all(param.grad is None for param in models[3].parameters())
    models[0](batch(5, dist.get_rank())).square().mean().backward()
    norm = models[0].clip_grad_norm_(1e9).item()
    for model, opt in list(zip(models, opts, strict=True))[1:]:
        train(model, opt, 1, first=5)
    assert opts[1].grad_norm() == pytest.approx(norm, rel=1e-6)  # a sum in double against one in float
    assert opts[2].grad_norm() == opts[3].grad_norm() == opts[3].stats()["grad_norm"]


def each_unit_sharded(mesh):
    equals_stock()


def one_unit_whose_parameters_lie_on_different_ranks(mesh):
    equals_stock(nested=False)
    model = wrap(build(), nested=False)
    elsewhere = [param.numel() == 0 for param in model.parameters()]
    assert any(elsewhere) and not all(elsewhere)


def tied_weights(mesh):
    equals_stock(tied=True, nested=False)


def mixed_precision(mesh):
    equals_stock(mixed_precision=BF16)


def unsharded_between_forward_and_backward(mesh):
    equals_stock(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


def replicated(mesh):
    equals_stock(sharding_strategy=ShardingStrategy.NO_SHARD)


def replicated_mixed_precision(mesh):
    equals_stock(sharding_strategy=ShardingStrategy.NO_SHARD, mixed_precision=BF16)


def replicated_shards(mesh):
    """HYBRID_SHARD on four ranks: reduced over shards and over replicas before the step, its norm summed over shards only."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        equals_stock(sharding_strategy=strategy, device_mesh=grid)


def frozen_parameters_beside_trained_ones(mesh):
    """As LoRA has them in one unit: a rank may then have nothing to step, and closes its updates all the same."""

    def part(model):
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)
        model[3].requires_grad_(False)
        return model  # the last layer, 8 of 162 elements

    models = [wrap(part(build()), nested=False) for _ in range(2)]
    opts = [bwdfuse.AdamW(model.parameters(), lr=0.01, bwd_hook=on) for model, on in zip(models, (0, 1), strict=True)]
    for model, opt in zip(models, opts, strict=True):
        train(model, opt, 3)
    assert same(pieces(models[0]), pieces(models[1]))
    steps = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(steps, torch.tensor([opts[1].stats()["native_steps"]]))
    assert [int(count) for count in steps] == [0, 6]
    assert opts[1].grad_norm() == pytest.approx(opts[0].grad_norm()) and opts[1].grad_norm() > 0
    assert all(module._handle.flat_param.grad is None for module in FSDP.fsdp_modules(models[1]))


# ---- memory ------------------------------------------------------------------------------------------------------


def one_units_gradient_is_alive_at_a_time(mesh):
    """At every step of a parameter, of all gradients that any parameter was stepped from, only this unit's has its storage."""
    model = wrap(nn.Sequential(nn.Linear(6, 8), *(nn.Linear(8, 8) for _ in range(5))))
    alive, at_once = [], []

    def watch(param, grad, state, group, step):
        storage = StorageWeakRef(grad.untyped_storage())
        alive[:] = [other for other in alive if not other.expired()]
        if all(other.cdata != storage.cdata for other in alive):
            alive.append(storage)
        at_once.append(len(alive))

    opt = bwdfuse.AdamW(model.parameters())
    opt._plan = type(opt._plan)(opt, "adamw", kernel=watch)
    train(model, opt, 1)
    assert max(at_once) == 6, "without hooks every unit's gradient is kept"
    at_once.clear()
    opt.arm(model)
    train(model, opt, 3)
    assert len(at_once) >= 3 * 6 and set(at_once) == {1}
    assert all(gradient.expired() for gradient in alive)


# ---- guards ------------------------------------------------------------------------------------------------------


def second_micro_batch_raises_on_every_rank(mesh):
    """Before anything is stepped twice; who accepts that goes on, with the same bits as if it had not been tried."""
    after = []
    for tried in (False, True):
        model = wrap(build())
        opt = bwdfuse.AdamW(model.parameters(), lr=0.01, bwd_hook=True)
        params = list(model.parameters())
        model(batch(0, 0)).sum().backward()
        if tried:
            before = pieces(model), moments(model, opt)
            with pytest.raises(bwdfuse.AccumulationError, match="second gradient"):
                model(batch(1, 0)).sum().backward()
            assert same(before[0], [param.detach() for param in params])
            states = [opt.state[param] for param in params if opt.state.get(param)]
            assert same(before[1], [state[name] for state in states for name in ("exp_avg", "exp_avg_sq", "step")])
            with pytest.raises(bwdfuse.AccumulationError, match="second gradient"):
                opt.step()
            opt.acknowledge_partial_update()
        else:
            opt.step()
        train(model, opt, 3)
        after.append([param.detach().clone() for param in params])
    assert same(*after)


def a_forward_that_no_backward_follows_can_be_forgotten(mesh):
    """Mixed precision gives every forward its own graph, and FSDP1 waits on that of the first."""
    after = []
    for precision in (None, BF16):
        for forgotten in (False, True):
            model = wrap(build(), mixed_precision=precision)
            opt = bwdfuse.AdamW(model.parameters(), lr=0.01, bwd_hook=True)
            train(model, opt, 1)
            if forgotten:
                model(batch(9, dist.get_rank())).sum()
                fsdp1.forget_forward(model)
            train(model, opt, 2)
            after.append(pieces(model))
    assert same(*after[:2]) and same(*after[2:])


def no_sync_is_refused_before_backward(mesh):
    model = wrap(build())
    opt = bwdfuse.AdamW(model.parameters(), lr=0.01, bwd_hook=True)
    train(model, opt, 1)
    before = pieces(model)
    with model.no_sync():
        with torch.no_grad():
            model(batch(0, 0))
        with pytest.raises(bwdfuse.AccumulationError, match=r"no_sync\(\).*leave no_sync\(\) out"):
            model(batch(0, 0))
    assert same(before, pieces(model))
    train(model, opt, 1)
    opt.disarm()
    with model.no_sync():
        model(batch(0, 0)).sum().backward()
    assert same(before, before) and any(param.grad is not None for param in model.parameters())


def a_backward_alone_under_no_sync_is_found_by_step(mesh):
    model = wrap(build())
    opt = bwdfuse.AdamW(model.parameters(), bwd_hook=True)
    loss = model(batch(0, 0)).sum()
    before = pieces(model)
    with model.no_sync():
        loss.backward()
    with pytest.raises(bwdfuse.BwdFuseError, match="holds a gradient that its hook should have consumed"):
        opt.step()
    assert same(before, pieces(model))


def clipping_is_refused_on_every_rank(mesh):
    """Also where a rank steps nothing: it would wait for the others."""
    model = wrap(build().requires_grad_(False), nested=False)
    model[4].requires_grad_(True)
    opt = bwdfuse.AdamW(model.parameters(), bwd_hook=True)
    model(batch(0, 0)).sum().backward()
    with pytest.raises(bwdfuse.ConfigError, match="clipping of gradients while parameter"):
        model.clip_grad_norm_(1.0)
    with pytest.raises(bwdfuse.ConfigError, match="clipping of gradients while parameter"):
        torch.nn.utils.clip_grad_value_(list(model.parameters()), 1.0)
    opt.step()
    opt.disarm()
    model(batch(0, 0)).sum().backward()
    assert model.clip_grad_norm_(1.0) > 0


def what_fsdp1_cannot_do_is_refused(mesh):
    flat = wrap(build(), use_orig_params=False)
    with pytest.raises(bwdfuse.ConfigError, match="flat parameter.*use_orig_params=True"):
        bwdfuse.AdamW(flat.parameters(), bwd_hook=True)
    offloaded = wrap(build(), cpu_offload=CPUOffload(offload_params=True))
    with pytest.raises(bwdfuse.ConfigError, match="set cpu_offload=None"):
        bwdfuse.AdamW(offloaded.parameters(), bwd_hook=True)
    grid = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    alone = wrap(build(), device_mesh=grid, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    opt = bwdfuse.AdamW(alone.parameters(), lr=0.01)
    with pytest.raises(bwdfuse.ConfigError, match="shard groups of one rank"):
        opt.arm(alone)
    assert not any(hasattr(param, "_in_backward_optimizers") for param in alone.parameters())
    train(alone, opt, 1)  # what the refusal says of torch is so
    weights = [torch.empty_like(alone[0].weight) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, alone[0].weight.detach())
    assert not torch.equal(weights[0], weights[1])


def a_model_that_does_not_hold_the_parameters_is_refused(mesh):
    model = wrap(build())
    opt = bwdfuse.AdamW(model.parameters())
    with pytest.raises(bwdfuse.ConfigError, match=r"5 parameters are FSDP1's.*optimizer.arm\(model\)"):
        opt.arm(model[0])
    opt.arm(model)
    train(model, opt, 1)


def others_in_the_same_place_are_left_alone(mesh):
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = wrap(build())
    _apply_optimizer_in_backward(torch.optim.SGD, model[0].parameters(), {"lr": 0.1}, register_hook=False)
    theirs = [param._in_backward_optimizers for param in model[0].parameters()]
    with pytest.raises(bwdfuse.ConfigError, match="_apply_optimizer_in_backward: remove that call"):
        bwdfuse.AdamW(model.parameters(), bwd_hook=True)
    assert [param._in_backward_optimizers for param in model[0].parameters()] == theirs
    rest = [param for layer in model[1:] for param in layer.parameters()]
    opt = bwdfuse.AdamW(rest, lr=0.01, bwd_hook=True)
    before = pieces(model)
    train(model, opt, 1)
    moved = [not torch.equal(a, b) for a, b in zip(before, pieces(model), strict=True)]
    assert moved == [param.numel() > 0 for param in model.parameters()]
    with pytest.raises(bwdfuse.ConfigError, match="another bwdfuse optimizer"):
        bwdfuse.AdamW(rest, bwd_hook=True)
    opt.disarm()
    assert [hasattr(param, "_in_backward_optimizers") for param in model.parameters()] == [True, True] + [False] * 5


# ---- arming ------------------------------------------------------------------------------------------------------


def armed_late_and_disarmed(mesh):
    """FSDP1 looks for optimizers in its first forward only."""
    models = [wrap(build()) for _ in range(2)]
    opts = [bwdfuse.AdamW(model.parameters(), lr=0.01) for model in models]
    for model, opt in zip(models, opts, strict=True):
        train(model, opt, 2)
    opts[1].arm(models[1])
    opts[1].arm()
    train(models[0], opts[0], 2, first=2)
    train(models[1], opts[1], 2, first=2)
    assert opts[1].stats()["params_stepped"] and same(pieces(models[0]), pieces(models[1]))
    opts[1].disarm()
    before = pieces(models[1])
    models[1](batch(4, 0)).sum().backward()
    assert same(before, pieces(models[1]))
    assert [p.grad is not None for p in models[1].parameters()] == [p.numel() > 0 for p in models[1].parameters()]


def armed_before_wrapping_raises(mesh):
    model = build()
    opt = bwdfuse.AdamW(model.parameters())
    with pytest.raises(bwdfuse.ConfigError, match="2 ranks and unsharded parameters"):
        opt.arm(model)
    opt.arm(wrap(model))  # the parameters stay the same objects


def an_optimizer_that_is_gone_leaves_nothing_behind(mesh):
    model = wrap(build())
    opt = bwdfuse.AdamW(model.parameters(), bwd_hook=True)
    train(model, opt, 1)
    gone = weakref.ref(opt)
    del opt
    gc.collect()
    assert gone() is None and not any(hasattr(param, "_in_backward_optimizers") for param in model.parameters())
    with model.no_sync():
        model(batch(0, 0)).sum().backward()
    opt = bwdfuse.AdamW(model[0].parameters())
    gone = weakref.ref(model)
    model.zero_grad()
    opt = bwdfuse.AdamW(model.parameters(), bwd_hook=True)
    train(model, opt, 1)
    del model, opt
    gc.collect()
    assert gone() is None, "hooks must not keep the model alive"


def names_in_messages_are_the_models(mesh):
    model = wrap(build())
    opt = bwdfuse.AdamW(model.parameters())
    opt.arm(model)
    assert opt._plan.slots[0].name == "0.weight"


# ---- checkpoints -------------------------------------------------------------------------------------------------


def checkpoint_round_trip(mesh):
    """torch's own ways of FSDP1, from ours to stock and back: whole on rank 0, sharded, and local."""

    def make(kind):
        model = wrap(build(), nested=False)
        return model, (
            torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
            if kind == "stock"
            else TorchsKernel(model.parameters(), lr=0.01, bwd_hook=True)
        )

    def after_five(writer, reader, kind):
        (model, opt), (again, other) = make(writer), make(reader)
        train(model, opt, 3)
        if kind is None:
            again.load_state_dict(model.state_dict())
            other.load_state_dict(opt.state_dict())
        else:
            config = FullStateDictConfig(rank0_only=False) if kind is StateDictType.FULL_STATE_DICT else None
            with FSDP.state_dict_type(model, kind, config), FSDP.state_dict_type(again, kind, config):
                again.load_state_dict(model.state_dict())
                saved = FSDP.optim_state_dict(model, opt)
                other.load_state_dict(FSDP.optim_state_dict_to_load(again, other, saved))
        for group in other.param_groups:
            group["fused"] = True  # torch takes its implementation from the file, and ours names none
        train(again, other, 2, first=3)
        return pieces(again)

    straight, opt = make("stock")
    train(straight, opt, 5)
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, None):
        stocks = after_five("stock", "stock", kind)
        if (
            kind is not StateDictType.FULL_STATE_DICT
        ):  # torch itself does not come back to its own bits from a whole one
            assert same(pieces(straight), stocks)
        for writer, reader in (("ours", "stock"), ("stock", "ours"), ("ours", "ours")):
            assert same(stocks, after_five(writer, reader, kind)), (writer, reader, kind)


if __name__ == "__main__":
    main(globals())
