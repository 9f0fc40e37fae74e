"""The thread pool changes no bit and no result, whatever the process does around it: fork, other threads, too few of them."""

import gc
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from kernel_reference import FORMATS, ISAS, bits, digest, random_arrays, step

import bwdfuse
from bwdfuse import _C

torch = pytest.importorskip("torch")

PER_THREAD = 131_072
WINDOW = 512 * 16_384
COUNTS = (1, 2, 3, 4, 7)
TESTS = pathlib.Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def _threads():
    """Every test starts from one thread and leaves the number as it was."""
    before = bwdfuse.get_num_threads()
    bwdfuse.set_num_threads(1)
    yield
    bwdfuse.set_num_threads(before)


def helpers():
    """How many helper threads this process has."""
    names = []
    for task in pathlib.Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except FileNotFoundError:  # it ended meanwhile
            continue
    return names.count("bwdfuse")


def run(code, timeout=120, **environment):
    """Runs `code` in a fresh interpreter that knows this file's helpers; it must print 'ok' last."""
    prelude = "from test_threads import helpers, PER_THREAD\nfrom kernel_reference import *\nimport bwdfuse, os, sys\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), **environment},
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("ok"), (done.returncode, done.stdout + done.stderr)
    return done.stdout


def outcome(arrays, threads, **kwargs):
    """Bits and sums of one step by so many threads."""
    copies = [a.copy() for a in arrays]
    bwdfuse.set_num_threads(threads)
    return repr(step(copies, **kwargs)), digest(copies)


@pytest.mark.parametrize("n", [2 * PER_THREAD - 1, 2 * PER_THREAD, 300_001, 7 * PER_THREAD + 3])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_same_bits_for_any_number(fmt, isa, n):
    arrays = random_arrays(n, fmt, seed=n)
    arrays[1][[5, 16_384, 200_000, n - 1]] = [np.inf, -np.inf, np.nan, np.inf]
    outcomes = {threads: outcome(arrays, threads, isa=isa, step=3) for threads in COUNTS}
    assert len(set(outcomes.values())) == 1, outcomes
    assert outcomes[1][0].endswith(" 4)")


def test_same_bits_beyond_one_window():
    """Sums are kept for 512 chunks at a time; the next ones must go on from there."""
    arrays = random_arrays(WINDOW + 16_385, "bf16", seed=1)
    assert len({outcome(arrays, threads) for threads in (1, 4)}) == 1


def test_helpers_take_part():
    """Guards the tests above: with a pool that never shares, they would compare one thread with itself."""
    run("""
        small, large = random_arrays(2 * PER_THREAD - 1, "f32"), random_arrays(3 * PER_THREAD, "f32")
        bwdfuse.set_num_threads(4)
        step(small)
        assert helpers() == 0, "threads for work that is too small"
        bwdfuse.set_num_threads(1)
        step(large)
        assert helpers() == 0, "threads that nobody asked for"
        bwdfuse.set_num_threads(4)
        step(large)
        assert helpers() == 2, helpers()
        for n in (2, 1, 4):
            bwdfuse.set_num_threads(n)
            step(large)
            assert helpers() == 2, helpers()
        print("ok")
    """)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("nonfinite", ["off", "skip"])
def test_optimizer_with_mixed_layouts(fused, nonfinite):
    """Contiguous and transposed parameters, in the hook and in step(), with a scan of its own and without."""

    def train(threads):
        bwdfuse.set_num_threads(threads)
        torch.manual_seed(0)
        flat = torch.nn.Parameter(torch.randn(700, 900))
        turned = torch.nn.Parameter(torch.randn(900, 700).t())
        opt = bwdfuse.AdamW([flat, turned], lr=0.1, bwd_hook=fused, nonfinite=nonfinite)
        for factor in (1.0, -0.5):
            loss = ((flat * turned) * factor).sum() + (flat * torch.arange(900) * turned.square()).mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
        sums = [slot.grad_sq_sum for slot in opt._plan.slots]
        return [flat.detach(), turned.detach(), *(v for p in (flat, turned) for v in opt.state[p].values())], sums

    (one, one_sums), *others = (train(threads) for threads in COUNTS)
    for tensors, sums in others:
        assert sums == one_sums and min(sums) > 0
        assert all(torch.equal(a, b) for a, b in zip(one, tensors, strict=True))


def test_helpers_flush_denormals_as_the_caller_does():
    """torch.set_flush_denormal is a switch of one thread; a helper that kept its own would leave stripes of other bits."""
    n = 4 * PER_THREAD
    arrays = [np.full(n, x, np.float32) for x in (1.0, 0.0, 1.3e-38, 1.0)]
    kept, flushed = outcome(arrays, 1), None
    try:
        for round_ in range(20):
            assert torch.set_flush_denormal(True)
            flushed = flushed or outcome(arrays, 1)
            assert outcome(arrays, 4) == flushed, round_
            torch.set_flush_denormal(False)
            assert outcome(arrays, 4) == kept, round_
    finally:
        torch.set_flush_denormal(False)
    assert kept != flushed


def test_two_python_threads_step_two_models():
    """One has the helpers, the other goes on alone; the number changes meanwhile."""
    starts = [random_arrays(5 * PER_THREAD, "f32", seed=seed) for seed in (1, 2, 3)]
    wanted = []
    for start in starts:
        copies = [a.copy() for a in start]
        wanted.append([step(copies, step=1 + k) for k in range(20)] + [digest(copies)])
    got = [None] * len(starts)

    def train(which):
        copies = [a.copy() for a in starts[which]]
        got[which] = [step(copies, step=1 + k) for k in range(20)] + [digest(copies)]

    threads = [threading.Thread(target=train, args=(which,)) for which in range(len(starts))]
    for thread in threads:
        thread.start()
    count = 0
    while any(thread.is_alive() for thread in threads):
        count += 1
        bwdfuse.set_num_threads(1 + count % 7)
    for thread in threads:
        thread.join()
    assert got == wanted


def test_two_backwards_at_once():
    def train(seed, threads, result):
        bwdfuse.set_num_threads(threads)
        generator = torch.Generator().manual_seed(seed)
        weight = torch.nn.Parameter(torch.randn(600, 600, generator=generator))
        opt = bwdfuse.AdamW([weight], lr=0.01, bwd_hook=True)
        for _ in range(10):
            (weight * weight).sum().backward()
            opt.step()
        result[seed] = (weight.detach(), opt._plan.slots[0].grad_sq_sum)

    alone, together = {}, {}
    for seed in (0, 1):
        train(seed, 1, alone)
    threads = [threading.Thread(target=train, args=(seed, 3, together)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (0, 1):
        assert torch.equal(alone[seed][0], together[seed][0]) and alone[seed][1] == together[seed][1]


FORK = """
    import multiprocessing, threading
    bwdfuse.set_num_threads(3)
    start = random_arrays(4 * PER_THREAD, "f32")
    def once():
        copies = [a.copy() for a in start]
        return repr(step(copies)), digest(copies)
    wanted = once()
    assert helpers() == 2
    def child():
        assert bwdfuse.get_num_threads() == 3
        assert helpers() == 0 and once() == wanted and helpers() == 2 and once() == wanted
    def fork():
        pid = os.fork()
        if pid == 0:
            try:
                child()
            except BaseException as error:
                print(repr(error), flush=True)
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def test_fork_of_an_idle_pool():
    run(
        FORK
        + """
    fork()
    assert once() == wanted and helpers() == 2
    def grandchild():
        child()
        fork()
    process = multiprocessing.get_context("fork").Process(target=grandchild)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert once() == wanted and helpers() == 2
    print("ok")
    """
    )


def test_fork_of_a_busy_pool():
    run(
        FORK
        + """
    stop = threading.Event()
    def keep_busy():
        while not stop.is_set():
            assert once() == wanted
    thread = threading.Thread(target=keep_busy)
    thread.start()
    for _ in range(20):
        fork()
    stop.set()
    thread.join()
    assert once() == wanted and helpers() == 2
    print("ok")
    """
    )


def test_data_loader_workers():
    """The usual order of things: train, let the loader fork its workers, train on, every epoch anew."""
    run("""
        import torch
        bwdfuse.set_num_threads(3)

        class Steps(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                arrays = random_arrays(3 * PER_THREAD, "f32", seed=index)
                step(arrays)
                assert helpers() == 2, helpers()
                return torch.from_numpy(arrays[0][:512])

        def train(workers):
            torch.manual_seed(0)
            model = torch.nn.Linear(512, 1024)
            opt = bwdfuse.AdamW(model.parameters(), lr=0.01, bwd_hook=True)
            model(torch.ones(4, 512)).sum().backward()
            opt.step()
            for epoch in range(2):
                for batch in torch.utils.data.DataLoader(Steps(), batch_size=4, num_workers=workers):
                    model(batch).square().mean().backward()
                    opt.step()
            return model.weight.detach()

        assert torch.equal(train(2), train(0))
        print("ok")
    """)


PRELOAD = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

int asked;

int
pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*main)(void *), void *arg)
{
    const char *allowed = getenv("THREADS_ALLOWED");
    asked++;
    if (allowed && asked > atoi(allowed)) {
        return EAGAIN;
    }
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    *(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
    return real(thread, attr, main, arg);
}
"""


@pytest.mark.skipif(not shutil.which("gcc"), reason="no C compiler")
@pytest.mark.parametrize("allowed", [0, 1, 2, 3])
def test_system_that_gives_too_few_threads(allowed, tmp_path):
    """As under a limit on processes. The answer is remembered, not asked for at every step, until the number is set."""
    (tmp_path / "few.c").write_text(PRELOAD)
    library = tmp_path / "few.so"
    subprocess.run(["gcc", "-shared", "-fPIC", tmp_path / "few.c", "-ldl", "-o", library], check=True)
    run(
        f"""
        import ctypes
        asked = ctypes.c_int.in_dll(ctypes.CDLL({str(library)!r}), "asked")
        start = random_arrays(5 * PER_THREAD, "f32")
        def once():
            copies = [a.copy() for a in start]
            return repr(step(copies)), digest(copies)
        bwdfuse.set_num_threads(1)
        wanted = once()
        asked.value, os.environ["THREADS_ALLOWED"] = 0, "{allowed}"
        bwdfuse.set_num_threads(4)
        for _ in range(5):
            assert once() == wanted
        assert helpers() == {allowed} and asked.value == min({allowed} + 1, 3), asked.value
        assert bwdfuse.get_num_threads() == 4
        del os.environ["THREADS_ALLOWED"]
        bwdfuse.set_num_threads(4)
        assert once() == wanted and helpers() == 3, helpers()
        print("ok")
        """,
        LD_PRELOAD=str(library),
    )


@pytest.mark.parametrize(
    "end", ["pass", "sys.exit(0)", "os._exit(0)", "thread.join()", "import gc; sys.modules.clear(); gc.collect()"]
)
def test_interpreter_ends_with_the_pool_alive(end):
    """Also while a daemon thread is in the middle of a step."""
    run(f"""
        import threading
        bwdfuse.set_num_threads(3)
        arrays = random_arrays(8 * PER_THREAD, "f32")
        step(arrays)
        begun = threading.Event()
        def train():
            for k in range(300 if {"join" in end} else 1_000_000):
                step(arrays)
                begun.set()
        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        begun.wait()
        assert helpers() == 2
        print("ok", flush=True)
        {end}
    """)


def test_threads_end_with_their_module():
    """A second copy of the extension has a pool of its own, which goes with it."""
    before = helpers()
    spec = importlib.util.spec_from_file_location("bwdfuse._C", _C.__file__)
    for _ in range(3):
        other = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(other)
        other.set_num_threads(4)
        arrays = random_arrays(4 * PER_THREAD, "f32")
        other.step_("adamw", tuple(arrays), (1e-3, 0.9, 0.999, 1e-8, 1e-2, False), step=1, isa=None)
        assert helpers() == before + 3
        assert _C.get_num_threads() == 1
        del other
        gc.collect()  # a module and its functions refer to each other
        deadline = time.monotonic() + 10  # a thread that was joined stays on the system's list for an instant
        while helpers() != before and time.monotonic() < deadline:
            time.sleep(0.001)
        assert helpers() == before


def test_nothing_grows():
    """10,000 updates with the number of threads changing: no thread and no memory beyond those of the first thousand."""
    run("""
        import resource
        arrays = random_arrays(3 * PER_THREAD, "bf16")
        def update(times):
            for k in range(times):
                bwdfuse.set_num_threads(1 + k % 3)
                step(arrays)
        update(1000)
        threads, peak = helpers(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        update(10_000)
        assert helpers() == threads == 2
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        assert grown < 1024, f"{grown} KiB more"
        print("ok")
    """)


@pytest.mark.parametrize("n", ["2", 2.0, True, None, [1]])
def test_wrong_type_is_refused(n):
    bwdfuse.set_num_threads(5)
    with pytest.raises(TypeError, match=r"set_num_threads\(.*\): pass an int from 1 to 1024"):
        bwdfuse.set_num_threads(n)
    assert bwdfuse.get_num_threads() == 5


@pytest.mark.parametrize("n", [0, -1, 1025, 10**30, -(10**30)])
def test_wrong_number_is_refused(n):
    bwdfuse.set_num_threads(5)
    with pytest.raises(ValueError, match=rf"set_num_threads\({n}\): pass an int from 1 .* to 1024"):
        bwdfuse.set_num_threads(n)
    assert bwdfuse.get_num_threads() == 5


@pytest.mark.parametrize("n", [1, 2, 1024])
def test_number_is_kept_apart_from_torch(n):
    before = torch.get_num_threads()
    bwdfuse.set_num_threads(n)
    assert bwdfuse.get_num_threads() == _C.get_num_threads() == n
    assert torch.get_num_threads() == before


CPUS = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "want"),
    [("3", 3), ("4,2", 4), (" 5 ", 5), ("6 , 2", 6), ("5000", 1024)]
    + [(text, CPUS) for text in ("", " ", "0", "-2", "many", "2x", ",3", None)],
)
def test_default_is_that_of_openmp(text, want):
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    if text is not None:
        environment["OMP_NUM_THREADS"] = text
    script = "from bwdfuse import _C; print(_C.get_num_threads())"
    out = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert int(out.stdout) == want


def test_default_follows_the_affinity_of_the_process():
    one = min(os.sched_getaffinity(0))
    script = (
        f"import os; os.sched_setaffinity(0, {{{one}}}); os.environ.pop('OMP_NUM_THREADS', None);"
        "import bwdfuse; print(bwdfuse.get_num_threads())"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(out.stdout) == 1


def test_more_threads_than_chunks_or_cpus():
    arrays = random_arrays(9 * PER_THREAD, "f32", seed=3)
    assert len({outcome(arrays, threads) for threads in (1, 9, 1024)}) == 1
    assert (bits(arrays[0]) == bits(random_arrays(9 * PER_THREAD, "f32", seed=3)[0])).all()
