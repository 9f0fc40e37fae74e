"""TRL's SFTTrainer with one more field, ``bwd_hook``: each parameter is stepped inside backward, its gradient freed.

Change the import line and set the field::

    from bwdfuse.trainers.trl import SFTConfig, SFTTrainer
    SFTTrainer(model, args=SFTConfig(..., bwd_hook=True, max_grad_norm=0), train_dataset=data).train()
"""

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import trl

from bwdfuse.trainers._transformers_facts import Library
from bwdfuse.trainers.transformers import BwdHookArguments, BwdHookTrainer, TrainingArguments

__all__ = ["SFTConfig", "SFTTrainer"]


@dataclass(repr=False)
class SFTConfig(BwdHookArguments, trl.SFTConfig):
    """trl.SFTConfig with ``bwd_hook``.

    Raises:
        ConfigError: (a ValueError) ``bwd_hook=True`` beside settings it cannot be honoured with; the message lists all
            of them and what to set instead.
    """

    library: ClassVar[Library] = Library("trl", trl.__version__, "1.16")


class SFTTrainer(BwdHookTrainer, trl.SFTTrainer):
    """trl.SFTTrainer that honours ``bwd_hook`` of :class:`SFTConfig`.

    Raises:
        ConfigError: (a ValueError) from the constructor and from train(), for settings that cannot be honoured.
    """

    __signature__ = inspect.signature(trl.SFTTrainer)

    def __init__(self, model: Any, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        # TRL turns general arguments into its own; stock SFTConfig would not know the field.
        if isinstance(args, TrainingArguments):
            args = SFTConfig(**{**args.to_dict(), "hub_token": args.hub_token})
        super().__init__(model, args, *rest, **kwargs)
