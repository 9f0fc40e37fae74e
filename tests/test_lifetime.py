"""Nothing is kept alive and nothing grows, measured in processes of their own."""

import subprocess
import sys
import textwrap

import pytest


def run(code):
    """Runs `code` in a fresh interpreter; it must print 'ok' last."""
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and result.stdout.strip().endswith("ok"), result.stdout + result.stderr
    return result.stdout


def test_model_rebuilt_in_a_loop_is_collected_every_time():
    """As a notebook cell that is run again and again, by reference counts alone (gc is off)."""
    run("""
        import gc, weakref, torch, bwdfuse
        gc.disable()
        old = []
        for _ in range(50):
            model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
            opt = bwdfuse.AdamW(model.parameters(), bwd_hook=True)
            scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 1.0)
            for _ in range(2):
                model(torch.ones(2, 64)).sum().backward()
                opt.step()
                scheduler.step()
            old += [weakref.ref(p) for p in model.parameters()] + [weakref.ref(opt)]
            old += [weakref.ref(v) for s in opt.state.values() for v in s.values()]
        del model, opt, scheduler
        gc.collect()  # the scheduler and its optimizer form torch's own cycle
        assert len(old) == 50 * 17, len(old)
        assert sum(ref() is not None for ref in old) == 0
        print("ok")
    """)


@pytest.mark.parametrize("order", ["del model, opt", "del opt, model"])
def test_without_a_scheduler_reference_counts_are_enough(order):
    run(f"""
        import gc, weakref, torch, bwdfuse
        def build():
            model = torch.nn.Linear(8, 8)
            opt = bwdfuse.AdamW(model.parameters(), bwd_hook=True)
            model(torch.ones(2, 8)).sum().backward()
            opt.step()
            return model, opt
        build()  # torch imports parts of itself at first use, and the frames of that hold what they saw
        gc.collect()
        gc.disable()
        model, opt = build()
        refs = [weakref.ref(p) for p in model.parameters()] + [weakref.ref(opt)]
        {order}
        assert all(ref() is None for ref in refs)
        print("ok")
    """)


@pytest.mark.parametrize("exchange", [True, False])
def test_ten_thousand_updates_do_not_grow(exchange):
    """Neither Python blocks nor resident memory: 10,000 updates of 4 parameters, errors and skips among them."""
    run(f"""
        import gc, sys, psutil, torch, bwdfuse
        torch.set_num_threads(1)
        bwdfuse.AdamW._exchange = {exchange}
        params = [torch.nn.Parameter(torch.randn(8)) for _ in range(4)]
        opt = bwdfuse.AdamW(params, bwd_hook=True, nonfinite="skip")
        weights = torch.ones(8)
        def update(i):
            loss = sum((p * weights).sum() for p in params)
            if i % 7 == 0:
                loss = loss * float("nan")
            loss.backward()
            if i % 5 == 0:
                try:
                    params[0].sum().backward()
                    raise SystemExit("a second gradient passed")
                except bwdfuse.AccumulationError:
                    opt.acknowledge_partial_update()
                    return
            opt.step()
            opt.stats()
        for i in range(1000):
            update(i)
        gc.collect()
        blocks, rss = sys.getallocatedblocks(), psutil.Process().memory_info().rss
        for i in range(10000):
            update(i)
        gc.collect()
        assert sys.getallocatedblocks() - blocks < 200, sys.getallocatedblocks() - blocks
        assert psutil.Process().memory_info().rss - rss < 4 << 20, psutil.Process().memory_info().rss - rss
        print("ok")
    """)


@pytest.mark.parametrize(
    "use",
    [
        "native().Plan(owner, 'adamw')",
        "native().Plan(owner, 'adamw', kernel=print).add(p, group=0, name='p', armed=True).hook",
        "bwdfuse.AdamW([p], bwd_hook=True)",
        "copy.deepcopy(bwdfuse.AdamW([p], bwd_hook=True))",
        "attempt(lambda: native().Plan(owner, 'nosuch'))",
        "attempt(lambda: native().Plan(owner, 'adamw', nonfinite='x'))",
        "attempt(lambda: native().Plan(7, 'adamw'))",
        "attempt(lambda: native().Plan(owner, 'adamw').add(7, group=0, name='p', armed=True))",
    ],
)
def test_every_native_type_gives_back_what_it_took(use):
    run(f"""
        import copy, gc, sys, torch, bwdfuse
        from bwdfuse._native import native
        class Owner: pass
        owner, p = Owner(), torch.nn.Parameter(torch.ones(2))
        def attempt(make):
            try:
                make()
            except (ValueError, TypeError):
                return
            raise SystemExit("must raise")
        def once():
            {use}
            p.grad = None
        for _ in range(50):
            once()
        gc.collect()
        blocks = sys.getallocatedblocks()
        for _ in range(2000):
            once()
        gc.collect()
        grown = sys.getallocatedblocks() - blocks
        assert grown < 500, grown  # one object lost a call would be 2000; the allocator's own noise is below 300
        print("ok")
    """)
