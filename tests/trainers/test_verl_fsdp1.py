"""verl's own SFT trainer, two processes over gloo, FSDP1: stepping inside backward must change nothing but memory."""

import math
import shutil

import pytest
import torch
from conftest import ON, STOCK, UNCLIPPED, finished
from test_verl_training import STEPS, column, differences
from transformers import Qwen2ForCausalLM

FSDP1 = ("engine.strategy=fsdp", "engine.use_orig_params=True")
KERNEL = ("torch_kernel",)


@pytest.fixture(scope="module")
def run(trainer):
    def run(name, *overrides, **options):
        return finished(trainer(f"fsdp1_{name}", *FSDP1, *overrides, **options))

    return run


@pytest.fixture(scope="module")
def ours_off(run):
    return run("ours_off", "optim.optimizer_impl=bwdfuse.optim", UNCLIPPED)


@pytest.fixture(scope="module")
def ours_on(run):
    return run("ours_on", *ON)


@pytest.fixture(scope="module")
def stock(run):
    return run("stock", *STOCK)


@pytest.fixture(scope="module")
def seam(run):
    return run("seam", *ON, modules=KERNEL)


# ---- the same training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [3, STEPS])
def test_on_and_off_give_the_same_bits(ours_on, ours_off, step):
    assert differences(ours_on.checkpoint(step), ours_off.checkpoint(step)) == []


@pytest.mark.parametrize("step", [3, STEPS])
def test_with_torchs_kernel_behind_the_hooks_all_bits_are_stocks(seam, stock, step):
    assert differences(seam.checkpoint(step), stock.checkpoint(step)) == []


def test_the_native_kernel_is_not_torchs(ours_on, stock):
    """Otherwise the comparison above would compare torch with torch."""
    assert differences(ours_on.checkpoint(STEPS), stock.checkpoint(STEPS)) != []


def test_training_moves_every_parameter(ours_on):
    before, after = ours_on.checkpoint(3), ours_on.checkpoint(STEPS)
    moved = [key for key, value in before.items() if "/model/" in key and not torch.equal(value, after[key])]
    assert len({key.split("/model/")[1] for key in moved}) == 27
    assert {float(value) for key, value in after.items() if key.endswith("/step")} == {float(STEPS)}


def test_parameters_of_another_rank_have_no_state_as_in_stock(ours_on, stock):
    assert ours_on.checkpoint(STEPS).keys() == stock.checkpoint(STEPS).keys()
    states = {key for key in ours_on.checkpoint(STEPS) if key.endswith("/exp_avg")}
    assert 27 < len(states) < 2 * 27


def test_metrics_are_stocks(seam, stock):
    for name in ("loss", "lr"):
        assert column(seam, name) == column(stock, name)
    assert seam.validation == stock.validation and len(set(stock.validation)) == 2
    assert [step.keys() for step in seam.metrics] == [step.keys() for step in stock.metrics]
    for ours, theirs in zip(column(seam, "grad_norm"), column(stock, "grad_norm"), strict=True):
        assert math.isclose(ours, theirs, rel_tol=2e-6)  # theirs is a sum in float


def test_one_line_says_that_the_flag_took_effect(ours_on, ours_off):
    (line,) = ours_on.announcements
    assert "27 parameters are stepped inside backward" in line
    # of 202,304 float32 parameters on two ranks, the outermost unit keeps embedding and head
    assert (
        f"of {202_304 * 4 / 2 / 2**20:.2f} MiB of gradients are freed on each rank (all but the largest FSDP group"
        in line
    )
    assert ours_off.announcements == []


# ---- resume ------------------------------------------------------------------------------------------------------


def resume(trainer, run, source, name, *overrides, modules=()):
    trainer.fork(source, 3, f"fsdp1_{name}")
    resumed = run(name, *overrides, modules=modules)
    assert len(resumed.metrics) == 3
    return resumed


def test_resume_at_3_equals_straight_to_6(trainer, run, ours_on):
    resumed = resume(trainer, run, ours_on, "ours_to_ours", *ON)
    assert differences(resumed.checkpoint(STEPS), ours_on.checkpoint(STEPS)) == []
    assert column(resumed, "lr") == column(ours_on, "lr")[3:]


def test_resume_from_stock(trainer, run, stock):
    resumed = resume(trainer, run, stock, "stock_to_ours", *ON, modules=KERNEL)
    assert differences(resumed.checkpoint(STEPS), stock.checkpoint(STEPS)) == []


def test_stock_resumes_from_ours(trainer, run, seam, stock):
    """torch takes its implementation (fused or not) from the checkpoint, and ours names none."""
    trainer.fork(seam, 3, "fsdp1_ours_to_stock")
    for path in (trainer.folder / "fsdp1_ours_to_stock" / "global_step_3").glob("optim_*.pt"):
        optimizer = torch.load(path, weights_only=False)
        assert [group.pop("fused") for group in optimizer["param_groups"]] == [None]
        optimizer["param_groups"][0]["fused"] = True
        torch.save(optimizer, path)
    resumed = run("ours_to_stock", *STOCK)
    assert differences(resumed.checkpoint(STEPS), stock.checkpoint(STEPS)) == []


# ---- faults ------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_both_as_stock_does(run, stock):
    theirs = run("stock_fault", *STOCK, "model.external_lib=nan_loss")
    ours = run("seam_fault", *ON, "optim.nonfinite=off", "model.external_lib=nan_loss", modules=KERNEL)
    assert differences(ours.checkpoint(STEPS), theirs.checkpoint(STEPS)) == []
    steps = {float(value) for key, value in ours.checkpoint(STEPS).items() if key.endswith("/step")}
    assert steps == {STEPS - 1.0}, "no rank may have stepped in the update that was skipped"
    assert differences(theirs.checkpoint(STEPS), stock.checkpoint(STEPS)) != [], "the fault did not happen"
    for name in ("loss", "lr"):
        assert column(ours, name) == column(theirs, name)
    assert [norm is None for norm in column(ours, "grad_norm")] == [step == 2 for step in range(STEPS)]


# ---- what else verl users turn on --------------------------------------------------------------------------------

COMBINATIONS = {
    "everything": (
        "engine.model_dtype=bf16",
        "engine.optimizer_offload=True",
        "engine.ulysses_sequence_parallel_size=2",
        "model.use_remove_padding=True",
        "data.micro_batch_size_per_gpu=8",
    ),
    "lora": ("model.lora_rank=4", "model.target_modules=[q_proj,v_proj]", "engine.full_determinism=True"),
}


@pytest.fixture(scope="module")
def tied_model(trainer):
    """The same model, whose head is its embedding."""
    folder = trainer.folder / "tied"
    shutil.copytree(trainer.folder / "model", folder)
    model = Qwen2ForCausalLM.from_pretrained(folder)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.config.tie_word_embeddings = True
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations_equal_stock(run, tied_model, name):
    overrides = (*COMBINATIONS[name], *([f"model.path={tied_model}"] if name == "everything" else []))
    theirs = run(f"{name}_stock", *STOCK, *overrides)
    ours = run(f"{name}_seam", *ON, *overrides, modules=KERNEL)
    one, other = ours.checkpoint(STEPS), theirs.checkpoint(STEPS)
    assert one.keys() == other.keys() and {float(one[key]) for key in one if key.endswith("/step")} == {float(STEPS)}
    assert [key for key, value in one.items() if not torch.equal(value, other[key])] == []
    assert column(ours, "loss") == column(theirs, "loss")
    if name == "everything":
        weights = {key.split("/model/")[1]: value for key, value in one.items() if "rank_0/model/" in key}
        assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
        assert {value.dtype for value in weights.values()} == {torch.bfloat16}


def test_replicas_that_fsdp1_does_not_reduce_are_refused(trainer):
    """verl asks for HYBRID_SHARD with one rank per shard group, for which torch reduces nothing."""
    run = trainer("fsdp1_replicas", *FSDP1, *ON, "engine.fsdp_size=1")
    assert run.returncode != 0
    assert "verl: engine.fsdp_size=-1), or FSDP2 (verl: engine.strategy=fsdp2)" in run.log
