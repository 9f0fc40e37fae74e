"""What a run of transformers' Trainer (or TRL's) says of itself. Knows its settings' names; changes nothing."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy

from bwdfuse._native import native
from bwdfuse.trainers.facts import Batch, Option, Sharding, TrainerFacts

#: What transformers builds from ``optim`` is torch.optim.AdamW for these alone.
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")


@dataclass(frozen=True)
class Library:
    """The package whose trainer this is, for messages: its name, its version, the oldest one we can plug into."""

    name: str
    version: str
    floor: str


TRANSFORMERS = Library("transformers", transformers.__version__, "5.5.3")


def argument_facts(args: transformers.TrainingArguments, bwd_hook: object, library: Library) -> TrainerFacts:
    """What the arguments say by themselves, also before transformers has normalised them.

    Args:
        args: The training arguments.
        bwd_hook: The flag, which stock arguments do not have.
        library: Whose trainer it is.
    """
    return TrainerFacts(
        trainer=library.name,
        version=library.version,
        version_floor=library.floor,
        syntax="arguments",
        flag=Option("bwd_hook", bwd_hook, (True, False)),
        clip_grad=_clipping(args.max_grad_norm),
        batch=Batch(
            micro=Option("per_device_train_batch_size", args.per_device_train_batch_size),
            ranks=int(os.environ.get("WORLD_SIZE", 1)),
            steps=_accumulation(args),
        ),
        batch_retry=Option("auto_find_batch_size", args.auto_find_batch_size, (False,)),
        grad_scaler=_grad_scaler(args),
        reentrant_checkpointing=_reentrant(args),
        strategy=Option("deepspeed", args.deepspeed, (None,)),
        sharding="deepspeed" if args.deepspeed else "single",
        optimizer=Option("optim", getattr(args.optim, "value", args.optim), OPTIMIZERS),
        unread_options=Option("optim_args", args.optim_args, (None, "")),
    )


def run_facts(
    args: transformers.TrainingArguments,
    bwd_hook: object,
    library: Library,
    state: AcceleratorState,
    model: torch.nn.Module,
) -> TrainerFacts:
    """What the arguments, the launcher and the model say together, once there is a trainer.

    Args:
        state: accelerate's, which knows how the processes share the model.
        model: The model as it is now; gradient checkpointing may have been enabled on it by hand.
    """
    facts = argument_facts(args, bwd_hook, library)
    plugin = getattr(state, "fsdp_plugin", None)
    if facts.sharding == "single":
        strategy, sharding = _sharding(args, state)
        facts = replace(facts, strategy=strategy, sharding=sharding)
    if facts.reentrant_checkpointing is None or facts.reentrant_checkpointing.is_allowed:
        facts = replace(facts, reentrant_checkpointing=_reentrant_in(model))
    return replace(
        facts,
        device=Option("device", args.device.type, ("cpu",)),
        device_reason=str(native().build_info()["cuda"]),
        replicas=Option("n_gpu", args.n_gpu, (1, 0)),
        offload_policy=Option("fsdp_config['cpu_offload']", _offloads(getattr(plugin, "cpu_offload", None)), (False,)),
    )


def _get(settings: Any, name: str) -> Any:
    """A nested setting, wherever transformers keeps it now: in a dict or an object; None in text it has not parsed."""
    return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)


def _clipping(max_grad_norm: float | None) -> Option:
    """Zero and below switch clipping off."""
    clips = max_grad_norm is not None and max_grad_norm > 0
    return Option("max_grad_norm", max_grad_norm, (0,) if clips else (0, max_grad_norm))


def _accumulation(args: transformers.TrainingArguments) -> Option:
    """The two places where it is set; transformers takes the second one when the first is left at 1."""
    steps = _get(_get(args.accelerator_config, "gradient_accumulation_kwargs"), "num_steps")
    if args.gradient_accumulation_steps == 1 and steps is not None:
        return Option("accelerator_config['gradient_accumulation_kwargs']['num_steps']", steps, (1,))
    return Option("gradient_accumulation_steps", args.gradient_accumulation_steps, (1,))


def _grad_scaler(args: transformers.TrainingArguments) -> Option:
    """fp16 comes as an argument or, from ``accelerate launch``, through the environment."""
    if not args.fp16 and getattr(args, "mixed_precision", None) == "fp16":
        return Option("ACCELERATE_MIXED_PRECISION", "fp16", ("bf16",))
    return Option("fp16", args.fp16, (False,))


def _reentrant(args: transformers.TrainingArguments) -> Option | None:
    """transformers >= 5 asks for the non-reentrant kind unless told otherwise."""
    asked = args.gradient_checkpointing_kwargs
    if not (args.gradient_checkpointing and isinstance(asked, Mapping) and asked.get("use_reentrant")):
        return None
    return Option("gradient_checkpointing_kwargs", asked, ({**asked, "use_reentrant": False},))


def _reentrant_in(model: torch.nn.Module) -> Option | None:
    """Checkpointing that was enabled on the model itself, where each layer keeps it as a partial function."""
    for module in model.modules():
        options = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
        if getattr(module, "gradient_checkpointing", False) and options.get("use_reentrant"):
            name = "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs)"
            return Option(name, {"use_reentrant": True}, ({"use_reentrant": False},))
    return None


def _offloads(policy: object) -> bool:
    """accelerate keeps a flag, FSDP1's CPUOffload or one of FSDP2's policies there."""
    return policy is True or isinstance(policy, CPUOffloadPolicy) or bool(getattr(policy, "offload_params", False))


def _sharding(args: transformers.TrainingArguments, state: AcceleratorState) -> tuple[Option, Sharding]:
    """How accelerate spreads the model over the processes, and the setting that decides it."""
    kind = state.distributed_type
    if kind == DistributedType.DEEPSPEED:
        return Option("ACCELERATE_USE_DEEPSPEED", "true", ("false",)), "deepspeed"
    parallel = getattr(state, "parallelism_config", None)
    if any(getattr(parallel, f"{name}_size", 1) > 1 for name in ("tp", "cp", "sp", "dp_replicate")):
        return Option("parallelism_config", parallel, (None,)), "other"
    if kind == DistributedType.FSDP:
        version = state.fsdp_plugin.fsdp_version
        return Option("fsdp_config['version']", version, (2,)), "fsdp2" if version == 2 else "fsdp1"
    if kind == DistributedType.NO:
        return Option("fsdp", args.fsdp), "single"
    if kind in (DistributedType.XLA, DistributedType.MEGATRON_LM):
        return Option("distributed_type", kind.value, ("NO",)), "other"
    if state.num_processes > 1 and args.device.type != "cpu":
        return Option("fsdp", None, (True,)), "ddp"
    # accelerate wraps one process of torchrun in DDP too, and shards on accelerators only
    return Option("launcher", f"torchrun, processes: {state.num_processes}", ("python",)), "ddp"
