"""The demo: data, cache, evaluation, claims, and one whole run of each trainer with a tiny model."""

import ast
import copy
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bwdfuse.demo import cache, claims, data, process, show
from bwdfuse.demo.arms import ARMS, OFF, ON, STOCK, Arm, DemoError, Job
from bwdfuse.demo.recipe import RECIPES, Recipe
from bwdfuse.memory import Timeline, _Log

MIB = 1 << 20


# ---- cache -----------------------------------------------------------------------------------------------------


def counted(log, text="bytes"):
    def build(folder):
        log.append(folder.name)
        (folder / "sub").mkdir()
        (folder / "sub" / "file.txt").write_text(text)

    return build


def test_built_once_then_found(tmp_path):
    log = []
    for _ in range(3):
        found = cache.cached(tmp_path / "thing", {"version": 1}, counted(log))
    assert (found / "sub" / "file.txt").read_text() == "bytes"
    assert log == ["thing.partial"] and not (tmp_path / "thing.partial").exists()


@pytest.mark.parametrize("damage", ["changed", "truncated", "removed", "manifest", "manifest gone", "other key"])
def test_damage_is_noticed_and_mended(tmp_path, damage):
    log = []
    folder = cache.cached(tmp_path / "thing", {"version": 1}, counted(log))
    key = {"version": 2 if damage == "other key" else 1}
    file, manifest = folder / "sub" / "file.txt", folder / cache._MANIFEST
    if damage == "changed":
        file.write_text("bytez")
    elif damage == "truncated":
        file.write_text("byte")
    elif damage == "removed":
        file.unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    elif damage == "manifest gone":
        manifest.unlink()
    assert not cache.is_intact(folder, key)
    cache.cached(folder, key, counted(log))
    assert len(log) == 2 and file.read_text() == "bytes" and cache.is_intact(folder, key)


def test_interrupted_build_leaves_nothing_that_counts(tmp_path):
    def dies(folder):
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.cached(tmp_path / "thing", {}, dies)
    assert not (tmp_path / "thing").exists()
    log = []
    cache.cached(tmp_path / "thing", {}, counted(log))
    assert log and not (tmp_path / "thing" / "half").exists()


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "report.json"
    cache.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        cache.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


# ---- data ------------------------------------------------------------------------------------------------------

SOURCE = '''
"""A module."""
import os

def documented(a, *, b: int = 3):
    """Does one thing with great care.

    And this is not part of the answer.
    """

def terse():
    """Short."""

def undocumented():
    pass

class Thing(dict, os.PathLike):
    """Holds   several
    things together."""

    async def _private(self):
        """Waits for something to happen."""
'''


def test_pairs_of_a_tree(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text(SOURCE)
    pairs = data.standard_library_pairs(tmp_path)
    assert [(p.module, p.question.splitlines()[-1], p.answer) for p in pairs] == [
        ("pkg", "def pkg.documented(a, *, b: int=3)", "Does one thing with great care."),
        ("pkg", "class pkg.Thing(dict, os.PathLike)", "Holds several things together."),
        ("pkg", "def pkg.Thing._private(self)", "Waits for something to happen."),
    ]
    assert [pair.is_public for pair in pairs] == [True, True, False]


@pytest.fixture(scope="module")
def library():
    return data.standard_library_pairs()


def test_standard_library_gives_enough(library):
    assert len(library) > 4000
    assert len({(p.question, p.answer) for p in library}) == len(library)
    assert all(len(p.answer) in data.ANSWER_CHARS for p in library)
    for pair in library[::500]:
        line = pair.question.splitlines()[-1]
        if line.startswith("def "):  # the signature is Python once the dots are out of the name
            name, rest = line[4:].split("(", 1)
            ast.parse(f"def {name.replace('.', '_')}({rest}: pass")


def test_split_by_module_is_disjoint_and_stable(library):
    train, held = data.split(library)
    assert 0.02 < len(held) / len(library) < 0.15
    assert {p.module.split(".")[0] for p in train}.isdisjoint(p.module.split(".")[0] for p in held)
    assert {p.answer for p in train}.isdisjoint(p.answer for p in held)
    assert data.split(library[::-1]) == (train, held)


def test_pack_fills_conversations_and_passes_over_what_is_too_long():
    pairs = [data.Pair("m", "q" * size, "a") for size in (3, 4, 50, 3, 3, 9, 2, 2)]
    packed = data.pack(pairs, lambda messages: sum(len(m["content"]) for m in messages) <= 10, 3)
    sizes = [[len(m["content"]) for m in conversation if m["role"] == "user"] for conversation in packed]
    assert sizes == [[3, 4], [3, 3], [9]]
    assert [m["role"] for m in packed[0]] == ["user", "assistant"] * 2
    with pytest.raises(ValueError, match="fills 3 conversations, 9 are wanted"):
        data.pack(pairs, lambda messages: sum(len(m["content"]) for m in messages) <= 10, 9)


def test_parquet_holds_what_was_put_in(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    conversations = [data.Pair("m", "what?", "this").messages, data.Pair("m", "é\n", "ü").messages * 2]
    data.write_parquet(tmp_path / "train.parquet", conversations)
    assert parquet.read_table(tmp_path / "train.parquet").to_pylist() == [{"messages": c} for c in conversations]


# ---- evaluation ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, library):
    pytest.importorskip("transformers")
    from bwdfuse.demo.model import make_tiny

    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, [pair.question for pair in library[:100]])
    return folder


def test_loss_counts_exactly_the_tokens_of_the_answers(tiny, library):
    """The same number from logits, one conversation at a time, without padding or labels."""
    torch = pytest.importorskip("torch")
    from bwdfuse.demo.evaluate import IGNORED, Judge, encode

    judge, pairs, limit = Judge(tiny), library[:9], 60
    total = count = 0
    for pair in pairs:
        ids, labels = encode(judge.tokenizer, pair, limit)
        answer = [i for i, label in enumerate(labels) if label != IGNORED]
        assert len(ids) == len(labels) <= limit
        text = judge.tokenizer.decode([ids[i] for i in answer])
        assert f"{pair.answer}<|im_end|>\n".startswith(text)
        with torch.no_grad():
            logprobs = judge.model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        total -= sum(float(logprobs[i - 1, ids[i]]) for i in answer)
        count += len(answer)
    assert count > 50
    assert judge.loss(pairs, limit) == pytest.approx(total / count, rel=1e-5)


def test_completion_is_text_after_the_prompt(tiny):
    from bwdfuse.demo.evaluate import Judge

    assert "What does this do" not in Judge(tiny).complete("What does this do in Python?\ndef f(x)")


def test_template_without_its_own_prompt_is_refused(tiny):
    from bwdfuse.demo.evaluate import Judge, encode

    tokenizer = Judge(tiny).tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>>{% endif %}"
    )
    with pytest.raises(ValueError, match="cannot tell the answer's tokens"):
        encode(tokenizer, data.Pair("m", "question", "answer"), 50)


def test_largest_difference(tmp_path):
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    from bwdfuse.demo.evaluate import largest_difference

    base = {"a": torch.ones(3), "b": torch.zeros(2, 2), "empty": torch.zeros(0)}
    near = {**base, "b": torch.tensor([[0.0, 0.25], [-0.5, 0.0]])}
    broken = {**base, "a": torch.tensor([1.0, float("nan"), 1.0])}
    other = {**base, "c": torch.ones(1)}
    for name, weights in {"base": base, "near": near, "broken": broken, "other": other}.items():
        (tmp_path / name).mkdir()
        save_file(weights, tmp_path / name / "model.safetensors")
    assert largest_difference(tmp_path / "base", tmp_path / "base") == 0.0
    assert largest_difference(tmp_path / "base", tmp_path / "near") == 0.5
    assert math.isnan(largest_difference(tmp_path / "base", tmp_path / "broken"))
    assert math.isnan(largest_difference(tmp_path / "broken", tmp_path / "broken"))
    with pytest.raises(ValueError, match=r"different weights: \['c'\]"):
        largest_difference(tmp_path / "base", tmp_path / "other")
    (tmp_path / "none").mkdir()
    with pytest.raises(FileNotFoundError, match="no weights"):
        largest_difference(tmp_path / "none", tmp_path / "base")


# ---- claims ----------------------------------------------------------------------------------------------------


def timeline(peak_mib):
    live = np.array([0, peak_mib * MIB, 0], np.int64)
    log = _Log(np.array([0, 10, 20]), live, live // 2, live // MIB, ((0, "forward"),), 30, 7 * MIB, True)
    return Timeline(log)


def arm(name, tmp_path, peak_mib):
    ours = name != STOCK
    return Arm(
        losses=[3.0, 2.5, 2.0],
        seconds=[1.0, 9.0, 2.0],
        timeline=timeline(peak_mib),
        weights=tmp_path,
        optimizer="bwdfuse.optim.AdamW" if ours else "torch.optim.adamw.AdamW",
        stats={"native_steps": 30} if ours else None,
        parameters=10,
        gradient_bytes=100 * MIB,
        largest_gradient_bytes=20 * MIB,
    )


@pytest.fixture
def recipe():
    return Recipe("r", "a model", "tiny", updates=3, batch=1, max_length=8, lr=1.0, conversations=3, held_out=1, recorded_update=2,
                  min_eval_drop=0.5)  # fmt: skip


@pytest.fixture
def good(recipe, tmp_path):
    arms = {OFF: arm(OFF, tmp_path, 120), ON: arm(ON, tmp_path, 40), STOCK: arm(STOCK, tmp_path, 150)}
    report = {"trainer": "verl", "device": "cpu", **claims.measure(recipe, arms)}
    return report | {
        "weights_max_abs_diff": 0.0,
        "weights_max_abs_diff_stock": 1e-7,
        "weights_moved": 0.1,
        "eval_loss_before": 4.0,
        "eval_loss_after": 3.0,
        "eval_loss_after_stock": 3.0,
        "samples": [{"question": "What?\ndef f(x: list[int])", "reference": "r", "before": "[b]", "after": ""}],
    }


def test_figures_of_a_good_run(good, recipe):
    assert claims.broken(good, recipe) == []
    wanted = {
        "saved_mib": 80.0,
        "gradient_mib": 100.0,
        "largest_gradient_mib": 20.0,
        "native_steps": 30,
        "parameters": 10,
    }
    wanted |= {"peak_mib_off": 120.0, "peak_mib_on": 40.0, "seconds_per_step_on": 2.0, "losses_stock": [3.0, 2.5, 2.0]}
    assert {name: good[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights_max_abs_diff": 1e-12}, "Weights differ by 1e-12"),
        ({"weights_max_abs_diff": math.nan}, "Weights differ by nan"),
        ({"weights_moved": 0.0}, "moved no weight"),
        ({"weights_moved": math.nan}, "moved no weight"),
        ({"losses_on": [3.0, 2.5, 2.1]}, "losses of flag off and on differ"),
        ({"losses_stock": [3.0, 2.5]}, "Arm stock must log 3 finite losses; it logged 2"),
        ({"losses_off": [3.0, math.inf, 2.0]}, "Arm off must log 3 finite losses"),
        ({"saved_mib": 71.9}, "it should be 72.0 to 81.6"),
        ({"saved_mib": 81.7}, "it should be 72.0 to 81.6"),
        ({"saved_mib": math.nan}, "fell by nan"),
        ({"native_steps": 29}, "The C kernel counted 29 steps; parameters x updates is 30"),
        ({"optimizer_on": "torch.optim.adamw.AdamW"}, "did not run the optimizers"),
        ({"optimizer_stock": "bwdfuse.optim.AdamW"}, "did not run the optimizers"),
        ({"eval_loss_after": 3.5}, "fell by 0.500; more than 0.5 is claimed"),
        ({"eval_loss_after": math.nan}, "fell by nan"),
    ],
)
def test_each_claim_can_break(good, recipe, change, words):
    (sentence,) = claims.broken(copy.deepcopy(good) | change, recipe)
    assert words in sentence


def test_table_says_every_figure(good, capsys):
    show.Screen().table(good)
    printed = capsys.readouterr().out
    for text in ("flag off", "torch.optim", "2.5000", "4.00 -> 3.00", "120.0", "40.0", "80.0", "30", "1e-07"):
        assert text in printed
    assert "def f(x: list[int])" in printed and "[b]" in printed and "(nothing)" in printed


def test_table_does_not_pass_off_a_loss_that_was_not_computed(good):
    cells = dict((row[0], row[1:]) for row in show.rows(good | {"weights_max_abs_diff": 1.0}))
    assert cells["held-out loss"][0] == "4.00 -> nan"


def test_recipes_are_sound():
    assert set(RECIPES) == {"smollm2", "tiny"} and RECIPES["smollm2"].min_eval_drop == 0.5
    with pytest.raises(ValueError, match="after the first"):
        Recipe("r", "a model", "tiny", updates=3, batch=1, max_length=8, lr=1.0, conversations=3, held_out=1, recorded_update=1,
               min_eval_drop=None)  # fmt: skip


# ---- verl ------------------------------------------------------------------------------------------------------


def test_commands_differ_only_in_the_optimizer(tmp_path, monkeypatch):
    from bwdfuse.demo import verl

    job = Job(RECIPES["tiny"], tmp_path / "model", tmp_path / "train.parquet", "cpu", 1)
    commands = {name: set(verl._command(name, job, tmp_path / "same")) for name in ARMS}
    shared = set.intersection(*commands.values())
    assert {name: command - shared for name, command in commands.items()} == {
        OFF: {"optim.optimizer_impl=bwdfuse.optim", "optim.clip_grad=1e9", "trainer.experiment_name=off"},
        ON: {"optim.bwd_hook=true", "optim.clip_grad=null", "trainer.experiment_name=on"},
        STOCK: {"optim.clip_grad=1e9", "trainer.experiment_name=stock"},
    }
    environments = {name: verl._environment(name, job, tmp_path) for name in ARMS}
    assert environments[STOCK]["VERL_USE_EXTERNAL_PLUGINS"] == "none"
    assert environments[ON]["VERL_USE_EXTERNAL_MODULES"] == "bwdfuse.demo.verl_cpu,bwdfuse.demo.verl_probe"
    on_gpu = verl._environment(ON, Job(job.recipe, job.model, job.train_file, "cuda", 1), tmp_path)
    assert on_gpu["VERL_USE_EXTERNAL_MODULES"] == "bwdfuse.demo.verl_probe" and "VERL_PLATFORM" not in on_gpu


def test_failing_trainer_shows_the_end_of_its_log(tmp_path):
    script = "print('the reason'); raise SystemExit(3)"
    with pytest.raises(DemoError, match=r"(?s)verl stopped with exit status 3; the end of .*log.txt:\nthe reason"):
        process.run("verl", [sys.executable, "-c", script], dict(os.environ), tmp_path, lambda done: None)


def test_interrupt_takes_the_trainer_along(tmp_path):
    started = []

    def interrupt(done):
        started.append(done)
        raise KeyboardInterrupt

    script = "import time; time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        process.run("verl", [sys.executable, "-c", script], dict(os.environ), tmp_path, interrupt)
    assert started == [0]  # and we are here, long before 600 s, because the process was ended and waited for


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--trainer", "nanny"], "no demo for trainer 'nanny'"), (["--recipe", "stew"], "no recipe 'stew'")],
)
def test_wrong_choice_is_one_sentence(options, words, tmp_path):
    runner = pytest.importorskip("typer.testing").CliRunner()
    from bwdfuse.__main__ import app

    done = runner.invoke(app, ["demo", "--out", str(tmp_path / "demo"), *options])
    assert done.exit_code == 1 and words in done.output and not (tmp_path / "demo").exists()


@pytest.mark.parametrize(("trainer", "weights"), [("verl", "checkpoint/*/huggingface"), ("trl", "model")])
def test_whole_demo_with_a_tiny_model(tmp_path, trainer, weights):
    """Three runs of the trainer's own code; every claim but learning is checked by the demo itself."""
    beside = Path(sys.prefix) / "trl"  # see the Makefile
    environment = {**os.environ, "PYTHONPATH": str(beside)} if trainer == "trl" and beside.exists() else None
    if environment is None and importlib.util.find_spec(trainer) is None:
        pytest.skip(f"{trainer} is not installed")
    command = [sys.executable, "-m", "bwdfuse", "demo", "--trainer", trainer, "--recipe", "tiny"]
    command += ["--out", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report["weights_max_abs_diff"] == 0.0 < report["weights_moved"]
    assert report["native_steps"] == report["parameters"] * report["updates"] == 56 * 4
    assert report["peak_gradient_mib_off"] == pytest.approx(report["gradient_mib"], rel=0.01)
    assert report["losses_on"] == report["losses_off"]
    timeline = Timeline.load(tmp_path / "demo" / "runs" / "on" / "timeline.json")
    if trainer == "verl":
        assert report["peak_gradient_mib_on"] <= 1.01 * report["largest_gradient_mib"]
    else:  # the head's part of the tied weight's gradient waits for the embedding's while the others come and go
        assert timeline.peak_grads <= 2
    assert [phase.name for phase in timeline.phases] == ["forward", "backward", "step"]
    assert timeline.end_mib < 0.1
    assert (tmp_path / "demo" / "memory.png").stat().st_size > 20_000
    assert list((tmp_path / "demo" / "runs" / "on").glob(f"{weights}/*.safetensors"))


def test_trl_gets_few_enough_tokens_for_gradients_to_set_the_peak():
    from bwdfuse.demo import trl

    for recipe in RECIPES.values():
        short = trl.adapted(recipe)
        assert short.batch * short.max_length <= 150 and short.lr == recipe.lr
        assert short.updates * short.batch >= 16 or recipe.name == "tiny"
