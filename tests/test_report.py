"""build_info(), show(), the doctor and estimate commands: truthful where all is there, and never raising where it is not."""

import importlib
import re
import subprocess
import sys

import pytest

import bwdfuse
from bwdfuse import _native, report
from bwdfuse.__main__ import _count, app

torch = pytest.importorskip("torch")
runner = pytest.importorskip("typer.testing").CliRunner()


def test_facts_are_those_of_their_owners():
    info = report.build_info()
    native = _native.native()
    assert info["version"] == report.__version__
    assert info["isa"]["chosen"] == native.isa_info()["chosen"]
    assert info["isa"]["possible"] == native.isa_info()["possible"]
    assert info["native"]["compiler"] in native.build_info()["compiler"]
    assert info["threads"]["count"] == native.get_num_threads()
    assert info["cuda"] == {"available": False, "reason": native.build_info()["cuda"]}
    assert info["torch"] == {"available": True, "version": torch.__version__, "reason": None}
    assert info["exchange"]["table"] is hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


def test_fallback_of_the_exchange_is_named(monkeypatch):
    from bwdfuse.optim import AdamW

    monkeypatch.setattr(AdamW, "_exchange", False)
    assert report.build_info()["exchange"]["table"] is False
    assert "attribute calls" in report.build_info()["exchange"]["how"]


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    info = report.build_info()
    assert info["torch"]["available"] is False and "torch cannot be imported" in info["torch"]["reason"]
    assert info["exchange"] == {"table": None, "how": "unknown: torch is missing"}
    assert info["native"]["available"] is True


def test_with_a_torch_that_does_not_load(tmp_path):
    """A torch built for another machine raises OSError, not ImportError."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import bwdfuse; bwdfuse.show()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch cannot be imported: OSError: libtorch_cpu.so" in " ".join(done.stdout.split())


def test_without_the_native_part(monkeypatch, capsys):
    monkeypatch.setattr(_native, "extension", None)
    monkeypatch.setattr(_native, "reason", "ImportError: no such [file]")
    info = report.build_info()
    for part in ("native", "cuda"):
        assert info[part]["available"] is False and "no such [file]" in info[part]["reason"]
    assert info["isa"]["chosen"] is None and info["isa"]["possible"] == ()
    assert info["exchange"] == {"table": None, "how": "unknown: the native part is missing"}
    assert info["threads"] == {"count": None, "how": "unknown: the native part is missing"}
    report.show()
    assert "no such [file]" in " ".join(capsys.readouterr().out.split())  # rich must not take it for markup
    assert runner.invoke(app, ["doctor"]).exit_code == 1


@pytest.mark.parametrize("rich", [True, False])
def test_show_names_everything(rich, monkeypatch, capsys):
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(report, "_hints", lambda has_torch: ["mind the gap"])
    report.show()
    printed = " ".join(capsys.readouterr().out.split())
    for word in (
        report.__version__,
        torch.__version__,
        "CPU-only build",
        "baseline",
        "DLPack",
        "verl",
        "hint: mind the gap",
    ):
        assert word in printed
    for name, trainer in report.build_info()["trainers"].items():
        assert f"{name} {trainer['version'] or 'not installed'}" in printed


def test_forced_instruction_set_is_said(monkeypatch, capsys):
    monkeypatch.setenv("BWDFUSE_ISA", "baseline")
    report.show()
    assert "forced by BWDFUSE_ISA=baseline" in " ".join(capsys.readouterr().out.split())


def test_number_of_threads_is_said(monkeypatch, capsys):
    before = bwdfuse.get_num_threads()
    try:
        bwdfuse.set_num_threads(5)
        report.show()
    finally:
        bwdfuse.set_num_threads(before)
    assert "up to 5 for a step on CPU (bwdfuse.set_num_threads)" in " ".join(capsys.readouterr().out.split())


def test_absent_trainer_and_absent_adapter(monkeypatch):
    def absent(name):
        raise report.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(report.importlib.metadata, "version", absent)
    info = report.build_info()  # also where verl and trl lie on the path: their hint reads a version too
    assert info["trainers"]["verl"]["version"] is None
    assert "no adapter" in report._trainer("no_such_trainer")["flag"]


@pytest.mark.parametrize("metadata", [True, False])
def test_hint_of_a_trl_that_verl_cannot_use(monkeypatch, tmp_path, metadata):
    """Both lie on the path, with metadata or as source trees; the hint names what is known and nothing raises."""
    for name in ("verl", "trl"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        monkeypatch.delitem(sys.modules, name, raising=False)
    if metadata:
        (tmp_path / "trl-9.9.dist-info").mkdir()
        (tmp_path / "trl-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 9.9\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    said = [hint for hint in report._hints(False) if hint.startswith("verl does not start")]
    assert len(said) == 1 and ("trl 9.9" if metadata else "unknown version") in said[0]
    (tmp_path / "trl" / "experimental" / "ppo").mkdir(parents=True)
    assert not any(hint.startswith("verl does not start") for hint in report._hints(False))


def test_hints(monkeypatch, tmp_path):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    monkeypatch.setattr(report, "HUGE_PAGES", tmp_path / "enabled")
    assert not any("THP" in hint for hint in report._hints(True))  # no such kernel interface
    (tmp_path / "enabled").write_text("always [madvise] never")
    assert any("THP" in hint for hint in report._hints(True))
    assert not any("THP" in hint for hint in report._hints(False))
    (tmp_path / "enabled").write_text("always madvise [never]")
    assert not any("THP" in hint for hint in report._hints(True))


def test_doctor_succeeds_where_the_native_part_is():
    done = runner.invoke(app, ["doctor"])
    assert done.exit_code == 0 and report.__version__ in done.output


def test_without_typer_one_sentence_says_what_to_install():
    code = "import runpy, sys; sys.modules['typer'] = None; runpy.run_module('bwdfuse', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install typer rich" in done.stderr and "Traceback" not in done.stderr


# ---- estimate --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A small Llama on disk and how to build it for real."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    config.save_pretrained(folder)

    def build(checkpointing):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    return folder, build


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("batch", "seq"), [(1, 16), (4, 64)])
def test_estimate_is_what_a_run_then_takes(llama, batch, seq, checkpointing):
    from bwdfuse import estimate, memory

    folder, build = llama
    found = estimate.from_folder(folder, batch=batch, seq=seq, checkpointing=checkpointing)
    ids, mask = torch.zeros(batch, seq, dtype=torch.long), torch.ones(batch, seq, dtype=torch.long)
    mask[:, -1] = 0  # with padding, as batches have it; without any, attention takes a path that keeps less
    peaks = []
    for inside in (False, True):
        model = build(checkpointing)
        if inside:
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        with memory.timeline(model) as recorded:
            model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        peaks.append(recorded.above_rest_mib)
    assert found.gradients == pytest.approx(sum(p.nbytes for p in model.parameters()) / 2**20)
    assert found.largest == 2048 * 96 * 4 / 2**20
    assert found.peaks == pytest.approx(peaks, rel=0.02)
    assert found.saved == pytest.approx(peaks[0] - peaks[1], abs=0.02 * peaks[0])


def test_estimate_by_group_and_rank(llama):
    from bwdfuse import estimate

    folder, build = llama
    model = build(False)
    layer = sum(p.nbytes for p in model.model.layers[0].parameters()) / 2**20
    outside = sum(p.nbytes for p in model.parameters()) / 2**20 - 4 * layer
    grouped = estimate.from_folder(folder, fsdp=True)
    assert grouped.unit == "one FSDP group" and grouped.largest == pytest.approx(max(layer, outside))
    sharded = estimate.from_folder(folder, ranks=4, batch=1, seq=16)
    assert sharded.gradients == pytest.approx(grouped.gradients / 4)
    assert sharded.largest == pytest.approx(grouped.largest / 4)
    one = estimate.from_folder(folder, fsdp=True, batch=1, seq=16)
    assert sharded.saved < one.saved
    half = estimate.from_folder(folder, dtype="bf16")
    assert half.gradients == pytest.approx(grouped.gradients / 2)


def test_estimate_says_plainly_when_nothing_is_gained(llama):
    folder, _ = llama
    for options, words in (
        (["--batch", "64", "--seq", "128"], "activations set the peak"),
        (["--lora"], "only the adapter trains"),
        (["--ddp"], "DistributedDataParallel"),
    ):
        done = runner.invoke(app, ["estimate", str(folder), *options])
        said = " ".join(done.output.split())
        assert done.exit_code == 0 and "Nothing is gained" in said and words in said, said


def test_estimate_of_a_model_that_is_one_gradient():
    from bwdfuse.estimate import Estimate

    assert "Nothing is gained: one gradient holds" in Estimate(10, 100.0, 99.0, "one gradient", None, None).verdict


def test_estimate_from_a_count():
    done = runner.invoke(app, ["estimate", "7B", "--ranks", "8"])
    assert done.exit_code == 0
    assert re.search(r"gradients on each rank\s+3,337\.9 MiB", done.output)
    assert "Up to 3,338 MiB" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("text", "number"),
    [("135M", 135_000_000), ("1.5b", 1_500_000_000), ("1_000", 1000), ("2k", 2000), ("a/7B", None), ("7BX", None)],
)
def test_counts(text, number):
    assert _count(text) == number


def test_bad_input_to_estimate(tmp_path, llama):
    folder, _ = llama
    for args, words in (
        ([str(tmp_path)], "holds no config.json"),
        (["7B", "--batch", "1", "--seq", "8"], "needs a model folder"),
        ([str(folder), "--batch", "1"], "belong together"),
        ([str(folder), "--dtype", "fp8"], "dtype 'fp8' is unknown"),
    ):
        done = runner.invoke(app, ["estimate", *args])
        assert done.exit_code == 2 and words in done.output, done.output


def test_estimate_where_the_model_cannot_run_on_meta_tensors(llama, monkeypatch):
    from bwdfuse import estimate
    from bwdfuse.errors import BwdFuseError

    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", lambda self, **kwargs: kwargs["input_ids"].item())
    with pytest.raises(BwdFuseError, match="cannot run on meta tensors .*leave out batch and seq"):
        estimate.from_folder(llama[0], batch=1, seq=8)
