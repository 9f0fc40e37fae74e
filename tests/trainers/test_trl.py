"""Real TRL on a model made from scratch: on = off bit for bit, and equal to stock through the kernel seam."""

import dataclasses

import hf_runs
import pytest
import torch
from hf_runs import PRECISIONS, TrueNorm, finish, make_model, make_texts, make_tokenizer, quick, settings, torch_kernel

import bwdfuse
from bwdfuse.errors import AccumulationError, ConfigError

trl = pytest.importorskip("trl")

from bwdfuse.trainers.transformers import TrainingArguments, find_optimizer  # noqa: E402
from bwdfuse.trainers.trl import SFTConfig, SFTTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
__all__ = ["quick", "torch_kernel"]


@pytest.fixture(scope="module")
def texts():
    return make_texts()


@pytest.fixture
def train(texts, tmp_path):
    """Trains with TRL's own classes or ours, from the same weights."""

    def run(config_class, trainer_class, precision="float32", *, resume=None, trainer_options=None, **changes):
        args = config_class(**settings(tmp_path, precision, **changes))
        options = trainer_options(args) if callable(trainer_options) else trainer_options or {}
        trainer = trainer_class(
            make_model(precision), args=args, train_dataset=texts, processing_class=make_tokenizer(), **options
        )
        return finish(trainer, resume_from_checkpoint=resume)

    return run


def native_kernel(args):
    """bwdfuse.AdamW in a trainer whose flag is off: the same kernels, stepped by step()."""
    return {"optimizer_cls_and_kwargs": (bwdfuse.AdamW, hf_runs.hyperparameters(args))}


def assert_same(a, b):
    assert len(a.losses) == len(b.losses)
    assert a.losses == b.losses
    assert a.rates == b.rates
    torch.testing.assert_close(a.weights, b.weights, rtol=0, atol=0)
    torch.testing.assert_close(a.state, b.state, rtol=0, atol=0)


# ---- what it computes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_on_equals_off_bit_for_bit(train, precision):
    off = train(SFTConfig, SFTTrainer, precision, trainer_options=native_kernel)
    on = train(SFTConfig, SFTTrainer, precision, bwd_hook=True)
    assert_same(on, off)
    assert len(on.losses) == 24 and on.rates[0] == 0.0 and max(on.rates) == 5e-3 and on.losses[-1] < on.losses[0]
    stats = find_optimizer(on.trainer.optimizer)[0].stats()
    params = sum(1 for _ in on.trainer.model.parameters())
    assert (stats["updates"], stats["param_steps"], stats["native_steps"]) == (24, 24 * params, 24 * params)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optim", hf_runs.KERNELS)
def test_equals_stock_with_torchs_kernel(train, torch_kernel, precision, optim):
    true_norm = TrueNorm()
    stock = train(trl.SFTConfig, trl.SFTTrainer, precision, optim=optim, trainer_options={"callbacks": [true_norm]})
    torch_kernel(optim)
    ours = train(SFTConfig, SFTTrainer, precision, optim=optim, bwd_hook=True)
    assert_same(ours, stock)
    # Ours is summed in double; what stock logs is the norm of norms that are rounded to the gradients' own format.
    assert ours.norms == pytest.approx(true_norm.norms, rel=1e-12)
    assert ours.norms == pytest.approx(stock.norms, rel=2**-7 if precision == "bfloat16" else 2**-20)
    assert min(ours.norms) > 0


def test_flag_off_is_the_stock_trainer(train, tmp_path):
    """Files and all: everything but the class that the arguments are pickled as."""

    def files(config_class, trainer_class):
        run = train(config_class, trainer_class, save_strategy="steps", save_steps=12)
        checkpoint = tmp_path / "checkpoint-12"
        names = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")
        return run, {name: (checkpoint / name).read_bytes() for name in names}

    stock, stock_files = files(trl.SFTConfig, trl.SFTTrainer)
    ours, our_files = files(SFTConfig, SFTTrainer)
    assert_same(ours, stock)
    assert ours.norms == stock.norms
    assert our_files == stock_files
    assert type(ours.trainer.optimizer.optimizer) is torch.optim.AdamW
    without = {key: value for key, value in ours.trainer.args.to_dict().items() if key != "bwd_hook"}
    assert without == stock.trainer.args.to_dict()


def test_lora(train, torch_kernel):
    peft = pytest.importorskip("peft")

    def lora(args):
        return {"peft_config": peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)}

    stock = train(trl.SFTConfig, trl.SFTTrainer, trainer_options=lora)
    torch_kernel("adamw_torch_fused")
    ours = train(SFTConfig, SFTTrainer, trainer_options=lora, bwd_hook=True)
    assert_same(ours, stock)
    assert 0 < len(ours.state) < 10


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_resume_in_every_direction(train, torch_kernel, tmp_path, precision):
    """Half of the run here, half there, equal to stock without a break, through torch's own kernel."""
    torch_kernel("adamw_torch")
    sides = {
        "stock": (trl.SFTConfig, trl.SFTTrainer, {}),
        "on": (SFTConfig, SFTTrainer, {"bwd_hook": True}),
        "off": (SFTConfig, SFTTrainer, {"trainer_options": native_kernel}),
    }

    def run(side, folder, **options):
        config_class, trainer_class, flag = sides[side]
        place = {"output_dir": str(tmp_path / folder), "optim": "adamw_torch"}
        return train(config_class, trainer_class, precision, **place, **flag, **options)

    whole = {side: run(side, side, save_strategy="steps", save_steps=12) for side in sides}["stock"]
    for first, second in [("on", "on"), ("stock", "on"), ("on", "stock"), ("on", "off"), ("off", "on")]:
        resumed = run(second, f"{first}-{second}", resume=str(tmp_path / first / "checkpoint-12"))
        assert resumed.losses[-12:] == whole.losses[-12:]
        assert resumed.rates[-12:] == whole.rates[-12:]
        torch.testing.assert_close(resumed.weights, whole.weights, rtol=0, atol=0)
        torch.testing.assert_close(resumed.state, whole.state, rtol=0, atol=0)


def test_resume_with_the_native_kernel(train, tmp_path):
    whole = train(SFTConfig, SFTTrainer, bwd_hook=True, save_strategy="steps", save_steps=12)
    resumed = train(SFTConfig, SFTTrainer, bwd_hook=True, resume=str(tmp_path / "checkpoint-12"))
    torch.testing.assert_close(resumed.weights, whole.weights, rtol=0, atol=0)
    torch.testing.assert_close(resumed.state, whole.state, rtol=0, atol=0)


# ---- arguments -----------------------------------------------------------------------------------------------------


def test_general_arguments_become_trls_own(texts, tmp_path):
    """As in TRL, whose own conversion would not know the field."""
    args = TrainingArguments(**settings(tmp_path, bwd_hook=True, max_steps=2))
    trainer = SFTTrainer(make_model(), args=args, train_dataset=texts, processing_class=make_tokenizer())
    assert isinstance(trainer.args, SFTConfig) and trainer.args.bwd_hook is True
    assert trainer.args.learning_rate == args.learning_rate
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_the_field_survives_trls_parser(tmp_path):
    """TrlParser, command line and YAML, is how TRL's scripts read it."""
    on = ["--bwd_hook", "--max_grad_norm", "0", "--output_dir", str(tmp_path), "--use_cpu", "True"]
    (args,) = trl.TrlParser(SFTConfig).parse_args_and_config(on)
    assert args.bwd_hook is True and SFTConfig(**args.to_dict()).bwd_hook is True
    (tmp_path / "sft.yaml").write_text(f"bwd_hook: true\nmax_grad_norm: 0\nuse_cpu: true\noutput_dir: {tmp_path}\n")
    (args,) = trl.TrlParser(SFTConfig).parse_args_and_config(["--config", str(tmp_path / "sft.yaml")])
    assert args.bwd_hook is True
    (args,) = trl.TrlParser(SFTConfig).parse_args_and_config(on[3:])
    assert args.bwd_hook is False


def test_trls_defaults_need_one_setting(tmp_path):
    """Its gradient checkpointing and bf16 are fine; its clipping is not."""
    with pytest.raises(ConfigError) as caught:
        SFTConfig(output_dir=str(tmp_path), use_cpu=True, bwd_hook=True)
    assert str(caught.value).splitlines() == [
        f"bwd_hook=True cannot be honoured with these settings of trl {trl.__version__}:",
        "  1. max_grad_norm=1.0: the norm of all gradients is known only after backward, when each is already used and "
        "freed; set max_grad_norm=0 (the norm is still reported).",
        "All of it in one line:",
        "  max_grad_norm=0",
    ]
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bwd_hook=True, max_grad_norm=0)
    assert args.gradient_checkpointing and args.bf16


def test_arguments_keep_what_stock_hides(tmp_path):
    args = TrainingArguments(**settings(tmp_path, hub_token="secret"))
    assert "secret" not in repr(args) and "secret" not in str(args)
    assert [field.name for field in dataclasses.fields(SFTConfig)][-1] == "bwd_hook"


# ---- while it runs -------------------------------------------------------------------------------------------------


def test_undeclared_accumulation_raises_and_a_checkpoint_heals_it(texts, tmp_path):
    """A second backward in one update: found by the guard, before anything is stepped twice."""

    class Twice(SFTTrainer):
        twice_at = 14

        def training_step(self, model, inputs, *args, **kwargs):
            if self.state.global_step == self.twice_at:
                super().training_step(model, dict(inputs), *args, **kwargs)
            return super().training_step(model, inputs, *args, **kwargs)

    def build():
        args = SFTConfig(**settings(tmp_path, bwd_hook=True, save_strategy="steps", save_steps=12))
        return Twice(make_model(), args=args, train_dataset=texts, processing_class=make_tokenizer())

    whole = build()
    whole.twice_at = None
    whole.train()

    trainer = build()
    with pytest.raises(AccumulationError, match="second gradient"):
        trainer.train()
    steps = {int(entry["step"]) for entry in find_optimizer(trainer.optimizer)[0].state.values()}
    assert steps == {15}
    assert hf_runs.hooks_of(trainer.model) == []
    with pytest.raises(AccumulationError):
        trainer.train()
    trainer.twice_at = None
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    torch.testing.assert_close(trainer.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
