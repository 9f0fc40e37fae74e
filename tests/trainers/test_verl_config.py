"""What verl's command line makes of ``optim.bwd_hook``: plain spelling, every refusal, and nothing while it is off."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bwdfuse.demo import verl_cpu

HERE = Path(__file__).parent
ENGINE = "bwdfuse.trainers._verl_engine.BwdHookFSDPEngine"
STOCK_ENGINE = "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead"
STOCK_CLASS = "verl.workers.config.optimizer.FSDPOptimizerConfig"

#: On 8 ranks, a run that can be honoured.
GOOD = [
    "optim.bwd_hook=true",
    "optim.clip_grad=null",
    "engine.strategy=fsdp2",
    "data.use_dynamic_bsz=False",
    "data.train_batch_size=32",
]
LORA_LIKE_OPTION = "+optim.override_optimizer_config.bf16_stochastic_round=True"

#: By name: what is typed on top of GOOD, and the options that the error must name, in order.
COLLISIONS = {
    "clip_grad": (["optim.clip_grad=1.0"], ["optim.clip_grad=1.0"]),
    "clip_grad 0": (["optim.clip_grad=0"], ["optim.clip_grad=0"]),
    "grad_clip, the deprecated spelling": (["+optim.grad_clip=0.5"], ["optim.grad_clip=0.5"]),
    "dynamic batch": (["data.use_dynamic_bsz=True"], ["data.use_dynamic_bsz=True"]),
    "accumulation": (["data.train_batch_size=256"], ["data.train_batch_size=256"]),
    "does not divide": (["data.train_batch_size=60"], ["data.train_batch_size=60"]),
    "too large a micro-batch": (["data.micro_batch_size_per_gpu=8"], ["data.train_batch_size=32"]),
    "sequence parallel": (["engine.ulysses_sequence_parallel_size=2"], ["data.train_batch_size=32"]),
    "fsdp1": (["engine.strategy=fsdp"], ["engine.use_orig_params=False"]),
    "fsdp_turbo": (["engine.strategy=fsdp_turbo"], ["engine.strategy=fsdp_turbo"]),
    "offload policy": (["engine.offload_policy=True"], ["engine.offload_policy=True"]),
    "parameter offload": (["engine.param_offload=True"], ["engine.param_offload=True"]),
    "fp16": (["+engine.mixed_precision={param_dtype: fp16}"], ["engine.mixed_precision.param_dtype=fp16"]),
    "fp16 parameters": (["engine.model_dtype=fp16"], ["engine.model_dtype=fp16"]),
    "quantized training": (["engine.qat.enable=True"], ["engine.qat.enable=True"]),
    "reentrant checkpointing": (["model.enable_activation_offload=True"], ["model.enable_activation_offload=True"]),
    "another optimizer": (["optim.optimizer=SGD"], ["optim.optimizer=SGD"]),
    "another package": (["optim.optimizer_impl=torchao.optim"], ["optim.optimizer_impl=torchao.optim"]),
    "capturable": (
        ["+optim.override_optimizer_config.capturable=True"],
        ["optim.override_optimizer_config.capturable=True"],
    ),
    "unknown option": ([LORA_LIKE_OPTION], ["optim.override_optimizer_config.bf16_stochastic_round=True"]),
    "nonfinite": (["optim.nonfinite=ignore"], ["optim.nonfinite=ignore"]),
    "neither true nor false": (["optim.bwd_hook=off"], ["optim.bwd_hook=off"]),
}

#: By name: a case for compose.py whose answer a test below looks at.
CASES = {
    "off": dict(overrides=[]),
    "off, ours": dict(overrides=["optim.optimizer_impl=bwdfuse.optim"]),
    "on": dict(overrides=GOOD),
    "on, ours": dict(overrides=[*GOOD, "optim.optimizer_impl=bwdfuse.optim", "optim.nonfinite=off"]),
    "on, amsgrad": dict(overrides=[*GOOD, "+optim.override_optimizer_config.amsgrad=True"]),
    "on, fsdp1": dict(overrides=[*GOOD, "engine.strategy=fsdp", "engine.use_orig_params=True"]),
    "on, with options": dict(overrides=[*GOOD, "+optim.override_optimizer_config.eps=1e-6"]),
    "on, bf16": dict(overrides=[*GOOD, "engine.model_dtype=bf16", "model.enable_gradient_checkpointing=False"]),
    "on, activation offload": dict(
        overrides=[*GOOD, "model.enable_activation_offload=True", "model.enable_gradient_checkpointing=False"]
    ),
    "defaults": dict(overrides=["optim.bwd_hook=true"]),
    "force": dict(overrides=["++optim.bwd_hook=true", *GOOD[1:]]),
    "append": dict(overrides=["+optim.bwd_hook=true"]),
    "ray": dict(
        overrides=[*GOOD, "trainer.nnodes=2", "trainer.n_gpus_per_node=4"],
        before="import os; os.environ.pop('WORLD_SIZE')",
    ),
    "old verl": dict(overrides=GOOD, before="import verl; verl.__version__ = '0.8.2'"),
    "gpu": dict(
        overrides=GOOD,
        before="from verl.plugin.platform import get_platform; type(get_platform()).device_name = 'cuda'",
    ),
    "changed verl": dict(
        overrides=GOOD,
        before="from verl.workers.engine.fsdp import FSDPEngine, FSDPEngineWithLMHead as engine\n"
        "engine.forward_step = lambda self, batch: None",
    ),
    "another plugin": dict(
        overrides=GOOD,
        before="from verl.workers.engine.fsdp import FSDPEngineWithLMHead as engine\n"
        "from verl.workers.engine.base import EngineRegistry\n"
        "class Theirs(engine): pass\n"
        "EngineRegistry.register('language_model', 'fsdp2', device='cuda', vendor='cpu')(Theirs)",
    ),
    "ppo": dict(
        overrides=["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.n=1"],
        config="ppo_trainer",
        at="actor_rollout_ref.actor.optim",
    ),
    "ppo, on": dict(
        overrides=["actor_rollout_ref.actor.optim.bwd_hook=true"], config="ppo_trainer", at="actor_rollout_ref.actor"
    ),
}


def compose(cases: list[dict], **environment: str) -> list[dict]:
    environment = {**os.environ, **verl_cpu.ENVIRONMENT, "WORLD_SIZE": "8", "PYTHONWARNINGS": "ignore", **environment}
    done = subprocess.run(
        [sys.executable, str(HERE / "compose.py")],
        input=json.dumps(cases),
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, dict]:
    """What came of every case and every collision, by name."""
    nested = tmp_path_factory.mktemp("nested")
    (nested / "mine.yaml").write_text(
        "defaults: [optim@actor.optim: fsdp]\n"
        "actor: {_target_: my.ActorConfig, optim: {bwd_hook: true}}\n"
        "hydra: {searchpath: [pkg://verl.trainer.config]}\n"
    )
    cases = {
        **CASES,
        "nested": dict(overrides=[], directory=str(nested), config="mine", at="actor.optim"),
        **{name: dict(overrides=GOOD + typed) for name, (typed, _) in COLLISIONS.items()},
    }
    return dict(zip(cases, compose(list(cases.values())), strict=True))


def sentences(answer: dict) -> list[str]:
    return [line.strip() for line in answer["error"].splitlines() if line.strip()[:1].isdigit()]


# ---- off ---------------------------------------------------------------------------------------------------------


def test_off_is_verls_own_config_and_engine(answers):
    for name in ("off", "off, ours"):
        assert answers[name]["class"] == STOCK_CLASS
        assert answers[name]["engine"] == STOCK_ENGINE


def test_off_has_every_value_of_verls_own_file(answers):
    from omegaconf import OmegaConf

    (package,) = importlib.util.find_spec("verl").submodule_search_locations
    stock = OmegaConf.load(Path(package) / "trainer/config/optim/fsdp.yaml")
    del stock["_target_"]
    fields = answers["off"]["fields"]
    assert {name: fields[name] for name in stock} == stock
    assert "bwd_hook" not in fields


def test_the_ppo_trainer_is_left_alone(answers):
    assert answers["ppo"]["class"] == STOCK_CLASS
    assert not {"bwd_hook", "nonfinite", "bwd_hook_facts"} & set(answers["ppo"]["keys"])
    assert "Could not override 'actor_rollout_ref.actor.optim.bwd_hook'" in answers["ppo, on"]["error"]


# ---- on ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("on")] + ["force", "ray"])
def test_on_takes_effect(answers, name):
    answer = answers[name]
    assert "error" not in answer, answer["error"]
    assert answer["engine"] == ENGINE
    assert answer["fields"]["optimizer_impl"] == "bwdfuse.optim"
    assert answer["fields"]["clip_grad"] is None


def test_options_reach_the_optimizer(answers):
    assert answers["on"]["fields"]["override_optimizer_config"] == {"nonfinite": "skip"}
    assert answers["on, ours"]["fields"]["override_optimizer_config"] == {"nonfinite": "off"}
    assert answers["on, with options"]["fields"]["override_optimizer_config"] == {"eps": 1e-6, "nonfinite": "skip"}


def test_append_is_answered_by_hydra(answers):
    assert "An item is already at 'optim.bwd_hook'" in answers["append"]["error"]


# ---- refusals ----------------------------------------------------------------------------------------------------


def test_verls_defaults_collide_in_four_sentences(answers):
    """verl's own defaults on 8 ranks: this text is the first that most users see."""
    assert [sentence.split(":")[0] for sentence in sentences(answers["defaults"])] == [
        "1. engine.use_orig_params=False",
        "2. optim.clip_grad=1.0",
        "3. data.use_dynamic_bsz=True",
        "4. data.train_batch_size=256",
    ]
    assert "the effective batch changes from 256 to 32 samples per update" in answers["defaults"]["error"]
    assert answers["defaults"]["advice"] == [
        "engine.use_orig_params=True",
        "optim.clip_grad=null",
        "data.use_dynamic_bsz=False",
        "data.train_batch_size=32",
        "data.micro_batch_size_per_gpu=4",
    ]


@pytest.mark.parametrize("name", COLLISIONS)
def test_each_collision_is_one_sentence_that_names_it(answers, name):
    assert answers[name]["type"] == "VerlConfigError"
    found = [sentence.split(": ")[0].split(" ", 1)[1] for sentence in sentences(answers[name])]
    assert found == COLLISIONS[name][1]


@pytest.mark.parametrize("name", ["defaults", *COLLISIONS])
def test_what_an_error_says_to_type_mends_it(answers, name):
    mended = answers[name]["mended"]
    assert "error" not in mended, mended.get("error")
    assert mended["engine"] == ENGINE


def test_only_sft_is_served(answers):
    (sentence,) = sentences(answers["nested"])
    assert "in verl only SFT makes one backward per update, and this is part of my.ActorConfig" in sentence


def test_too_old_a_verl(answers):
    assert "verl 0.8.2 is too old to plug into; run: pip install 'verl>=0.9'." in answers["old verl"]["error"]


def test_a_device_without_kernels(answers):
    assert "trainer.device=cuda: this bwdfuse has no kernels for that device (CPU-only build" in answers["gpu"]["error"]


def test_a_verl_whose_engine_changed_is_not_trained_with_dead_guards(answers):
    assert "forward_step() of verl 0.9.1's FSDP engine is not the one" in answers["changed verl"]["error"]


def test_another_plugins_engine_is_not_pushed_aside(answers):
    assert "Theirs is registered for this device" in answers["another plugin"]["error"]


# ---- the flag can never be lost on the way -----------------------------------------------------------------------


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **verl_cpu.ENVIRONMENT, "PYTHONWARNINGS": "ignore", **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)


def test_importing_verl_stays_cheap_and_silent():
    code = (
        "import sys, verl\n"
        "assert 'bwdfuse.trainers.verl' in sys.modules\n"
        "heavy = [m for m in ('bwdfuse.optim', 'bwdfuse._C', 'bwdfuse.trainers._verl_engine', 'verl.workers.engine')"
        " if m in sys.modules]\n"
        "print(heavy)\n"
    )
    done = python(code)
    assert done.stdout.strip() == "[]", done.stderr
    assert "bwdfuse" not in done.stderr


def test_a_plugin_that_cannot_load_says_so_and_leaves_verl_alive():
    """verl hides the error; Hydra would then call a flag unknown that the user has installed."""
    done = python("import sys; sys.modules['hydra.plugins.search_path_plugin'] = None\nimport verl; print('alive')")
    assert done.stdout.strip() == "alive", done.stderr
    assert "bwdfuse could not plug into verl, so optim.bwd_hook will be unknown: ModuleNotFoundError" in done.stderr


def test_without_plugins_no_spelling_of_the_flag_is_accepted():
    flags = ["optim.bwd_hook=true", "+optim.bwd_hook=true", "++optim.bwd_hook=true"]
    plain, *added = compose([dict(overrides=[flag]) for flag in flags], VERL_USE_EXTERNAL_PLUGINS="none")
    assert "Could not override 'optim.bwd_hook'" in plain["error"]
    for answer in added:
        assert "unexpected keyword argument 'bwd_hook'" in answer["error"]


def test_naming_the_module_does_what_the_entry_point_does():
    named = f"{verl_cpu.ENVIRONMENT['VERL_USE_EXTERNAL_MODULES']},bwdfuse.trainers.verl"
    without_entry_points = dict(VERL_USE_EXTERNAL_PLUGINS="none", VERL_USE_EXTERNAL_MODULES=named)
    (answer,) = compose([dict(overrides=GOOD)], **without_entry_points)
    assert answer["engine"] == ENGINE


def test_collisions_stop_the_real_command_before_data_and_model(trainer):
    run = trainer("collisions", "optim.bwd_hook=true", "engine.strategy=fsdp", "data.use_dynamic_bsz=True")
    assert run.returncode != 0
    for setting in (
        "set engine.use_orig_params=True, or engine.strategy=fsdp2",
        "set optim.clip_grad=null",
        "set data.use_dynamic_bsz=False",
    ):
        assert setting in run.log
    assert "dataset len" not in run.log and "Loading weights" not in run.log
    assert "Traceback" not in run.log.split("optim.bwd_hook=True cannot be honoured")[0]


def test_settings_that_arrive_in_another_process_bring_their_engine(answers):
    """verl's Ray trainer builds the settings in one process and the engine in another."""
    code = (
        "import pickle, verl\n"
        f"optim = pickle.loads(bytes.fromhex('{answers['on']['pickle']}'))\n"
        "from verl.workers.engine.base import EngineRegistry\n"
        "print(optim.bwd_hook, EngineRegistry.get_engine_cls('language_model', 'fsdp2').__name__)\n"
    )
    done = python(code)
    assert done.stdout.strip() == "True BwdHookFSDPEngine", done.stderr
