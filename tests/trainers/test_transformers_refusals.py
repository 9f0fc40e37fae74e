"""Every setting that cannot be honoured is refused before training, by its name, with the setting to type."""

import copy
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import hf_runs
import pytest
import torch
import transformers
from hf_runs import make_model, make_tokens, quick, settings
from transformers.training_args import OptimizerNames

from bwdfuse.errors import ConfigError
from bwdfuse.trainers.transformers import Trainer, TrainingArguments

__all__ = ["quick"]

REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
NUM_STEPS = {"gradient_accumulation_kwargs": {"num_steps": 2}}

#: what is set, what the message names, what it says to type
REFUSED = [
    ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2", "gradient_accumulation_steps=1"),
    (
        {"accelerator_config": NUM_STEPS},
        "accelerator_config['gradient_accumulation_kwargs']['num_steps']=2",
        "accelerator_config['gradient_accumulation_kwargs']['num_steps']=1",
    ),
    ({"max_grad_norm": 1.0}, "max_grad_norm=1.0", "max_grad_norm=0"),
    ({"fp16": True}, "fp16=True", "fp16=False"),
    (
        REENTRANT,
        "gradient_checkpointing_kwargs={'use_reentrant': True}",
        "gradient_checkpointing_kwargs={'use_reentrant': False}",
    ),
    ({"auto_find_batch_size": True}, "auto_find_batch_size=True", "auto_find_batch_size=False"),
    ({"deepspeed": "zero3.json"}, "deepspeed='zero3.json'", "deepspeed=None"),
    ({"optim_args": "eps=1e-6"}, "optim_args='eps=1e-6'", "optim_args=None"),
    *(
        ({"optim": name.value}, f"optim='{name.value}'", "optim='adamw_torch'")
        for name in OptimizerNames
        if name.value not in ("adamw_torch", "adamw_torch_fused")
    ),
]
IDS = [named for _, named, _ in REFUSED]

ALLOWED = [
    {},
    {"max_grad_norm": 0.0},
    {"max_grad_norm": -1.0},
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 1}}},
    {"bf16": True},
    {"optim": "adamw_torch"},
    {"optim": "adamw_torch_fused"},
    {"optim_args": ""},
]


def arguments(tmp_path, **changes):
    return TrainingArguments(**settings(tmp_path, bwd_hook=True, **changes))


def build(args, **options):
    return Trainer(make_model(), args, train_dataset=make_tokens(), **options)


def refused(action):
    with pytest.raises(ConfigError) as caught:
        action()
    return str(caught.value)


# ---- by the arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "named", "fix"), REFUSED, ids=IDS)
def test_refused_by_the_arguments(tmp_path, change, named, fix):
    text = refused(lambda: arguments(tmp_path, **change))
    assert text.splitlines()[0] == (
        f"bwd_hook=True cannot be honoured with these settings of transformers {transformers.__version__}:"
    )
    assert f"1. {named}: " in text and f"set {fix}" in text and "2. " not in text
    assert text.splitlines()[-1].strip() == fix


@pytest.mark.parametrize(("change", "named", "fix"), REFUSED, ids=IDS)
def test_refused_by_trls_arguments_too(tmp_path, change, named, fix):
    pytest.importorskip("trl")
    from bwdfuse.trainers.trl import SFTConfig

    text = refused(lambda: SFTConfig(**settings(tmp_path, bwd_hook=True, **change)))
    assert f"1. {named}: " in text and f"set {fix}" in text
    assert text.startswith("bwd_hook=True cannot be honoured with these settings of trl ")


@pytest.mark.parametrize(("change", "named", "fix"), REFUSED, ids=IDS)
def test_stock_takes_what_is_refused_here(tmp_path, change, named, fix):
    """The flag off: not a word from us, whatever transformers itself says."""
    try:
        args = TrainingArguments(**settings(tmp_path, bwd_hook=False, **change))
    except ConfigError:
        pytest.fail(f"refused {named} with bwd_hook=False")
    except (ImportError, ValueError, OSError):
        return  # transformers' own: no DeepSpeed here
    assert args.bwd_hook is False


@pytest.mark.parametrize("change", ALLOWED, ids=str)
def test_allowed(tmp_path, change):
    trainer = build(arguments(tmp_path, max_steps=1, **change))
    trainer.train()
    assert trainer.state.global_step == 1


def test_all_collisions_at_once_with_one_line_to_copy(tmp_path):
    text = refused(
        lambda: arguments(tmp_path, max_grad_norm=1.0, gradient_accumulation_steps=4, optim="lomo", fp16=True)
    )
    assert text.splitlines()[-1].strip() == (
        "max_grad_norm=0, fp16=False, gradient_accumulation_steps=1, optim='adamw_torch'"
    )
    assert "the effective batch changes from 16 to 4 samples per update" in text
    assert "or per_device_train_batch_size=16 where memory allows it (the effective batch stays 16)" in text


def test_settings_from_the_command_line_are_read_too(tmp_path):
    """There, nested settings arrive as text that transformers parses."""
    parser = transformers.HfArgumentParser(TrainingArguments)
    on = ["--output_dir", str(tmp_path), "--use_cpu", "--bwd_hook", "--max_grad_norm", "0"]
    for flags, named in [
        (["--accelerator_config", json.dumps(NUM_STEPS)], "['num_steps']=2"),
        (
            ["--gradient_checkpointing", "--gradient_checkpointing_kwargs", '{"use_reentrant": true}'],
            "'use_reentrant': True",
        ),
    ]:
        assert named in refused(lambda flags=flags: parser.parse_args_into_dataclasses(on + flags))


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_the_flag_is_true_or_false(tmp_path, value):
    text = refused(lambda: TrainingArguments(**settings(tmp_path, bwd_hook=value)))
    assert f"bwd_hook={value!r}: neither true nor false; set bwd_hook=True" in text


def test_fp16_from_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    text = refused(lambda: arguments(tmp_path))
    assert "ACCELERATE_MIXED_PRECISION='fp16'" in text and "set ACCELERATE_MIXED_PRECISION='bf16'" in text


# ---- by the trainer ------------------------------------------------------------------------------------------------

MUTATIONS = [
    ("gradient_accumulation_steps", 2),
    ("max_grad_norm", 0.5),
    ("auto_find_batch_size", True),
    ("optim", "galore_adamw"),
    ("optim_args", "rank=4"),
    ("fp16", True),
    ("deepspeed", {"zero_optimization": {"stage": 2}}),
]


@pytest.mark.parametrize(("name", "value"), MUTATIONS, ids=[name for name, _ in MUTATIONS])
@pytest.mark.parametrize("when", ["before the trainer", "before train()"])
def test_arguments_that_were_changed_later(tmp_path, name, value, when):
    args = arguments(tmp_path)
    if when == "before the trainer":
        setattr(args, name, value)
        assert f"1. {name}=" in refused(lambda: build(args))
        return
    trainer = build(args)
    setattr(args, name, value)
    before = copy.deepcopy(trainer.model.state_dict())
    assert f"1. {name}=" in refused(trainer.train)
    assert trainer.state.global_step == 0 and hf_runs.hooks_of(trainer.model) == []
    torch.testing.assert_close(trainer.model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "value"), MUTATIONS[:3], ids=[name for name, _ in MUTATIONS[:3]])
def test_arguments_that_were_changed_during_training(tmp_path, name, value):
    """Clipping switched on by a callback would silently do nothing."""

    class Changes(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                setattr(args, name, value)

    trainer = build(arguments(tmp_path), callbacks=[Changes()])
    assert f"1. {name}=" in refused(trainer.train)
    assert trainer.state.global_step == 2


def test_the_trainers_own_change_of_the_arguments(tmp_path):
    """transformers moves accelerate's number of steps into its own argument; changed in between, too."""
    args = arguments(tmp_path)
    args.accelerator_config.gradient_accumulation_kwargs = {"num_steps": 3}
    assert "1. gradient_accumulation_steps=3" in refused(lambda: build(args))


def test_checkpointing_enabled_on_the_model_itself(tmp_path):
    trainer = build(arguments(tmp_path))
    trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    text = refused(trainer.train)
    assert "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs)={'use_reentrant': True}" in text
    trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainer.args.max_steps = 1
    trainer.train()


def test_data_parallel(tmp_path):
    args = arguments(tmp_path)
    args._n_gpu = 2  # as transformers finds them
    text = refused(lambda: build(args))
    assert "n_gpu=2: nn.DataParallel" in text and "CUDA_VISIBLE_DEVICES=0" in text


def test_a_device_without_kernels(tmp_path):
    trainer = build(arguments(tmp_path))
    trainer.args.__dict__["_setup_devices"] = torch.device("meta")  # where the arguments keep their device
    text = refused(trainer.train)
    assert "1. device='meta': this bwdfuse has no kernels for that device" in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_ddp(tmp_path, ranks):
    """Under DDP the hook sees gradients before they are reduced. One rank under a launcher gets DDP as well."""
    script = tmp_path / "ddp.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(hf_runs.__file__).parent)!r})
        from hf_runs import make_model, make_tokens, settings
        from bwdfuse.errors import ConfigError
        from bwdfuse.trainers.transformers import Trainer, TrainingArguments

        args = TrainingArguments(**settings({str(tmp_path)!r}, bwd_hook=True, ddp_backend="gloo"))
        try:
            Trainer(make_model(), args, train_dataset=make_tokens()).train()
        except ConfigError as error:
            print("REFUSED", args.process_index, str(error).splitlines()[1].strip(), flush=True)
        """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300
    )
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("REFUSED"))
    assert len(lines) == ranks, done.stdout + done.stderr
    for rank, line in enumerate(lines):
        assert line.startswith(f"REFUSED {rank} 1. launcher='torchrun, processes: {ranks}': under DDP a hook sees")
        assert line.endswith("set launcher='python'.")
