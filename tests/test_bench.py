"""Benchmarks measure only what was checked, name what they leave out, and have the shape that readers rely on.

Nothing here asserts a time.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import bwdfuse
from bwdfuse.bench import hook, kernel, peers, quick, timing, titles, train

ROOT = Path(__file__).parent.parent
TINY = train.Shape(16, 32, 1, 64, 2)
SMALL = quick.Sizes(parameters=3, elements=64, updates=(1 << 12,), shape=TINY, tokens=8, rounds=1)
F32, BF16 = torch.float32, torch.bfloat16


def wrong_lr(model):
    """An optimizer that is off by a tenth."""
    return torch.optim.AdamW(model.parameters(), **{**peers.OPTIONS, "lr": 1.1 * peers.LR}).step


@pytest.fixture(autouse=True)
def threads():
    """Benchmarks set the number of threads for the whole process."""
    before = torch.get_num_threads(), bwdfuse.get_num_threads()
    yield
    torch.set_num_threads(before[0])
    bwdfuse.set_num_threads(before[1])


@pytest.fixture
def with_peer(monkeypatch):
    """Puts one more optimizer among the peers."""

    def put(name, build, **fields):
        monkeypatch.setitem(peers.PEERS, name, peers.Peer(build, **{"inside": False, **fields}))
        return name

    return put


# ---- peers -----------------------------------------------------------------------------------------------------


#: torch.compile takes half a minute for each dtype; float32 shows what it does.
WITH_TORCH = [(name, dtype) for name, peer in peers.PEERS.items() if not peer.needs for dtype in (F32, BF16)]
WITH_TORCH.remove(("compile_after", BF16))


@pytest.mark.parametrize(("name", "dtype"), WITH_TORCH)
def test_what_comes_with_torch_runs_and_is_right(name, dtype):
    assert peers.check(peers.PEERS[name], dtype) <= 1


@pytest.mark.parametrize("name", [name for name, peer in peers.PEERS.items() if peer.needs and "deepspeed" not in name])
def test_every_other_peer_is_right_or_named_with_its_reason(name):
    found, left_out = peers.usable([name], F32)
    assert set(found) | set(left_out) == {name} and not set(found) & set(left_out)
    if peers.PEERS[name].missing():
        assert left_out[name].startswith("not installed: pip install ")


def test_every_peer_has_a_title():
    assert set(titles.TITLES) == set(peers.PEERS) | {train.FLOOR}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rule", sorted(peers.REFERENCES))
def test_the_references_notice_a_tenth_of_the_learning_rate(rule, dtype):
    with pytest.raises(peers.WrongResult, match="what rounding explains"):
        peers.check(peers.Peer(wrong_lr, inside=False, rule=rule), dtype)


def test_quantised_states_are_allowed_less_than_a_tenth():
    with pytest.raises(peers.WrongResult):
        peers.check(peers.Peer(wrong_lr, inside=False, quantised=True), F32)


def test_one_that_skips_a_parameter_is_refused():
    def first_only(model):
        return torch.optim.AdamW(list(model.parameters())[:1], **peers.OPTIONS).step

    with pytest.raises(peers.WrongResult):
        peers.check(peers.Peer(first_only, inside=False), F32)


def test_one_that_leaves_gradients_is_refused():
    def keeps(model):
        return torch.optim.AdamW(model.parameters(), **peers.OPTIONS).step

    with pytest.raises(peers.WrongResult, match="gradient is left"):
        peers.check(peers.Peer(keeps, inside=True), F32)


def test_reasons(with_peer):
    def breaks(model):
        raise OSError("no kernel for this machine\nand a long trace")

    with_peer("absent", wrong_lr, needs=("no_such_module",), install="no-such-package")
    with_peer("wrong", wrong_lr)
    with_peer("broken", breaks)
    with_peer("narrow", wrong_lr, dtypes=(F32,))
    with_peer("slow", wrong_lr, most_parameters=10)
    with_peer("heavy", wrong_lr, most_elements=10)
    names = ["absent", "wrong", "broken", "narrow", "slow", "heavy"]
    found, left_out = peers.usable(names, BF16, parameters=11, elements=11)
    assert found == {} and list(left_out) == names
    assert left_out["absent"] == "not installed: pip install no-such-package"
    assert left_out["wrong"].startswith("not timed: its weights differ from those of adamw")
    assert left_out["broken"] == "cannot run here: OSError: no kernel for this machine"
    assert left_out["narrow"] == "takes no torch.bfloat16"
    assert "11 parameters; measured up to 10" in left_out["slow"]
    assert "11 elements; measured up to 10" in left_out["heavy"]


def test_a_wrong_result_of_our_own_stops_everything(with_peer):
    with_peer("bwdfuse", wrong_lr)
    with pytest.raises(peers.WrongResult, match="^bwdfuse: .* nothing was timed$"):
        hook.measure(["bwdfuse"], 2, 16, 1)


# ---- timing ----------------------------------------------------------------------------------------------------


def test_every_case_has_its_turn_in_every_round_and_the_first_round_does_not_count():
    seen = list(timing.turns(["a", "b", "c"], 3))
    assert [name for _, name in seen] == list("abcbcacababc")
    assert [counts for counts, _ in seen] == [False] * 3 + [True] * 9


def test_the_collector_is_back_after_an_error():
    import gc

    with pytest.raises(ZeroDivisionError):
        timing.paired({"a": lambda: 1 / 0}, 1)
    assert gc.isenabled()


def test_a_timing_is_of_all_its_rounds():
    found = timing.Timing.of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert found == {"median": 3.0, "low": 2.0, "high": 4.0, "min": 1.0, "max": 5.0, "rounds": 5}


def test_the_machine_is_described():
    found = timing.machine()
    assert {"cpu", "isa", "versions", "commit", "load_average", "date", "huge_pages_for_tensors"} <= set(found)
    assert found["versions"]["torch"] == torch.__version__
    json.dumps(found)


# ---- the three rooms -------------------------------------------------------------------------------------------


def test_hook(with_peer):
    with_peer("wrong", wrong_lr)
    found = hook.measure(["bwdfuse", "apply_fused", "wrong"], 3, 64, 2)
    assert set(found["us_per_parameter"]) == {"bwdfuse", "apply_fused"}
    assert set(found["seconds"]) == {"nothing", "bwdfuse", "apply_fused"}
    assert found["seconds"]["bwdfuse"]["rounds"] == 2
    cost = found["us_per_parameter"]
    assert found["ratio_vs"]["apply_fused"] == cost["bwdfuse"] / cost["apply_fused"]
    assert "wrong" in found["left_out"]


@pytest.mark.parametrize("form", kernel.FORMATS.values(), ids=list(kernel.FORMATS))
def test_kernel(form):
    kernel.check(form)
    found = kernel.measure(4096, form, 1, 1)
    assert set(found["seconds"]) == {"bwdfuse", "torch", "native", "kernel"}
    sizes = [dtype.itemsize for dtype in form[:3]]
    assert found["traffic"] == 4096 * (2 * sizes[0] + sizes[1] + 4 * sizes[2])


@pytest.mark.parametrize("form", kernel.FORMATS.values(), ids=list(kernel.FORMATS))
@pytest.mark.parametrize("whose", ["ours", "going_on"])
def test_kernel_refuses_a_wrong_result(form, whose, monkeypatch):
    right = getattr(kernel, whose)

    def off(*args, **options):
        made = right(*args, **options)
        made.param_groups[0]["lr"] *= 1.1
        return made

    monkeypatch.setattr(kernel, whose, off)
    with pytest.raises(peers.WrongResult, match="differ from AdamW in float64"):
        kernel.check(form)


def test_kernel_on_every_instruction_set():
    found = kernel.measure_isas(4096, kernel.FORMATS["f32"], 1)
    assert set(found) == set(bwdfuse.build_info()["isa"]["possible"])


def test_train_measures_what_it_checked(with_peer):
    def ascends(model):
        return torch.optim.AdamW(model.parameters(), **peers.OPTIONS, maximize=True).step

    def drifts(model):  # right in the check of one parameter, wrong in a model of many
        scale = 1.0 if isinstance(model, peers.Bag) else 0.5
        return torch.optim.AdamW(model.parameters(), **{**peers.OPTIONS, "lr": scale * peers.LR}).step

    def turns_later(model):
        return (peers.PEERS["fused_after"].build if isinstance(model, peers.Bag) else ascends)(model)

    names = ["bwdfuse", "bwdfuse_after", with_peer("drifts", drifts), with_peer("turns", turns_later)]
    found = train.measure(*train.plain(F32, 8, TINY), names, 1)
    assert set(found["seconds"]) == {train.FLOOR, train.REFERENCE, "bwdfuse", "bwdfuse_after"}
    assert "of fused_after" in found["left_out"]["drifts"] and "does not fall" in found["left_out"]["turns"]
    assert set(found["memory"]) == set(found["page_faults"]) == set(found["seconds"])
    assert found["memory"]["bwdfuse"]["gradients_mib"] < found["memory"]["bwdfuse_after"]["gradients_mib"]


def test_train_stops_at_our_own_wrong_result(with_peer):
    def drifts(model):
        scale = 1.0 if isinstance(model, peers.Bag) else 0.5
        return torch.optim.AdamW(model.parameters(), **{**peers.OPTIONS, "lr": scale * peers.LR}).step

    with_peer("bwdfuse", drifts)
    with pytest.raises(peers.WrongResult, match="^bwdfuse: "):
        train.measure(*train.plain(F32, 8, TINY), ["bwdfuse"], 1)


# ---- commands --------------------------------------------------------------------------------------------------


@pytest.fixture
def app():
    return importlib.import_module("bwdfuse.__main__").app


def test_bench_prints_a_table_and_writes_the_figures(app, tmp_path, monkeypatch):
    monkeypatch.setattr(quick, "SIZES", SMALL)
    file = tmp_path / "bench.json"
    ran = CliRunner().invoke(app, ["bench", "--json", str(file)])
    assert ran.exit_code == 0, ran.output
    for text in ("bwdfuse, inside backward", "of ours", "A training step", "result checked before it was timed"):
        assert text in ran.output
    found = json.loads(file.read_text())
    assert {"hook", "kernel", "train", "left_out", "machine", "sizes"} == set(found)
    measured = {*found["hook"]["seconds"], *found["train"]["seconds"]}
    measured |= {name for part in found["kernel"].values() for name in part["seconds"]}
    assert set(peers.PEERS) <= measured | set(found["left_out"])  # nothing is silently absent
    for name, peer in peers.PEERS.items():
        if peer.missing():
            assert found["left_out"][name] == peer.missing()


def test_bench_refuses_a_file_that_cannot_be_written_before_it_measures(app, tmp_path, monkeypatch):
    monkeypatch.setattr(quick, "measure", lambda *_: pytest.fail("measured"))
    for file in (tmp_path, tmp_path / "none" / "bench.json"):
        ran = CliRunner().invoke(app, ["bench", "--json", str(file)])
        assert ran.exit_code == 2 and f"--json {file}: not a file that can be written" in ran.output


def test_bench_says_what_is_wrong_and_restores_the_threads(app, monkeypatch, with_peer):
    bwdfuse.set_num_threads(2)
    with_peer("bwdfuse", wrong_lr)
    monkeypatch.setattr(quick, "SIZES", SMALL)
    ran = CliRunner().invoke(app, ["bench"])
    assert ran.exit_code == 1 and "nothing was timed" in ran.output and "Traceback" not in ran.output
    assert bwdfuse.get_num_threads() == 2


def test_bench_without_torch_says_what_to_install(tmp_path):
    (tmp_path / "torch.py").write_text('raise ImportError("no torch here")')
    ran = subprocess.run(
        [sys.executable, "-m", "bwdfuse", "bench"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert ran.returncode == 1 and "pip install torch" in ran.stderr and "Traceback" not in ran.stderr


def test_a_peer_that_is_not_there_is_told_with_what_to_install(capsys, with_peer):
    with_peer("absent", wrong_lr, needs=("no_such_module",), install="no-such-package")
    part = {"us_per_parameter": {"bwdfuse": 1.0}, "seconds": {}, "left_out": peers.usable(["absent"], F32)[1]}
    step = {"bwdfuse": timing.Timing.of([1.0])}
    training = {"parameters": 1, "seconds": step, "memory": {"bwdfuse": {"above_rest_mib": 1.0}}, "left_out": {}}
    quick._print({"hook": part, "kernel": {}, "train": training}, SMALL, Console(width=200))
    assert "absent: not installed: pip install no-such-package" in capsys.readouterr().out


@pytest.fixture
def commands(monkeypatch):
    """The modules of benchmarks/, which is no part of the installed package."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def run_command(module, monkeypatch, file, *options):
    monkeypatch.setattr(sys, "argv", [module.__file__, "--json", str(file), "--rounds", "1", *options])
    module.main()
    return json.loads(file.read_text())


def test_bench_hook_command(commands, monkeypatch, tmp_path):
    module = commands("bench_hook")
    monkeypatch.setattr(module, "CASES", {module.FEW: (2, 16), module.MANY: (4, 16)})
    found = run_command(module, monkeypatch, tmp_path / "hook.json", "--no-peers")
    assert set(found["ratio_vs_apply_fused"]) == set(found["ratio_vs_python_hook"]) == {module.FEW, module.MANY}
    few, many = (found["us_per_parameter"][name]["bwdfuse"] for name in (module.FEW, module.MANY))
    assert found["flatness"]["bwdfuse"] == many / few
    assert found["command"][:3] == ["python", "-m", "benchmarks.bench_hook"] and found["machine"]["versions"]


def test_bench_kernel_command(commands, monkeypatch, tmp_path):
    module = commands("bench_kernel")
    monkeypatch.setattr(module, "SIZES", {"64Ki": 4096, "4Mi": 4096, "64Mi": 4096})
    monkeypatch.setattr(module, "PEERS", ["bwdfuse_after", "fused_after"])
    monkeypatch.setattr(kernel, "streaming_limit", lambda rounds, threads: 1e9)
    monkeypatch.setattr(kernel, "calls_for", lambda n: 1)
    found = run_command(module, monkeypatch, tmp_path / "kernel.json")
    for case in ("adamw/f32/64Mi/1t", "adamw/f32/64Mi/2t", "adamw/bf16/64Mi/1t", "adamw/bf16+f32 states/64Mi/1t"):
        assert found["share_of_inplace_limit"][case] > 0 and found["ratio_vs_torch_fused"][case] > 0
    assert {"adamw/f32/64Ki/1t", "adamw/bf16/64Ki/1t"} <= set(found["ratio_vs_torch_fused"])
    assert set(found["peers"]["adamw/f32/4Mi/1t"]["ns_an_element"]) == {"bwdfuse_after", "fused_after"}
    assert "baseline" in found["isas"]["adamw/f32/64Ki/1t"]


def test_bench_train_command(commands, monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    module = commands("bench_train")
    monkeypatch.setattr(train, "SHAPES", {"M": TINY})
    options = ("--no-peers", "--tokens", "8", "--only", "M/f32")
    found = run_command(module, monkeypatch, tmp_path / "train.json", *options)
    for key in ("ratio_vs_fused_after_backward", "ratio_vs_apply_fused", "ratio_floor"):
        assert list(found[key]) == ["M/f32"]
    assert found["cases"]["M/f32"]["page_faults"].keys() == found["cases"]["M/f32"]["seconds"].keys()


def test_bench_train_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(bwdfuse.BwdFuseError, match="pip install transformers"):
        train.llama("S", F32, 8)


def test_the_plot_draws_what_was_measured(commands, monkeypatch, tmp_path):
    module = commands("plot")
    monkeypatch.setattr(sys, "argv", ["plot.py", "--out", str(tmp_path)])
    module.main()
    assert (tmp_path / "hook_cost.png").read_bytes().startswith(b"\x89PNG")
