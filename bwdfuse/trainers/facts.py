"""What a trainer says of itself, in its own words: plain data that an adapter fills and ``bwdfuse.validate`` reads.

Knows no trainer and imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: How one copy of the model is spread over the ranks. "other": a scheme that no refusal describes by name.
Sharding = Literal["single", "ddp", "fsdp1", "fsdp2", "deepspeed", "other"]


@dataclass(frozen=True)
class Option:
    """One setting, spelled as its user would type it.

    Args:
        name: The trainer's own spelling, such as ``optim.clip_grad`` or ``max_grad_norm``.
        value: What it is set to.
        allowed: Values that stepping inside backward can honour. The first is the one a message tells to type.
    """

    name: str
    value: object
    allowed: tuple[object, ...] = ()

    @property
    def is_allowed(self) -> bool:
        return self.value in self.allowed


@dataclass(frozen=True)
class Batch:
    """How many samples one update and one backward take.

    Args:
        micro: Samples of one backward on one rank.
        ranks: Ranks that see different samples (world size without sequence and model parallelism).
        total: Samples of one update over all ranks, where the trainer is told that number.
        steps: Backward passes of one update, where the trainer is told that number instead.
    """

    micro: Option
    ranks: int
    total: Option | None = None
    steps: Option | None = None


@dataclass(frozen=True)
class TrainerFacts:
    """Everything a refusal may depend on. ``None`` means that the trainer has no such setting.

    Args:
        trainer: Its name, for messages.
        flag: The option that turns stepping inside backward on.
        nonfinite: The option that says what to do with a gradient that is not finite.
        syntax: How its user writes settings: ``overrides`` (``a.b=null c=1``) or ``arguments`` (``a=None, b=1``).
        loop: Which of the trainer's loops this is; only the allowed ones make one backward per update.
        device_reason: Why ``device`` allows no more than it does.
        sharding: What ``strategy`` amounts to.
        optimizer_options: Further keyword arguments of the optimizer by name.
        unread_options: Options for the optimizer that the trainer does not pass on to this one.
        replicas: Devices that one process copies the model to (nn.DataParallel).
    """

    trainer: str
    flag: Option
    nonfinite: Option | None = None
    syntax: Literal["overrides", "arguments"] = "overrides"
    version: str | None = None
    version_floor: str | None = None
    loop: Option | None = None
    device: Option | None = None
    device_reason: str = ""
    clip_grad: Option | None = None
    dynamic_batch: Option | None = None
    batch: Batch | None = None
    batch_retry: Option | None = None
    grad_scaler: Option | None = None
    param_dtype: Option | None = None
    reentrant_checkpointing: Option | None = None
    strategy: Option | None = None
    sharding: Sharding = "single"
    orig_params: Option | None = None
    offload_policy: Option | None = None
    param_offload: Option | None = None
    pipeline_parallel: Option | None = None
    quantized_training: Option | None = None
    optimizer: Option | None = None
    optimizer_impl: Option | None = None
    optimizer_options: Mapping[str, Option] = field(default_factory=dict)
    unread_options: Option | None = None
    replicas: Option | None = None
