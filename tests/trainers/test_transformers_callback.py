"""The callback form: a stock Trainer of transformers or TRL whose class is not ours to change."""

import copy

import hf_runs
import pytest
import torch
import transformers
from hf_runs import (
    TrueNorm,
    finish,
    hooks_of,
    make_model,
    make_texts,
    make_tokenizer,
    make_tokens,
    quick,
    settings,
    torch_kernel,
)

import bwdfuse
from bwdfuse.errors import ConfigError
from bwdfuse.trainers.transformers import BwdHookCallback, Trainer, TrainingArguments, callback, find_optimizer

__all__ = ["quick", "torch_kernel"]


class Records(transformers.TrainerCallback):
    """Stands for a reporter of transformers, such as TensorBoard's: those come before any callback of the user."""

    def __init__(self):
        self.norms = []

    def on_log(self, args, state, control, logs=None, **_):
        if "grad_norm" in logs:
            self.norms.append(logs["grad_norm"])


@pytest.fixture
def build(tmp_path):
    def make(callbacks=(), model=None, trainer_class=transformers.Trainer, trainer_options=None, **changes):
        args = transformers.TrainingArguments(**settings(tmp_path, **changes))
        model = make_model() if model is None else model
        return trainer_class(
            model, args, train_dataset=make_tokens(), callbacks=list(callbacks), **(trainer_options or {})
        )

    return make


def assert_same(a, b):
    assert a.losses == b.losses and a.rates == b.rates and len(a.losses) > 0
    torch.testing.assert_close(a.weights, b.weights, rtol=0, atol=0)
    torch.testing.assert_close(a.state, b.state, rtol=0, atol=0)


# ---- it does what the class does -----------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", hf_runs.KERNELS)
def test_equals_stock_with_torchs_kernel(build, torch_kernel, optim):
    true_norm = TrueNorm()
    stock = finish(build([true_norm], optim=optim))
    torch_kernel(optim)
    first, second = Records(), Records()
    trainer = build([first, callback(), second], optim=optim)
    ours = finish(trainer)
    assert_same(ours, stock)
    assert ours.norms == pytest.approx(true_norm.norms, rel=1e-12)
    assert first.norms == second.norms == ours.norms
    optimizer, _ = find_optimizer(trainer.optimizer)
    params = len(list(trainer.model.parameters()))
    assert isinstance(optimizer, bwdfuse.AdamW) and optimizer.stats()["param_steps"] == 24 * params
    assert hooks_of(trainer.model) == []


def test_equals_the_class_form_in_trl(tmp_path):
    trl = pytest.importorskip("trl")
    from bwdfuse.trainers.trl import SFTConfig, SFTTrainer

    options = {"train_dataset": make_texts(), "processing_class": make_tokenizer()}
    args = SFTConfig(**settings(tmp_path, bwd_hook=True))
    expected = finish(SFTTrainer(make_model(), args=args, **options))
    args = trl.SFTConfig(**settings(tmp_path))
    got = finish(trl.SFTTrainer(make_model(), args=args, callbacks=[callback()], **options))
    assert_same(got, expected)
    assert got.norms == expected.norms


def test_added_to_a_trainer_that_is_built(build, capsys):
    """Last in line then, behind what prints the log; the trainer's own optimizer may even exist already."""
    trainer = build(max_steps=3)
    trainer.create_optimizer()
    trainer.add_callback(callback())
    run = finish(trainer)
    printed = [line for line in capsys.readouterr().out.splitlines() if "grad_norm" in line]
    assert len(printed) == 3 and "'grad_norm': '0'" not in " ".join(printed)
    assert_same(run, finish(build([callback()], max_steps=3)))


def test_resume_in_every_direction(build, torch_kernel, tmp_path):
    torch_kernel("adamw_torch")

    def run(hook, folder, **options):
        changes = {"output_dir": str(tmp_path / folder), "optim": "adamw_torch", **options}
        return build([callback()] if hook else [], **changes)

    whole = {}
    for hook in (True, False):
        whole[hook] = finish(run(hook, f"{hook}", save_strategy="steps", save_steps=12))
    assert_same(whole[True], whole[False])
    for first, second in [(True, True), (True, False), (False, True)]:
        checkpoint = str(tmp_path / f"{first}" / "checkpoint-12")
        resumed = finish(run(second, f"{first}-{second}"), resume_from_checkpoint=checkpoint)
        torch.testing.assert_close(resumed.weights, whole[False].weights, rtol=0, atol=0)
        torch.testing.assert_close(resumed.state, whole[False].state, rtol=0, atol=0)


def test_train_twice(build):
    trainer = build([callback()], max_steps=3)
    trainer.train()
    run = finish(trainer)
    expected = build(max_steps=3, trainer_options={"optimizer_cls_and_kwargs": (bwdfuse.AdamW, {"lr": 5e-3})})
    expected.train()
    assert_same(run, finish(expected))


def test_off_leaves_the_trainer_alone(build):
    run = finish(build([callback(bwd_hook=False)], max_steps=3, max_grad_norm=1.0))
    stock = finish(build(max_steps=3, max_grad_norm=1.0))
    assert_same(run, stock)
    assert run.norms == stock.norms
    assert type(run.trainer.optimizer.optimizer) is torch.optim.AdamW


def test_an_optimizer_of_ours_stays(build):
    model = make_model()
    optimizer = bwdfuse.AdamW(model.parameters(), lr=1e-2, nonfinite="skip")
    build([callback()], model=model, max_steps=2, trainer_options={"optimizers": (optimizer, None)}).train()
    assert optimizer.stats()["updates"] == 2


def test_it_makes_a_stock_trainer_know_the_flag(tmp_path):
    """Our arguments in a trainer that is not ours are fine with the callback; in our own Trainer it is not needed."""
    args = TrainingArguments(**settings(tmp_path, bwd_hook=True, max_steps=1))
    for trainer_class in (transformers.Trainer, Trainer):
        trainer = trainer_class(make_model(), args, train_dataset=make_tokens(), callbacks=[callback()])
        trainer.train()
        assert find_optimizer(trainer.optimizer)[0].stats()["updates"] == 1
        assert sum(isinstance(cb, BwdHookCallback) for cb in trainer.callback_handler.callbacks) == 1


# ---- or it raises --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ({"max_grad_norm": 1.0}, "set max_grad_norm=0"),
        ({"gradient_accumulation_steps": 2}, "set gradient_accumulation_steps=1"),
        ({"auto_find_batch_size": True}, "set auto_find_batch_size=False"),
        ({"fp16": True}, "set fp16=False"),
        ({"optim": "sgd"}, "set optim='adamw_torch'"),
    ],
    ids=str,
)
def test_refused_when_the_trainer_is_built_or_starts(build, change, fix):
    with pytest.raises(ConfigError) as caught:
        build([callback()], **change)
    assert fix in str(caught.value)
    trainer = build(**change)
    trainer.add_callback(callback())
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(ConfigError) as caught:
        trainer.train()
    assert fix in str(caught.value) and trainer.state.global_step == 0
    torch.testing.assert_close(trainer.model.state_dict(), before, rtol=0, atol=0)


def test_refused_when_the_arguments_change_during_training(build):
    class Changes(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            args.max_grad_norm = 1.0

    trainer = build([callback(), Changes()])
    with pytest.raises(ConfigError, match="max_grad_norm=1.0"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_other_optimizers_are_refused_by_name(build):
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    with pytest.raises(ConfigError, match=r"optimizer is torch\.optim\.sgd\.SGD; pass optimizer_cls_and_kwargs"):
        build([callback()], model=model, trainer_options={"optimizers": (sgd, None)})
    trainer = build([callback()], trainer_options={"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1e-2})})
    with pytest.raises(ConfigError, match=r"optimizer is torch\.optim\.sgd\.SGD; pass optimizer_cls_and_kwargs"):
        trainer.train()

    class Mine(torch.optim.AdamW):
        """Who knows what it does in step()."""

    trainer = build([callback()], trainer_options={"optimizer_cls_and_kwargs": (Mine, {"lr": 1e-2})})
    with pytest.raises(ConfigError, match="Mine; pass optimizer_cls_and_kwargs"):
        trainer.train()


def test_a_handler_that_is_not_transformers_own(build):
    """Then nobody knows who logs before us."""
    trainer = build()
    trainer.create_optimizer()
    prepared = trainer.accelerator.prepare(trainer.optimizer)

    def somebody_else():
        callback().on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model, optimizer=prepared)

    with pytest.raises(ConfigError, match="not by transformers' CallbackHandler"):
        somebody_else()
