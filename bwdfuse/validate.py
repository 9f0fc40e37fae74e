"""Every reason not to step inside backward: one small function each, from a trainer's facts to one sentence.

Pure: no torch, no trainer, no I/O. A new refusal is one function and one line in :data:`REFUSALS`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bwdfuse.config import NONFINITE_POLICIES, BwdHookConfig
from bwdfuse.errors import ConfigError
from bwdfuse.trainers.facts import Batch, Option, TrainerFacts

#: As a setting's value: take the setting away instead of changing it.
REMOVE = object()

#: Keyword arguments of ``bwdfuse.optim``'s classes that a trainer may pass on, with the values they can honour (None: any).
OPTIMIZER_OPTIONS: dict[str, tuple[object, ...] | None] = {
    "lr": None,
    "betas": None,
    "eps": None,
    "weight_decay": None,
    "maximize": None,
    "amsgrad": None,
    "state_dtype": None,
    "capturable": (False,),
    "differentiable": (False,),
    "foreach": (None, False),
    "fused": None,
}


@dataclass(frozen=True)
class Refusal:
    """One collision.

    Args:
        sentence: Names the option and its value, says why it cannot be and what to set instead.
        settings: What to set instead, as (name, value).
    """

    sentence: str
    settings: tuple[tuple[str, object], ...] = ()


def check(config: BwdHookConfig, facts: TrainerFacts) -> None:
    """Raises one :class:`ConfigError` that lists everything that keeps ``config`` from being honoured.

    Does nothing where stepping inside backward is off.
    """
    if config.bwd_hook is False:
        return
    found = refusals(config, facts)
    if found:
        raise ConfigError(_message(facts, found))


def refusals(config: BwdHookConfig, facts: TrainerFacts) -> list[Refusal]:
    """All collisions, in the order of :data:`REFUSALS`; one of :data:`GATES` comes alone, the rest would be noise."""
    for refuse in GATES:
        if refusal := refuse(config, facts):
            return [refusal]
    return [refusal for refuse in REFUSALS if (refusal := refuse(config, facts))]


# ---- what the user asked for -------------------------------------------------------------------------------------


def flag(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    if isinstance(config.bwd_hook, bool):
        return None
    asked, fix = Option(facts.flag.name, config.bwd_hook), (facts.flag.name, True)
    return Refusal(f"{_named(facts, asked)}: neither true nor false; set {_setting(facts, *fix)}.", (fix,))


def version(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    if not (facts.version and facts.version_floor) or _release(facts.version) >= _release(facts.version_floor):
        return None
    package = f"{facts.trainer}>={facts.version_floor}"
    return Refusal(f"{facts.trainer} {facts.version} is too old to plug into; run: pip install '{package}'.")


def loop(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    if facts.loop is None or facts.loop.is_allowed:
        return None
    known = " or ".join(str(name) for name in facts.loop.allowed)
    return Refusal(
        f"{facts.flag.name}={_value(facts, facts.flag.value)}: in {facts.trainer} only {known} makes one backward per "
        f"update, and this is {facts.loop.value}; set {_setting(facts, facts.flag.name, False)}.",
        ((facts.flag.name, False),),
    )


def nonfinite(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    name = facts.nonfinite.name if facts.nonfinite else "nonfinite"
    policies = ", ".join(NONFINITE_POLICIES)
    return _refusal(facts, Option(name, config.nonfinite, NONFINITE_POLICIES), f"not one of {policies}")


def device(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    if facts.device is None or facts.device.is_allowed:
        return None
    return Refusal(
        f"{_named(facts, facts.device)}: this bwdfuse has no kernels for that device ({facts.device_reason}); set "
        f"{_setting(facts, facts.flag.name, False)} there.",
        ((facts.flag.name, False),),
    )


# ---- what needs all gradients at once ----------------------------------------------------------------------------


def clipping(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    why = "the norm of all gradients is known only after backward, when each is already used and freed"
    return _refusal(facts, facts.clip_grad, why, "the norm is still reported")


def loss_scaling(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    why = "the loss scaler unscales gradients only after backward, when each is already used and freed"
    return _refusal(facts, facts.grad_scaler, why)


# ---- what runs more than one backward per update -----------------------------------------------------------------


def dynamic_batch(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    note = f"{facts.batch.micro.name} then counts the samples of a micro-batch" if facts.batch else ""
    why = "micro-batches are cut by tokens, so how many backward passes one update takes is not known beforehand"
    return _refusal(facts, facts.dynamic_batch, why, note)


def accumulation(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    """Accumulation that the user asked for by its number of steps."""
    batch = facts.batch
    if batch is None or batch.steps is None or batch.steps.is_allowed:
        return None
    fix = (batch.steps.name, 1)
    sentence = f"{_named(facts, batch.steps)}: each of these backward passes would step every parameter"
    sentence += f"; set {_setting(facts, *fix)}"
    micro, steps = _count(batch.micro), _count(batch.steps)
    if micro and steps:
        per_backward = micro * batch.ranks
        sentence += f" ({_effective(per_backward * steps, per_backward)})"
        sentence += _keep_batch(facts, batch.micro, micro * steps, per_backward * steps)
    return Refusal(sentence + ".", (fix,))


def batch_split(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    """Accumulation that follows from the sizes: total batch / (ranks × micro-batch) is not 1."""
    batch = facts.batch
    if batch is None or batch.total is None:
        return None
    total, micro = _count(batch.total), _count(batch.micro)
    if not (total and micro):
        return Refusal(
            f"{_named(facts, batch.total)}, {_named(facts, batch.micro)}: how many backward passes one update takes is "
            f"not known without both numbers; set {batch.total.name} to {batch.micro.name} × {_ranks(batch)}."
        )
    per_backward = micro * batch.ranks
    if total == per_backward:
        return None
    if total % per_backward:
        why = f"{total} samples do not divide into micro-batches of {micro} on {_ranks(batch)}"
    else:
        why = f"with {_named(facts, batch.micro)} on {_ranks(batch)} one update takes {total // per_backward} backward"
        why += " passes, and each would step every parameter"
    sentence = f"{_named(facts, batch.total)}: {why}; set {_setting(facts, batch.total.name, per_backward)}"
    sentence += f" ({_effective(total, per_backward)})"
    if total % batch.ranks == 0:
        sentence += _keep_batch(facts, batch.micro, total // batch.ranks, total)
    return Refusal(sentence + ".", ((batch.total.name, per_backward), (batch.micro.name, micro)))


def batch_retry(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    why = "a retry after running out of memory would go on from weights that are half stepped"
    return _refusal(facts, facts.batch_retry, why)


def pipeline_parallel(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    why = "a pipeline schedule runs one backward per micro-batch and scales gradients afterwards"
    return _refusal(facts, facts.pipeline_parallel, why)


def reentrant_checkpointing(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    why = "reentrant checkpointing runs a backward inside backward, so a shared weight gets its gradient in parts"
    return _refusal(facts, facts.reentrant_checkpointing, why)


# ---- where gradients and parameters live -------------------------------------------------------------------------


def data_parallel(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    why = "under DDP a hook sees this rank's own gradient before it is averaged, so the replicas would drift apart"
    return _refusal(facts, facts.strategy, why) if facts.sharding == "ddp" else None


def replicas(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    """nn.DataParallel: the setting is no argument of a trainer but how many devices the process can see."""
    if facts.replicas is None or facts.replicas.is_allowed:
        return None
    return Refusal(
        f"{_named(facts, facts.replicas)}: nn.DataParallel copies the model to each of these devices in every forward, "
        "and stepping the one that is copied from is not proven; make one device visible (CUDA_VISIBLE_DEVICES=0), or "
        "start one process per device with torchrun."
    )


def fsdp1(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    """FSDP1 steps original parameters itself; its flat ones it cannot, and only some trainers are proven with it."""
    if facts.sharding != "fsdp1":
        return None
    if facts.orig_params is None:
        return _refusal(facts, facts.strategy, f"FSDP1 is not supported in {facts.trainer} yet")
    if facts.orig_params.is_allowed:
        return None
    asked, fix = facts.orig_params, (facts.orig_params.name, facts.orig_params.allowed[0])
    sentence = (
        f"{_named(facts, asked)}: FSDP1 then shows one flat gradient per module, not yet reduced, to whoever would "
    )
    sentence += f"step it; set {_setting(facts, *fix)}"
    if facts.strategy is not None:
        sentence += f", or {_setting(facts, facts.strategy.name, facts.strategy.allowed[0])}"
    return Refusal(sentence + " (either way only one module's gradient is alive at a time).", (fix,))


def deepspeed(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    why = "DeepSpeed keeps gradients and optimizer to itself"
    return _refusal(facts, facts.strategy, why) if facts.sharding == "deepspeed" else None


def other_sharding(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    why = "when its gradients are complete is not known to bwdfuse"
    return _refusal(facts, facts.strategy, why) if facts.sharding == "other" else None


def offload_policy(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    return _refusal(facts, facts.offload_policy, "stepping gradients while they move to host memory is not proven yet")


def param_offload(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    return _refusal(facts, facts.param_offload, "stepping parameters that move between devices is not proven yet")


def quantized_training(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    return _refusal(facts, facts.quantized_training, "quantization scales that follow the weights are not proven yet")


def param_dtype(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    return _refusal(facts, facts.param_dtype, "there is no kernel for parameters stored in that format")


# ---- the optimizer -----------------------------------------------------------------------------------------------


def optimizer(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    return _refusal(facts, facts.optimizer, "only AdamW and Adam can be stepped inside backward")


def optimizer_impl(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    return _refusal(facts, facts.optimizer_impl, "its optimizers step after backward, with every gradient at hand")


def optimizer_options(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    """All options together, since they are one setting in most trainers."""
    sentences: list[str] = []
    settings: list[tuple[str, object]] = []
    for key, option in facts.optimizer_options.items():
        allowed = OPTIMIZER_OPTIONS.get(key, ())
        if allowed is None or option.value in allowed:
            continue
        if allowed:
            fix, why = (option.name, allowed[0]), "bwdfuse.optim cannot do that"
        else:
            fix, why = (option.name, REMOVE), "bwdfuse.optim has no such option"
        sentences.append(f"{_named(facts, option)}: {why}; {_instruction(facts, fix)}")
        settings.append(fix)
    return Refusal("; ".join(sentences) + ".", tuple(settings)) if sentences else None


def unread_options(config: BwdHookConfig, facts: TrainerFacts) -> Refusal | None:
    why = f"{facts.trainer} does not pass these on to AdamW, so they would be ignored"
    return _refusal(facts, facts.unread_options, why, "AdamW's own options have arguments of their own")


Refuse = Callable[[BwdHookConfig, TrainerFacts], Refusal | None]

#: Asked first, and alone.
GATES: tuple[Refuse, ...] = (flag, version, loop, device)

#: Every refusal, in the order in which a message lists them.
REFUSALS: tuple[Refuse, ...] = (
    nonfinite,
    data_parallel,
    replicas,
    fsdp1,
    deepspeed,
    other_sharding,
    pipeline_parallel,
    clipping,
    loss_scaling,
    dynamic_batch,
    accumulation,
    batch_split,
    batch_retry,
    reentrant_checkpointing,
    offload_policy,
    param_offload,
    quantized_training,
    param_dtype,
    optimizer,
    optimizer_impl,
    optimizer_options,
    unread_options,
)


# ---- words -------------------------------------------------------------------------------------------------------


def _refusal(facts: TrainerFacts, option: Option | None, why: str, note: str = "") -> Refusal | None:
    """The usual case: one option whose value is not allowed, and its first allowed value to set instead."""
    if option is None or option.is_allowed:
        return None
    fix = (option.name, option.allowed[0])
    note = f" ({note})" if note else ""
    return Refusal(f"{_named(facts, option)}: {why}; set {_setting(facts, *fix)}{note}.", (fix,))


def _message(facts: TrainerFacts, found: list[Refusal]) -> str:
    where = facts.trainer + (f" {facts.version}" if facts.version else "")
    lines = [f"{_named(facts, facts.flag)} cannot be honoured with these settings of {where}:"]
    lines += [f"  {number}. {refusal.sentence}" for number, refusal in enumerate(found, start=1)]
    settings = dict(setting for refusal in found for setting in refusal.settings)
    if settings:
        separator = " " if facts.syntax == "overrides" else ", "
        lines += ["All of it in one line:", "  " + separator.join(_setting(facts, *item) for item in settings.items())]
    return "\n".join(lines)


def _named(facts: TrainerFacts, option: Option) -> str:
    return f"{option.name}={_value(facts, option.value)}"


def _instruction(facts: TrainerFacts, setting: tuple[str, object]) -> str:
    return ("leave it out: " if setting[1] is REMOVE else "set ") + _setting(facts, *setting)


def _setting(facts: TrainerFacts, name: str, value: object) -> str:
    if value is REMOVE:
        return f"~{name}" if facts.syntax == "overrides" else f"no {name}"
    return f"{name}={_value(facts, value)}"


def _value(facts: TrainerFacts, value: object) -> str:
    if facts.syntax == "arguments":
        return repr(value)
    return "null" if value is None else str(value)


def _effective(before: int, after: int) -> str:
    return f"the effective batch changes from {before} to {after} samples per update"


def _ranks(batch: Batch) -> str:
    return "1 rank" if batch.ranks == 1 else f"{batch.ranks} ranks"


def _keep_batch(facts: TrainerFacts, micro: Option, value: int, total: int) -> str:
    return f", or {_setting(facts, micro.name, value)} where memory allows it (the effective batch stays {total})"


def _count(option: Option) -> int:
    """The option as a number of things, 0 where it is none."""
    value = option.value
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _release(text: str) -> tuple[int, ...]:
    """The numbers a version starts with: ``0.10.0.dev1`` -> (0, 10, 0)."""
    numbers: list[int] = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
