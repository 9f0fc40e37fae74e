"""Real transformers: what the Trainer with bwd_hook computes, says and leaves behind, and where it stops."""

import copy
import math

import hf_runs
import pytest
import torch
import transformers
from hf_runs import TrueNorm, finish, hooks_of, make_model, make_tokens, quick, settings, torch_kernel

import bwdfuse
from bwdfuse.errors import ConfigError
from bwdfuse.trainers.transformers import (
    BwdHookArguments,
    BwdHookCallback,
    BwdHookTrainer,
    Trainer,
    TrainingArguments,
    callback,
    find_optimizer,
)

__all__ = ["quick", "torch_kernel"]


@pytest.fixture
def build(tmp_path):
    """A trainer of ours, or of another class, that has not trained yet."""

    def make(trainer_class=Trainer, arguments=TrainingArguments, model=None, trainer_options=None, **changes):
        if issubclass(arguments, BwdHookArguments):
            changes.setdefault("bwd_hook", True)
        args = arguments(**settings(tmp_path, **changes))
        model = make_model() if model is None else model
        return trainer_class(model, args, train_dataset=make_tokens(), **(trainer_options or {}))

    return make


def stock(build, **options):
    return build(transformers.Trainer, transformers.TrainingArguments, **options)


def assert_same(a, b):
    assert a.losses == b.losses and a.rates == b.rates and len(a.losses) > 0
    torch.testing.assert_close(a.weights, b.weights, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(a.state, b.state, rtol=0, atol=0, equal_nan=True)


# ---- what it computes ----------------------------------------------------------------------------------------------


def test_equals_stock_with_torchs_kernel(build, torch_kernel):
    true_norm = TrueNorm()
    theirs = finish(stock(build, trainer_options={"callbacks": [true_norm]}))
    torch_kernel("adamw_torch_fused")
    ours = finish(build())
    assert_same(ours, theirs)
    assert ours.norms == pytest.approx(true_norm.norms, rel=1e-12)


def test_the_trainers_own_groups_and_hyperparameters(build):
    trainer = build(adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6, weight_decay=0.3, learning_rate=1e-3)
    theirs = stock(
        build, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6, weight_decay=0.3, learning_rate=1e-3
    ).create_optimizer()
    ours = trainer.create_optimizer()
    assert isinstance(ours, bwdfuse.AdamW) and not ours.armed
    for our_group, their_group in zip(ours.param_groups, theirs.param_groups, strict=True):
        for key in ("lr", "betas", "eps", "weight_decay"):
            assert our_group[key] == their_group[key]
        assert [param.shape for param in our_group["params"]] == [param.shape for param in their_group["params"]]
    assert trainer.optimizer_cls_and_kwargs is None


def test_a_compiled_model(build, capsys):
    """All gradients then come at the end of backward: the same bits, nothing saved, and it says so."""
    runs = []
    for hook in (True, False):
        torch._dynamo.reset()
        options = {"optimizer_cls_and_kwargs": (bwdfuse.AdamW, {"lr": 5e-3})}
        runs.append(
            finish(build(bwd_hook=hook, torch_compile_backend="aot_eager", max_steps=3, trainer_options=options))
        )
    assert_same(*runs)
    assert "torch_compile=True: a whole compiled model" in capsys.readouterr().out


def test_a_non_finite_loss_goes_on_as_in_transformers(build, torch_kernel):
    """It filters the log and steps the weights all the same. Stock spreads the NaN through the norm (clipping to
    infinity multiplies by inf / nan) also to what has a zero gradient, here positions that no text reaches."""

    class Poisoned:
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss * math.nan if self.state.global_step == 3 else loss

    theirs = type("Theirs", (Poisoned, transformers.Trainer), {})
    ours = type("Ours", (Poisoned, Trainer), {})
    expected = finish(build(theirs, transformers.TrainingArguments, max_steps=5))
    torch_kernel("adamw_torch_fused")
    got = finish(build(ours, max_steps=5))
    assert got.losses == expected.losses and all(map(math.isfinite, got.losses[:4]))
    assert math.isnan(got.norms[3]) and math.isnan(expected.norms[3])
    assert all(weight.isnan().all() for weight in expected.weights.values())
    unreached = got.weights.pop("transformer.wpe.weight")[12:]
    assert unreached.isfinite().all() and unreached.numel() > 0
    assert all(weight.isnan().all() for weight in got.weights.values())


def test_frozen_parameters_stay(build):
    model = make_model()
    model.transformer.h[0].requires_grad_(False)
    before = copy.deepcopy(model.transformer.h[0].state_dict())
    trainer = build(model=model, max_steps=3)
    trainer.train()
    torch.testing.assert_close(trainer.model.transformer.h[0].state_dict(), before, rtol=0, atol=0)


def test_evaluation_and_the_best_model(build):
    """Evaluating, saving and going back to the best checkpoint, as in stock."""
    options = {"eval_dataset": make_tokens(8)}
    changes = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    changes |= {"load_best_model_at_end": True, "max_steps": 8, "eval_on_start": True, "save_total_limit": 1}
    runs = []
    for hook in (True, False):
        options |= {"optimizer_cls_and_kwargs": (bwdfuse.AdamW, {"lr": 5e-3})}
        runs.append(finish(build(bwd_hook=hook, trainer_options=options, **changes)))
    assert_same(*runs)
    evaluated = [[log["eval_loss"] for log in run.trainer.state.log_history if "eval_loss" in log] for run in runs]
    assert evaluated[0] == evaluated[1] and len(evaluated[0]) == 3


# ---- what it says, and what it leaves behind -----------------------------------------------------------------------


def test_one_line_says_that_it_took_effect(build, capsys):
    trainer = build(max_steps=2)
    trainer.train()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bwdfuse")]
    params = list(trainer.model.parameters())
    sizes = sorted(param.nbytes / 2**20 for param in params)
    assert f"bwd_hook=True took effect: {len(params)} parameters are stepped inside backward" in line
    assert f"{sum(sizes[:-1]):.2f} of {sum(sizes):.2f} MiB of gradients are freed (all but the largest one" in line
    assert "torch_compile" not in line


@pytest.mark.parametrize("hook", [True, False])
def test_gradients_are_gone_as_soon_as_they_are_used(build, hook):
    """The point of it all: how many gradients are alive after each one is complete."""
    alive = []

    class Watching(Trainer):
        def compute_loss(self, model, *args, **kwargs):
            if not alive:
                for param in model.parameters():
                    param.register_post_accumulate_grad_hook(
                        lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
                    )
            return super().compute_loss(model, *args, **kwargs)

    trainer = build(Watching, bwd_hook=hook, max_steps=2)
    trainer.train()
    params = len(list(trainer.model.parameters()))
    # our hook ran before this one, so not even the gradient at hand is left
    assert alive == ([0] * (2 * params) if hook else [*range(1, params + 1)] * 2)


def test_afterwards_the_model_is_an_ordinary_one(build):
    trainer = build(max_steps=2)
    trainer.train()
    assert hooks_of(trainer.model) == []
    before = copy.deepcopy(trainer.model.state_dict())
    inputs = torch.arange(3, 11).unsqueeze(0)
    trainer.model(input_ids=inputs, labels=inputs).loss.backward()
    torch.testing.assert_close(trainer.model.state_dict(), before, rtol=0, atol=0)
    assert trainer.model.transformer.wte.weight.grad is not None


def test_an_exception_leaves_no_hooks(build):
    class Failing(Trainer):
        def compute_loss(self, *args, **kwargs):
            if self.state.global_step == 1:
                raise KeyboardInterrupt
            return super().compute_loss(*args, **kwargs)

    trainer = build(Failing, max_steps=3)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert hooks_of(trainer.model) == []


def test_train_twice_in_one_trainer(build):
    """As in a notebook; the second call goes on with the same optimizer and a fresh schedule."""
    runs = []
    for hook in (True, False):
        trainer = build(
            bwd_hook=hook, max_steps=3, trainer_options={"optimizer_cls_and_kwargs": (bwdfuse.AdamW, {"lr": 5e-3})}
        )
        trainer.train()
        runs.append(finish(trainer))
    assert_same(*runs)
    assert {int(entry["step"]) for entry in runs[0].state.values()} == {6}


def test_the_flag_can_be_turned_off_and_on_again(build):
    """As in a notebook, on the arguments of a trainer that has trained."""

    class Watches(transformers.TrainerCallback):
        armed = []

        def on_step_end(self, args, state, control, optimizer=None, **_):
            self.armed.append(find_optimizer(optimizer)[0].armed)

    trainer = build(max_steps=1, trainer_options={"callbacks": [Watches()]})
    for hook in (True, False, True):
        trainer.args.bwd_hook = hook
        trainer.train()
        assert Watches.armed.pop() is hook
        assert hooks_of(trainer.model) == []
    assert find_optimizer(trainer.optimizer)[0].stats()["updates"] == 3


# ---- the arguments -------------------------------------------------------------------------------------------------


def test_the_field_survives_dicts_json_and_the_command_line(tmp_path):
    args = TrainingArguments(**settings(tmp_path, bwd_hook=True))
    again = TrainingArguments(**args.to_dict())
    assert again.bwd_hook is True and again.to_dict() == args.to_dict()
    assert '"bwd_hook": true' in args.to_json_string()
    parser = transformers.HfArgumentParser(TrainingArguments)
    common = ["--output_dir", str(tmp_path), "--use_cpu", "True", "--max_grad_norm", "0"]
    for flag, value in [
        (["--bwd_hook"], True),
        (["--bwd_hook", "True"], True),
        (["--bwd_hook", "False"], False),
        ([], False),
    ]:
        (parsed,) = parser.parse_args_into_dataclasses(common + flag)
        assert parsed.bwd_hook is value
    assert "bwd_hook" in parser.format_help()
    path = tmp_path / "args.json"
    path.write_text(args.to_json_string())
    (parsed,) = parser.parse_json_file(str(path))
    assert parsed.bwd_hook is True


# ---- other people's trainers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("callbacks", [[], [callback(bwd_hook=False)]], ids=["none", "callback off"])
def test_a_stock_trainer_does_not_ignore_the_flag(build, callbacks):
    trainer = build(transformers.Trainer, trainer_options={"callbacks": callbacks})
    with pytest.raises(ConfigError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "bwd_hook=True has no effect in transformers.trainer.Trainer: import the trainer from "
        "bwdfuse.trainers.transformers, or pass it callbacks=[callback()] from bwdfuse.trainers.transformers, or set "
        "bwd_hook=False"
    )
    assert trainer.state.global_step == 0


def test_scripts_may_ask_for_the_warmup_themselves(build):
    trainer = build(max_steps=2)
    assert trainer.args.get_warmup_steps(100) == 4


def test_mixed_into_somebody_elses_trainer(build):
    """Custom groups in create_optimizer, a custom training_step: replaced where it can be, armed in any case."""

    class Theirs(transformers.Trainer):
        def create_optimizer(self, model=None):
            if self.optimizer is None:
                params = list(self.model.parameters())
                groups = [{"params": params[:5], "lr": 1e-2}, {"params": params[5:]}]
                self.optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.2)
            return self.optimizer

        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            return loss.detach()

    class Below(Theirs, Trainer):
        """Theirs comes first, so that its create_optimizer and training_step never reach ours."""

    class Above(BwdHookTrainer, Theirs):
        """As the documentation says."""

    for trainer_class in (Below, Above):
        trainer = build(trainer_class, max_steps=3)
        trainer.train()
        optimizer, _ = find_optimizer(trainer.optimizer)
        assert isinstance(optimizer, bwdfuse.AdamW)
        assert optimizer.stats()["param_steps"] == 3 * len(list(trainer.model.parameters()))
        assert [group["initial_lr"] for group in optimizer.param_groups] == [1e-2, 1e-3]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.2]
        assert trainer.state.log_history[-2]["grad_norm"] > 0


def test_an_optimizer_of_ours_that_the_user_built(build):
    model = make_model()
    optimizer = bwdfuse.AdamW(model.parameters(), lr=1e-2, nonfinite="raise")
    trainer = build(model=model, max_steps=3, trainer_options={"optimizers": (optimizer, None)})
    trainer.train()
    assert optimizer.stats()["updates"] == 3 and optimizer.nonfinite == "raise"


def test_a_torch_optimizer_that_the_user_built(build):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = build(model=model, max_steps=3, trainer_options={"optimizers": (optimizer, None)})
    trainer.train()
    assert optimizer.state == {} and len(trainer.optimizer.state) == len(list(model.parameters()))


def test_a_scheduler_on_the_optimizer_that_would_be_replaced(build):
    """It would go on turning the learning rate of an optimizer that no longer steps."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = build(model=model, trainer_options={"optimizers": (optimizer, schedule)})
    with pytest.raises(ConfigError, match="scheduler was built on a torch.optim.AdamW"):
        trainer.train()


def test_a_scheduler_on_an_optimizer_of_ours(build):
    model = make_model()
    optimizer = bwdfuse.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    trainer = build(model=model, max_steps=3, trainer_options={"optimizers": (optimizer, schedule)})
    assert finish(trainer).rates == pytest.approx([1e-2, 1e-2 / 2, 1e-2 / 3])


def test_a_stock_trainer_that_clips_cannot_clip_in_silence(build):
    """Its max_grad_norm is 1.0 by default; the gradients of an optimizer that was armed by hand are gone by then."""
    model = make_model()
    optimizer = bwdfuse.AdamW(model.parameters(), lr=1e-2, bwd_hook=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = stock(build, model=model, max_grad_norm=1.0, trainer_options={"optimizers": (optimizer, schedule)})
    with pytest.raises(ConfigError, match="clipping of gradients.*max_grad_norm=0"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_torchs_adam_is_taken_over_by_the_callback(build):
    """With its class, its coupled decay, its amsgrad and its groups; equal to a trainer given ours."""

    def run(cls):
        model = make_model()
        groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1}]
        groups += [{"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]
        trainer = stock(
            build,
            model=model,
            max_steps=3,
            trainer_options={"optimizers": (cls(groups, lr=1e-2, amsgrad=True), None), "callbacks": [callback()]},
        )
        return finish(trainer)

    ours, taken = run(bwdfuse.Adam), run(torch.optim.Adam)
    assert_same(ours, taken)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adamax, torch.optim.RMSprop])
def test_other_optimizers_are_refused_by_name(build, cls):
    model = make_model()
    with pytest.raises(ConfigError, match=rf"only AdamW and Adam can be stepped inside backward.*\.{cls.__name__};"):
        build(model=model, trainer_options={"optimizers": (cls(model.parameters(), lr=1e-2), None)})
    trainer = build(trainer_options={"optimizer_cls_and_kwargs": (cls, {"lr": 1e-2})})
    with pytest.raises(ConfigError, match=rf"only AdamW and Adam can be stepped inside backward.*\.{cls.__name__};"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_options_of_adamw_that_cannot_be_honoured(build):
    trainer = build(trainer_options={"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True})})
    with pytest.raises(ConfigError, match=r"AdamW\(foreach=True\)"):
        trainer.train()


def test_an_armed_optimizer_in_a_trainer_whose_flag_is_off(build):
    model = make_model()
    optimizer = bwdfuse.AdamW(model.parameters(), bwd_hook=True)
    trainer = build(model=model, bwd_hook=False, max_grad_norm=1.0, trainer_options={"optimizers": (optimizer, None)})
    with pytest.raises(ConfigError, match="bwd_hook=False, but the optimizer given to the trainer is armed"):
        trainer.train()


def test_training_stops_where_it_did_not_take_effect(build):
    """Somebody removed our callback: the first update must not pass as if nothing had happened."""
    trainer = build()
    before = copy.deepcopy(trainer.model.state_dict())

    class Removes(transformers.TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            trainer.remove_callback(BwdHookCallback)

    trainer.create_optimizer()
    trainer.callback_handler.callbacks.insert(0, Removes())
    with pytest.raises(ConfigError, match="bwd_hook=True did not take effect"):
        trainer.train()
    torch.testing.assert_close(trainer.model.state_dict(), before, rtol=0, atol=0)


def test_nothing_of_the_trainer_is_kept_alive(build):
    """A notebook that builds trainer after trainer."""
    import gc
    import weakref

    trainer = build(max_steps=2)
    trainer.train()
    kept = [weakref.ref(trainer.model), weakref.ref(trainer.optimizer.optimizer)]
    del trainer
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_hf_runs_models_are_what_the_tests_say():
    model = make_model()
    assert model.config.tie_word_embeddings and model.config.resid_pdrop == 0.1
    assert hf_runs.make_model("bfloat16").dtype == torch.bfloat16
