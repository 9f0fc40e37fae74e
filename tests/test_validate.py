"""Every refusal: what it refuses, what it leaves alone, and that its sentence can be acted on."""

import subprocess
import sys
from dataclasses import replace

import pytest

from bwdfuse import validate
from bwdfuse.config import BwdHookConfig
from bwdfuse.errors import ConfigError
from bwdfuse.trainers.facts import Batch, Option, TrainerFacts

ON = BwdHookConfig(bwd_hook=True)

#: A run of a trainer with overrides (verl's spelling) that can be honoured, with every setting it has.
GOOD = TrainerFacts(
    trainer="verl",
    version="0.9.1",
    version_floor="0.9",
    flag=Option("optim.bwd_hook", True, (True, False)),
    nonfinite=Option("optim.nonfinite", "skip"),
    loop=Option("loop", "SFT", ("SFT",)),
    device=Option("trainer.device", "cpu", ("cpu",)),
    device_reason="a CPU-only build",
    clip_grad=Option("optim.clip_grad", None, (None,)),
    dynamic_batch=Option("data.use_dynamic_bsz", False, (False,)),
    batch=Batch(micro=Option("data.micro", 4), ranks=8, total=Option("data.total", 32)),
    grad_scaler=Option("engine.param_dtype", "bf16", ("bf16", "fp32")),
    param_dtype=Option("engine.model_dtype", "fp32", ("fp32", "bf16")),
    reentrant_checkpointing=Option("model.activation_offload", False, (False,)),
    strategy=Option("engine.strategy", "fsdp2", ("fsdp2",)),
    sharding="fsdp2",
    orig_params=Option("engine.use_orig_params", False, (True,)),
    offload_policy=Option("engine.offload_policy", False, (False,)),
    param_offload=Option("engine.param_offload", False, (False,)),
    quantized_training=Option("engine.qat.enable", False, (False,)),
    pipeline_parallel=Option("engine.pipeline", 1, (1,)),
    optimizer=Option("optim.optimizer", "AdamW", ("AdamW",)),
    optimizer_impl=Option("optim.optimizer_impl", "torch.optim", ("bwdfuse.optim", "torch.optim")),
    optimizer_options={"eps": Option("optim.options.eps", 1e-6), "amsgrad": Option("optim.options.amsgrad", False)},
)

#: The same for a trainer that takes Python arguments (the spelling of transformers).
GOOD_ARGUMENTS = TrainerFacts(
    trainer="trl",
    syntax="arguments",
    flag=Option("bwd_hook", True, (True, False)),
    clip_grad=Option("max_grad_norm", 0.0, (0, None)),
    batch=Batch(
        micro=Option("per_device_train_batch_size", 2),
        ranks=4,
        steps=Option("gradient_accumulation_steps", 1, (1,)),
    ),
    batch_retry=Option("auto_find_batch_size", False, (False,)),
    replicas=Option("n_gpu", 1, (1,)),
    unread_options=Option("optim_args", None, (None, "")),
    grad_scaler=Option("fp16", False, (False,)),
    strategy=Option("distributed_type", "NO", ("FSDP2",)),
)


def changed(facts: TrainerFacts, **options: object) -> TrainerFacts:
    """The facts with some options set to another value."""
    fields = {}
    for name, value in options.items():
        option = getattr(facts, name)
        fields[name] = replace(option, value=value) if isinstance(option, Option) else value
    return replace(facts, **fields)


def message(facts: TrainerFacts, config: BwdHookConfig = ON) -> str:
    with pytest.raises(ConfigError) as caught:
        validate.check(config, facts)
    return str(caught.value)


def sentences(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()[0].isdigit()]


def test_good_settings_pass():
    validate.check(ON, GOOD)
    validate.check(ON, GOOD_ARGUMENTS)


def test_nothing_is_checked_while_the_flag_is_off():
    validate.check(BwdHookConfig(bwd_hook=False, nonfinite="nonsense"), changed(GOOD, clip_grad=1.0, sharding="ddp"))


#: what changes, what the sentence names, what it says to type
ONE_OPTION = [
    (dict(clip_grad=1.0), "optim.clip_grad=1.0", "optim.clip_grad=null"),
    (dict(clip_grad=0), "optim.clip_grad=0", "optim.clip_grad=null"),
    (dict(dynamic_batch=True), "data.use_dynamic_bsz=True", "data.use_dynamic_bsz=False"),
    (dict(grad_scaler="fp16"), "engine.param_dtype=fp16", "engine.param_dtype=bf16"),
    (dict(param_dtype="fp16"), "engine.model_dtype=fp16", "engine.model_dtype=fp32"),
    (dict(reentrant_checkpointing=True), "model.activation_offload=True", "model.activation_offload=False"),
    (dict(strategy="ddp", sharding="ddp"), "engine.strategy=ddp", "engine.strategy=fsdp2"),
    (dict(strategy="fsdp", sharding="fsdp1"), "engine.use_orig_params=False", "engine.use_orig_params=True"),
    (dict(strategy="deepspeed", sharding="deepspeed"), "engine.strategy=deepspeed", "engine.strategy=fsdp2"),
    (dict(strategy="fsdp_turbo", sharding="other"), "engine.strategy=fsdp_turbo", "engine.strategy=fsdp2"),
    (dict(offload_policy=True), "engine.offload_policy=True", "engine.offload_policy=False"),
    (dict(param_offload=True), "engine.param_offload=True", "engine.param_offload=False"),
    (dict(quantized_training=True), "engine.qat.enable=True", "engine.qat.enable=False"),
    (dict(pipeline_parallel=2), "engine.pipeline=2", "engine.pipeline=1"),
    (dict(optimizer="Adam"), "optim.optimizer=Adam", "optim.optimizer=AdamW"),
    (dict(optimizer_impl="torchao.optim"), "optim.optimizer_impl=torchao.optim", "optim.optimizer_impl=bwdfuse.optim"),
]


@pytest.mark.parametrize(("change", "named", "fix"), ONE_OPTION, ids=[named for _, named, _ in ONE_OPTION])
def test_one_option(change, named, fix):
    text = message(changed(GOOD, **change))
    (sentence,) = sentences(text)
    assert named in sentence and f"set {fix}" in sentence and sentence.endswith(".")
    assert text.splitlines()[-1].split() == [fix]


@pytest.mark.parametrize(
    ("facts", "named", "fix"),
    [
        (changed(GOOD_ARGUMENTS, clip_grad=1.0), "max_grad_norm=1.0", "max_grad_norm=0"),
        (changed(GOOD_ARGUMENTS, batch_retry=True), "auto_find_batch_size=True", "auto_find_batch_size=False"),
        (changed(GOOD_ARGUMENTS, grad_scaler=True), "fp16=True", "fp16=False"),
        (changed(GOOD_ARGUMENTS, unread_options="eps=1"), "optim_args='eps=1'", "optim_args=None"),
        (changed(GOOD_ARGUMENTS, strategy="DDP", sharding="ddp"), "distributed_type='DDP'", "distributed_type='FSDP2'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_option_of_a_trainer_with_arguments(facts, named, fix):
    (sentence,) = sentences(message(facts))
    assert named in sentence and f"set {fix}" in sentence


def test_several_devices_in_one_process():
    """No argument says how many devices a process sees, so there is nothing to copy into a line of settings."""
    text = message(changed(GOOD_ARGUMENTS, replicas=2))
    assert "n_gpu=2: nn.DataParallel" in text and "CUDA_VISIBLE_DEVICES=0" in text and "All of it" not in text


def test_fsdp1_says_why_and_names_both_ways_out():
    flat = changed(GOOD, strategy="fsdp", sharding="fsdp1")
    said = message(flat)
    assert "one flat gradient per module, not yet reduced" in said
    assert "set engine.use_orig_params=True, or engine.strategy=fsdp2 (either way only one module's gradient" in said
    validate.check(ON, changed(flat, orig_params=True))
    assert "FSDP1 is not supported in verl yet; set engine.strategy=fsdp2" in message(replace(flat, orig_params=None))


# ---- accumulation ------------------------------------------------------------------------------------------------


def batch_of(total: object, micro: object, ranks: int) -> TrainerFacts:
    return replace(GOOD, batch=Batch(micro=Option("data.micro", micro), ranks=ranks, total=Option("data.total", total)))


@pytest.mark.parametrize(("total", "micro", "ranks"), [(8, 4, 2), (32, 4, 8), (4, 4, 1)])
def test_one_micro_batch_per_update_passes(total, micro, ranks):
    validate.check(ON, batch_of(total, micro, ranks))


def test_derived_accumulation_gives_both_ways_out_with_the_numbers():
    text = message(batch_of(256, 4, 8))
    assert "data.total=256: with data.micro=4 on 8 ranks one update takes 8 backward passes" in text
    assert "set data.total=32 (the effective batch changes from 256 to 32 samples per update)" in text
    assert "or data.micro=32 where memory allows it (the effective batch stays 256)" in text
    assert text.splitlines()[-1].split() == ["data.total=32", "data.micro=4"]
    validate.check(ON, batch_of(32, 4, 8))
    validate.check(ON, batch_of(256, 32, 8))


@pytest.mark.parametrize(("total", "micro", "ranks", "fix"), [(8, 3, 2, 6), (4, 4, 2, 8), (9, 2, 4, 8)])
def test_sizes_that_do_not_divide(total, micro, ranks, fix):
    text = message(batch_of(total, micro, ranks))
    assert f"{total} samples do not divide into micro-batches of {micro} on {ranks} ranks" in text
    assert f"set data.total={fix} (the effective batch changes from {total} to {fix} samples per update)" in text
    assert ("where memory allows it" in text) == (total % ranks == 0)


@pytest.mark.parametrize(("total", "micro"), [(None, 4), (8, None), (0, 4), (8, -1), (True, 4), ("8", 4)])
def test_unknown_sizes_are_not_guessed(total, micro):
    text = message(batch_of(total, micro, 2))
    assert "how many backward passes one update takes is not known" in text
    assert f"data.total={'null' if total is None else total}" in text


def test_explicit_accumulation():
    batch = GOOD_ARGUMENTS.batch
    facts = replace(GOOD_ARGUMENTS, batch=replace(batch, steps=replace(batch.steps, value=8)))
    text = message(facts)
    assert "gradient_accumulation_steps=8: each of these backward passes would step every parameter" in text
    assert "set gradient_accumulation_steps=1 (the effective batch changes from 64 to 8 samples per update)" in text
    assert "or per_device_train_batch_size=16 where memory allows it (the effective batch stays 64)" in text


# ---- optimizer options -------------------------------------------------------------------------------------------


def options(**values: object) -> TrainerFacts:
    named = {key: Option(f"optim.options.{key}", value) for key, value in values.items()}
    return replace(GOOD, optimizer_options=named)


def test_options_that_change_no_meaning_pass():
    validate.check(ON, options(lr=1.0, betas=[0.9, 0.99], eps=1e-6, weight_decay=0, maximize=True))
    validate.check(ON, options(amsgrad=True, state_dtype="bfloat16"))
    validate.check(ON, options(amsgrad=False, capturable=False, differentiable=False, foreach=False, fused=True))


@pytest.mark.parametrize("name", ["capturable", "differentiable"])
def test_options_the_rule_does_not_have(name):
    text = message(options(**{name: True}))
    assert f"optim.options.{name}=True: bwdfuse.optim cannot do that; set optim.options.{name}=False" in text


def test_foreach_is_unset_with_null():
    assert message(options(foreach=True)).splitlines()[-1].split() == ["optim.options.foreach=null"]


def test_unknown_options_are_refused_by_name_and_all_at_once():
    text = message(options(bf16_stochastic_round=True, capturable=True))
    assert "optim.options.bf16_stochastic_round=True: bwdfuse.optim has no such option; leave it out" in text
    assert text.splitlines()[-1].split() == ["~optim.options.bf16_stochastic_round", "optim.options.capturable=False"]


# ---- what comes alone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["yes", "off", 1, 0, None])
def test_the_flag_must_be_true_or_false(value):
    text = message(changed(GOOD, clip_grad=1.0), BwdHookConfig(bwd_hook=value))
    assert len(sentences(text)) == 1
    assert f"optim.bwd_hook={'null' if value is None else value}: neither true nor false" in text


@pytest.mark.parametrize("version", ["0.8.0", "0.8", "0.8.0.dev3", "0.7rc1"])
def test_too_old_a_trainer(version):
    text = message(replace(changed(GOOD, clip_grad=1.0), version=version))
    assert f"verl {version} is too old to plug into; run: pip install 'verl>=0.9'." in text
    assert len(sentences(text)) == 1


@pytest.mark.parametrize("version", ["0.9", "0.9.0.dev0", "0.10.0", "1.0", None])
def test_a_trainer_that_is_new_enough(version):
    validate.check(ON, replace(GOOD, version=version))


def test_other_loops():
    text = message(changed(GOOD, loop="part of FSDPActorConfig", clip_grad=1.0))
    assert len(sentences(text)) == 1
    assert "in verl only SFT makes one backward per update, and this is part of FSDPActorConfig" in text
    assert text.splitlines()[-1].split() == ["optim.bwd_hook=False"]


def test_a_device_without_kernels():
    text = message(changed(GOOD, device="cuda"))
    assert "trainer.device=cuda: this bwdfuse has no kernels for that device (a CPU-only build)" in text


def test_nonfinite_policy():
    for policy in ("off", "skip", "raise"):
        validate.check(replace(ON, nonfinite=policy), GOOD)
    text = message(GOOD, replace(ON, nonfinite="ignore"))
    assert "optim.nonfinite=ignore: not one of off, skip, raise; set optim.nonfinite=off" in text


# ---- the whole ---------------------------------------------------------------------------------------------------


def test_all_collisions_at_once_with_one_line_to_copy():
    facts = changed(batch_of(256, 4, 8), clip_grad=1.0, dynamic_batch=True, strategy="fsdp", sharding="fsdp1")
    text = message(facts)
    assert text.splitlines()[0] == "optim.bwd_hook=True cannot be honoured with these settings of verl 0.9.1:"
    assert [sentence.split(":")[0] for sentence in sentences(text)] == [
        "1. engine.use_orig_params=False",
        "2. optim.clip_grad=1.0",
        "3. data.use_dynamic_bsz=True",
        "4. data.total=256",
    ]
    assert text.splitlines()[-1].strip() == (
        "engine.use_orig_params=True optim.clip_grad=null data.use_dynamic_bsz=False data.total=32 data.micro=4"
    )


def test_arguments_are_joined_as_arguments():
    text = message(changed(GOOD_ARGUMENTS, clip_grad=1.0, grad_scaler=True))
    assert text.splitlines()[-1].strip() == "max_grad_norm=0, fp16=False"


def test_every_refusal_is_reached_by_this_file():
    """A refusal that nothing here provokes would be a refusal that nothing tests."""
    facts = replace(
        changed(
            GOOD,
            clip_grad=1.0,
            dynamic_batch=True,
            grad_scaler="fp16",
            param_dtype="fp16",
            reentrant_checkpointing=True,
            offload_policy=True,
            param_offload=True,
            quantized_training=True,
            pipeline_parallel=2,
            optimizer="SGD",
            optimizer_impl="torchao.optim",
        ),
        batch=Batch(Option("micro", 1), 1, total=Option("total", 2), steps=Option("steps", 2, (1,))),
        batch_retry=Option("retry", True, (False,)),
        optimizer_options={"nesterov": Option("nesterov", True)},
        unread_options=Option("optim_args", "eps=1", (None,)),
        replicas=Option("n_gpu", 2, (1,)),
    )
    bad = replace(ON, nonfinite="ignore")
    reached = {refuse.__name__ for refuse in validate.REFUSALS if refuse(bad, facts)}
    for sharding in ("ddp", "fsdp1", "deepspeed", "other"):
        sharded = changed(facts, strategy="x", sharding=sharding)
        reached |= {refuse.__name__ for refuse in validate.REFUSALS if refuse(bad, sharded)}
    assert reached == {refuse.__name__ for refuse in validate.REFUSALS}


def test_imports_without_torch():
    """The whole of it must be usable where torch is not installed."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from bwdfuse import validate\n"
        "from bwdfuse.config import BwdHookConfig\n"
        "from bwdfuse.trainers.facts import Option, TrainerFacts\n"
        "facts = TrainerFacts('t', Option('bwd_hook', True), clip_grad=Option('clip', 1.0, (None,)))\n"
        "try: validate.check(BwdHookConfig(True), facts)\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "clip=1.0" in done.stdout
