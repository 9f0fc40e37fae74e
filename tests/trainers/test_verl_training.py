"""verl's own SFT trainer, two processes over gloo, FSDP2: stepping inside backward must change nothing but memory."""

import math

import pytest
import torch
from conftest import ON, STOCK, finished

STEPS = 6


def differences(one: dict, other: dict) -> list[str]:
    """Keys whose tensors are not equal to the bit. Both must have the same ones."""
    assert one.keys() == other.keys()
    assert len(one) > 100
    return [key for key, value in one.items() if value.dtype != other[key].dtype or not torch.equal(value, other[key])]


def column(run, name: str) -> list[float]:
    return [step[f"train/{name}"] for step in run.metrics]


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
    assert len(moved) == 2 * 27


def test_state_is_torchs(ours_on, stock):
    ours, torchs = ours_on.checkpoint(STEPS), stock.checkpoint(STEPS)
    assert {key: (value.dtype, value.shape) for key, value in ours.items()} == {
        key: (value.dtype, value.shape) for key, value in torchs.items()
    }
    assert {float(value) for key, value in ours.items() if key.endswith("/step")} == {float(STEPS)}


def test_replicated_shards_give_the_same_bits(trainer, stock):
    """HSDP: every rank holds all of the model, and gradients are summed over ranks after they are sharded."""
    replicated = finished(trainer("replicated", *ON, "engine.fsdp_size=1", modules=("torch_kernel",)))
    assert [line.count("0.53 of 0.77 MiB") for line in replicated.announcements] == [1]
    whole, shards = replicated.checkpoint(STEPS), stock.checkpoint(STEPS)
    ranks = "2_rank_0", "2_rank_1"
    for key, value in whole.items():
        name = key.removeprefix(ranks[0]).removeprefix(ranks[1])
        first, second = (shards[rank + name] for rank in ranks)
        assert torch.equal(value, torch.cat([first, second]) if value.dim() else first), key
    for ours, theirs in zip(column(replicated, "grad_norm"), column(stock, "grad_norm"), strict=True):
        assert math.isclose(ours, theirs, rel_tol=1e-6)


# ---- metrics -----------------------------------------------------------------------------------------------------


def test_learning_rates_are_stocks(ours_on, stock):
    assert column(ours_on, "lr") == column(stock, "lr")
    assert len(set(column(stock, "lr"))) == 5  # warms up and decays


def test_gradient_norms_are_stocks(seam, stock):
    for ours, theirs in zip(column(seam, "grad_norm"), column(stock, "grad_norm"), strict=True):
        assert math.isclose(ours, theirs, rel_tol=1e-6)


def test_losses_are_stocks(seam, stock):
    """Those of validation too, whose forward passes run between updates."""
    assert column(seam, "loss") == column(stock, "loss")
    assert seam.validation == stock.validation
    assert len(set(stock.validation)) == 2


def test_the_same_metrics_are_logged(ours_on, stock):
    assert [step.keys() for step in ours_on.metrics] == [step.keys() for step in stock.metrics]


# ---- what the log says -------------------------------------------------------------------------------------------


def test_one_line_says_that_the_flag_took_effect_and_what_it_frees(ours_on):
    (line,) = ours_on.announcements
    assert "27 parameters are stepped inside backward" in line
    # 202,304 float32 parameters on two ranks; embedding and head (1000 x 64 each) are the two largest groups
    total, freed = 202_304 * 4 / 2 / 2**20, 0.26
    assert f"{freed:.2f} of {total:.2f} MiB of gradients are freed on each rank" in line


def test_off_says_nothing(ours_off, stock):
    assert ours_off.announcements == stock.announcements == []


# ---- resume ------------------------------------------------------------------------------------------------------


def resume(trainer, run, name, *overrides, modules=()):
    trainer.fork(run, 3, name)
    resumed = finished(trainer(name, *overrides, modules=modules))
    assert len(resumed.metrics) == 3
    return resumed


def test_resume_at_3_equals_straight_to_6(trainer, ours_on):
    resumed = resume(trainer, ours_on, "ours_to_ours", *ON)
    assert differences(resumed.checkpoint(STEPS), ours_on.checkpoint(STEPS)) == []
    assert resumed.metrics[0]["train/lr"] == ours_on.metrics[3]["train/lr"]


def test_resume_from_stock(trainer, stock):
    """With the same kernel on both sides, where a checkpoint comes from leaves no trace."""
    resumed = resume(trainer, stock, "stock_to_ours", *ON, modules=("torch_kernel",))
    assert differences(resumed.checkpoint(STEPS), stock.checkpoint(STEPS)) == []
    assert column(resumed, "lr") == column(stock, "lr")[3:]


def test_stock_resumes_from_ours(trainer, seam, stock):
    """torch takes its implementation (fused or not) from the checkpoint; ours names none, so the reference must not."""
    resumed = resume(trainer, seam, "ours_to_stock", *STOCK)
    trainer.fork(stock, 3, "stock_to_stock")
    for path in (trainer.folder / "stock_to_stock" / "global_step_3").glob("optim_*.pt"):
        optimizer = torch.load(path, weights_only=False)
        assert [group.pop("fused") for group in optimizer["param_groups"]] == [True]
        torch.save(optimizer, path)
    reference = finished(trainer("stock_to_stock", *STOCK))
    assert differences(resumed.checkpoint(STEPS), reference.checkpoint(STEPS)) == []
    assert column(resumed, "loss") == column(reference, "loss")


# ---- faults ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def stock_with_a_fault(trainer):
    return finished(trainer("stock_fault", *STOCK, "model.external_lib=nan_loss"))


@pytest.fixture(scope="session")
def seam_with_a_fault(trainer):
    """Without the check of each gradient, so that nothing but the check of the loss stands before the weights."""
    overrides = (*ON, "optim.nonfinite=off", "model.external_lib=nan_loss")
    return finished(trainer("seam_fault", *overrides, modules=("torch_kernel",)))


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_both_as_stock_does(
    seam_with_a_fault, stock_with_a_fault, stock
):
    ours, theirs = seam_with_a_fault, stock_with_a_fault
    assert differences(ours.checkpoint(STEPS), theirs.checkpoint(STEPS)) == []
    steps = {float(value) for key, value in ours.checkpoint(STEPS).items() if key.endswith("/step")}
    assert steps == {STEPS - 1.0}, "no rank may have stepped in the update that was skipped"
    assert all(value.isfinite().all() for value in ours.checkpoint(STEPS).values())
    assert differences(theirs.checkpoint(STEPS), stock.checkpoint(STEPS)) != [], "the fault did not happen"


def test_a_skipped_update_is_reported_as_stock_does(seam_with_a_fault, stock_with_a_fault):
    ours, theirs = seam_with_a_fault, stock_with_a_fault
    for name in ("loss", "lr"):
        assert column(ours, name) == column(theirs, name)
    assert column(ours, "grad_norm")[2] is column(theirs, "grad_norm")[2] is None  # NaN in JSON
    assert [norm is None for norm in column(ours, "grad_norm")] == [step == 2 for step in range(STEPS)]
    warnings = "the loss is not finite on some rank; no parameter is updated on any rank"
    assert ours.log.count(warnings) == 2, "both ranks say so"


def test_gradients_that_are_not_finite_are_not_stepped(trainer, stock_with_a_fault):
    """The loss is finite, so verl finds out from the norm after backward; here each parameter is looked at."""
    ours = finished(trainer("gradient_fault", *ON, "model.external_lib=nan_gradient", modules=("torch_kernel",)))
    assert differences(ours.checkpoint(STEPS), stock_with_a_fault.checkpoint(STEPS)) == []
    assert None not in column(ours, "loss")
    assert [norm is None for norm in column(ours, "grad_norm")] == [step == 2 for step in range(STEPS)]
    assert ours.log.count("WARN: bwdfuse: 27 parameters kept their value, their gradient is not finite") == 2


@pytest.fixture(scope="session")
def faults(trainer) -> dict[str, str]:
    """What became of a run in which something changed after the settings were checked, by fault."""
    run = finished(trainer.script("faults", "run_time_faults.py", *ON, ranks=1))
    lines = (line.partition(": ") for line in run.log.splitlines())
    return {fault: outcome for fault, _, outcome in lines}


def test_without_a_fault_the_same_trainer_trains(faults):
    assert faults["no fault"] == "trained on"


def test_micro_batches_that_appear_after_the_check_are_refused_before_backward(faults):
    said = faults["micro-batches"]
    assert said.startswith("weights unchanged True: AccumulationError: ")
    assert "this update takes 4 micro-batches on this rank" in said
    assert "set data.use_dynamic_bsz=False data.train_batch_size=8 data.micro_batch_size_per_gpu=8" in said


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("replaced optimizer", "optimizer is torch.optim.adamw.AdamW and not an armed"),
        ("disarmed optimizer", "disarmed it"),
    ],
)
def test_a_run_that_lost_its_optimizer_stops_before_backward(faults, fault, named):
    assert faults[fault].startswith("weights unchanged True: BwdFuseError: optim.bwd_hook=True")
    assert named in faults[fault]


def test_a_gradient_that_nobody_steps_stops_the_run(faults):
    assert "BwdFuseError: optim.bwd_hook=True: parameter 'extra' still has its gradient" in faults["foreign parameter"]
