"""bwdfuse.memory against an independent count: storages watched by weak references under a dispatch mode."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_iter  # noqa: E402

from bwdfuse import memory  # noqa: E402
from bwdfuse.errors import BwdFuseError  # noqa: E402

MIB = 1 << 20


class StorageCount(TorchDispatchMode):
    """Live bytes by the lifetime of storages, which knows nothing of allocators. CPU, eager mode."""

    def __init__(self, known):
        super().__init__()
        self.live = self.peak = 0
        self.seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor.untyped_storage())
        return out

    def note(self, storage):
        if storage._cdata in self.seen:
            return
        self.seen.add(storage._cdata)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())

    def gone(self, key, size):
        self.seen.discard(key)
        self.live -= size


class Work:
    """One model, one batch, an AdamW that steps after backward or inside it through plain torch hooks."""

    def __init__(self, *, inside, width=1024, depth=8, batch=4):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(depth)])
        self.x = torch.randn(batch, width)
        self.inside = inside
        params = list(self.model.parameters())
        self.optimizers = [torch.optim.AdamW([p], fused=True) for p in params]
        if inside:
            for param, optimizer in zip(params, self.optimizers, strict=True):
                param.register_post_accumulate_grad_hook(lambda p, o=optimizer: (o.step(), o.zero_grad())[:0] or None)
        self.update()  # optimizer state exists from here on

    def update(self, mark=lambda name: None):
        mark("forward")
        loss = self.model(self.x).square().mean()
        mark("backward")
        loss.backward()
        del loss
        mark("step")
        if not self.inside:
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def known(self):
        yield self.x
        for optimizer in self.optimizers:
            for param, state in optimizer.state.items():
                yield from (param, *state.values())


@pytest.mark.parametrize("inside", [False, True], ids=["after", "inside"])
@pytest.mark.parametrize("batch", [4, 300])
def test_peak_equals_an_independent_count_to_the_byte(inside, batch):
    work = Work(inside=inside, width=256, batch=batch)
    with memory.timeline(work.model) as recorded:
        work.update(recorded.mark)
    gc.collect()
    counted = StorageCount(work.known())
    with counted:
        work.update()
    assert counted.peak > 0
    assert recorded.above_rest_bytes == counted.peak


def test_gradients_alive_when_stepping_after_backward_and_inside_it():
    with memory.timeline(Work(inside=False).model) as nothing_ran:
        pass
    assert nothing_ran.peak_grads == 0
    after, inside = Work(inside=False), Work(inside=True)
    with memory.timeline(after.model) as off:
        after.update(off.mark)
    with memory.timeline(inside.model) as on:
        inside.update(on.mark)
    assert (off.peak_grads, off.peak_grad_mib) == (8, 32.0)
    assert on.peak_grads <= 2 and on.peak_grad_mib <= 8.0
    assert memory.compare(off, on).saved_mib >= 0.9 * (off.peak_grad_mib - 4.0)


def test_gradients_alive_with_the_native_hook():
    import bwdfuse

    work = Work(inside=False)
    work.optimizers = [bwdfuse.AdamW(work.model.parameters(), bwd_hook=True)]
    work.update()
    with memory.timeline(work.model) as recorded:
        work.update(recorded.mark)
    assert (recorded.peak_grads, recorded.peak_grad_mib, recorded.end_mib) == (1, 4.0, 0.0)
    assert recorded.phases[-1].peak_mib == 0.0  # the step itself allocates nothing


def test_rest_is_parameters_and_optimizer_state():
    before = memory.live_tensor_bytes()
    work = Work(inside=True)
    with memory.timeline(work.model) as recorded:
        work.update(recorded.mark)
    own = sum(tensor.untyped_storage().nbytes() for tensor in work.known())
    assert own > 96 * MIB
    assert recorded.rest_mib * MIB - before == own
    assert recorded.peak_mib == recorded.rest_mib + recorded.above_rest_mib


def test_storage_resized_in_place_is_seen():
    """What FSDP2 does to its unsharded parameters; the count by storages above cannot see it."""
    tensor = torch.zeros(MIB, dtype=torch.uint8)
    tensor.untyped_storage().resize_(0)
    with memory.timeline() as recorded:
        tensor.untyped_storage().resize_(MIB)
        tensor.untyped_storage().resize_(0)
    assert recorded.above_rest_bytes == MIB
    assert recorded.end_mib == 0


def test_phases_split_the_timeline_and_hold_their_own_peaks():
    with memory.timeline() as recorded:
        recorded.mark("small")
        kept = torch.zeros(MIB, dtype=torch.uint8)
        recorded.mark("large")
        torch.zeros(5 * MIB, dtype=torch.uint8)
        recorded.mark("quiet")
    small, large, quiet = recorded.phases
    assert [phase.name for phase in recorded.phases] == ["small", "large", "quiet"]
    assert (small.peak_mib, large.peak_mib, quiet.peak_mib) == (1.0, 6.0, 1.0)
    assert small.start <= small.end == large.start < large.end == quiet.start <= quiet.end == recorded.seconds
    assert recorded.end_mib == kept.nbytes / MIB == 1.0


def test_block_from_before_is_not_counted_when_it_is_freed():
    with memory.timeline():
        early = torch.zeros(3 * MIB, dtype=torch.uint8)  # its size stays in torch's table, now stale
    with memory.timeline() as recorded:
        del early
        torch.zeros(MIB, dtype=torch.uint8)
    assert recorded.above_rest_bytes == MIB
    assert int(recorded.log.live.min()) == 0


def test_our_hook_runs_first_and_is_gone_afterwards():
    order = []
    param = torch.nn.Parameter(torch.ones(3))
    param.register_post_accumulate_grad_hook(lambda p: order.append(p.grad is not None))
    param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with memory.timeline([param]) as recorded:
        (param * 2).sum().backward()
    assert recorded.peak_grads == 1 and order == [True]
    assert len(param._post_accumulate_grad_hooks) == 2
    (param * 2).sum().backward()
    assert order == [True, True] and param.grad is None


def test_accumulated_gradient_counts_once_and_frozen_parameters_are_passed_over():
    model = torch.nn.Linear(64, 64)
    model.bias.requires_grad_(False)
    with memory.timeline(model) as recorded:
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
    assert recorded.peak_grads == 1
    assert recorded.peak_grad_mib * MIB == model.weight.grad.nbytes


def test_saved_and_loaded_it_says_the_same(tmp_path):
    work = Work(inside=False, width=64)
    with memory.timeline(work.model) as recorded:
        work.update(recorded.mark)
    recorded.save(tmp_path / "timeline.json")
    loaded = memory.Timeline.load(tmp_path / "timeline.json")
    assert repr(loaded) == repr(recorded)
    assert loaded.phases == recorded.phases
    assert (loaded.log.live == recorded.log.live).all() and (loaded.log.grad == recorded.log.grad).all()
    (tmp_path / "other.json").write_text('{"format": 99}')
    with pytest.raises(BwdFuseError, match="no timeline of format 1"):
        memory.Timeline.load(tmp_path / "other.json")


def test_misuse_says_what_to_do():
    with memory.timeline() as recorded:
        assert repr(recorded) == "Timeline(recording)"
        with pytest.raises(BwdFuseError, match="leave the with block"):
            _ = recorded.peak_mib
        with pytest.raises(BwdFuseError, match="another torch profiler is running"), memory.timeline():
            pass
    with pytest.raises(BwdFuseError, match="inside the with block"):
        recorded.mark("late")
    with pytest.raises(BwdFuseError, match=r"timeline\(model\)"):
        _ = recorded.peak_grads


def test_an_exception_inside_passes_and_leaves_nothing_behind():
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ZeroDivisionError), memory.timeline([param]):
        1 / 0  # noqa: B018
    assert not param._post_accumulate_grad_hooks
    with memory.timeline() as after:
        torch.zeros(MIB, dtype=torch.uint8)
    assert after.above_rest_bytes == MIB


def test_pictures(tmp_path, monkeypatch):
    image = pytest.importorskip("matplotlib.image")
    after, inside = Work(inside=False, width=128), Work(inside=True, width=128)
    with memory.timeline(after.model) as off:
        after.update(off.mark)
    with memory.timeline(inside.model) as on:
        inside.update(on.mark)
    both = memory.compare(off, on)
    figure = both.plot(tmp_path / "both.png")
    drawn = image.imread(tmp_path / "both.png")
    assert drawn.shape[0] > 400 and drawn.shape[1] > 1000 and drawn.std() > 0.05
    words = " ".join(text.get_text() for axes in figure.axes for text in axes.texts)
    for word in ("forward", "backward", "step", "saved", f"{off.above_rest_mib:,.0f} MiB"):
        assert word in words
    off.plot(tmp_path / "one.png", title="A title")
    assert (tmp_path / "one.png").stat().st_size > 10_000
    assert both._repr_png_()[1:4] == off._repr_png_()[1:4] == b"PNG"
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert off._repr_png_() is None  # a notebook then shows the text
