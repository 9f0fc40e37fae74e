"""transformers' Trainer with a field ``bwd_hook``: each parameter is stepped inside backward, its gradient freed.

Change the import line and set the field::

    from bwdfuse.trainers.transformers import Trainer, TrainingArguments
    Trainer(model, TrainingArguments(..., bwd_hook=True, max_grad_norm=0), train_dataset=data).train()

Where the trainer's class is not yours to change, ``callbacks=[callback()]`` does the same to any Trainer. To put it
into a Trainer subclass of your own: ``class MyTrainer(BwdHookTrainer, TheirTrainer)``.
"""

import inspect
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import transformers
from accelerate.state import AcceleratorState
from transformers.trainer_callback import CallbackHandler, TrainerCallback

from bwdfuse import validate
from bwdfuse._optimizer import BackwardOptimizer
from bwdfuse.config import BwdHookConfig
from bwdfuse.errors import ConfigError
from bwdfuse.optim import Adam, AdamW
from bwdfuse.trainers._announce import announcement
from bwdfuse.trainers._transformers_facts import TRANSFORMERS, Library, argument_facts, run_facts

__all__ = ["BwdHookArguments", "BwdHookCallback", "BwdHookTrainer", "Trainer", "TrainingArguments", "callback"]

WAYS_IN = (
    "pass optimizer_cls_and_kwargs=(bwdfuse.AdamW, {...}) or optimizers=(bwdfuse.AdamW(groups), None) to the trainer"
)

# The mixins stand before a class of transformers or of a library on top of it, which they cannot name.
if TYPE_CHECKING:
    from transformers import Trainer as TrainerBase
    from transformers import TrainingArguments as ArgumentsBase
else:
    ArgumentsBase = TrainerBase = object


# ---- arguments -----------------------------------------------------------------------------------------------------


@dataclass(repr=False)  # the stock one hides tokens
class BwdHookArguments(ArgumentsBase):
    """The field, for any subclass of transformers.TrainingArguments: list it first among the bases.

    Raises:
        ConfigError: (a ValueError) ``bwd_hook=True`` beside settings it cannot be honoured with; the message lists all
            of them and what to set instead.
    """

    library: ClassVar[Library] = TRANSFORMERS

    bwd_hook: bool = field(
        default=False,
        metadata={
            "help": "Step each parameter inside backward, as soon as its gradient is complete, and free that gradient. "
            "Needs one backward per update and max_grad_norm=0."
        },
    )

    def __post_init__(self) -> None:
        # Before, since transformers itself stops at a DeepSpeed that is not installed; after, since it parses text.
        check_arguments(self, self.bwd_hook)
        super().__post_init__()
        check_arguments(self, self.bwd_hook)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """As transformers' own. A trainer asks for it when it starts to train: the moment to say that a stock one would
        train without ever looking at ``bwd_hook``.

        Raises:
            ConfigError: ``bwd_hook=True`` in a trainer that is not bwdfuse's and has no ``callback()``.
        """
        asking = sys._getframe(1).f_locals.get("self")
        if self.bwd_hook and isinstance(asking, transformers.Trainer) and not _knows_bwd_hook(asking):
            raise ConfigError(
                f"bwd_hook=True has no effect in {_name(type(asking))}: import the trainer from "
                f"bwdfuse.trainers.{self.library.name}, or pass it callbacks=[callback()] from "
                "bwdfuse.trainers.transformers, or set bwd_hook=False"
            )
        return super().get_warmup_steps(num_training_steps)


def check_arguments(args: transformers.TrainingArguments, bwd_hook: object) -> None:
    """Raises ConfigError for arguments that keep `bwd_hook` from being honoured; cheap enough for every step."""
    if bwd_hook is not False:
        facts = argument_facts(args, bwd_hook, _library(args))
        validate.check(BwdHookConfig(bwd_hook), facts)  # type: ignore[arg-type]  # validate refuses other types


def check_run(args: transformers.TrainingArguments, bwd_hook: object, model: torch.nn.Module) -> None:
    """As :func:`check_arguments`, with what the launcher, the devices and the model add."""
    if bwd_hook is not False:
        facts = run_facts(args, bwd_hook, _library(args), AcceleratorState(), model)
        validate.check(BwdHookConfig(bwd_hook), facts)  # type: ignore[arg-type]


def _library(args: transformers.TrainingArguments) -> Library:
    return getattr(args, "library", TRANSFORMERS)


def _knows_bwd_hook(trainer: transformers.Trainer) -> bool:
    return isinstance(trainer, BwdHookTrainer) or _has_callback(trainer)


def _has_callback(trainer: transformers.Trainer) -> bool:
    callbacks = trainer.callback_handler.callbacks
    return any(isinstance(cb, BwdHookCallback) and cb.asked(trainer.args) is not False for cb in callbacks)


# ---- the optimizer -------------------------------------------------------------------------------------------------


#: torch's optimizers that have a native one of the same name, options and state.
NATIVE: dict[type, type[AdamW] | type[Adam]] = {torch.optim.AdamW: AdamW, torch.optim.Adam: Adam}


def find_optimizer(optimizer: Any) -> tuple[Any, Any]:
    """The optimizer inside accelerate's wrappers, and the innermost wrapper that holds it (None without one)."""
    holder, inner = None, optimizer
    while hasattr(inner, "optimizer"):
        holder, inner = inner, inner.optimizer
    return inner, holder


def refuse_class(cls: Any) -> None:
    """Raises ConfigError for a class of optimizer that is neither ours nor torch's of that name, by name."""
    if cls not in NATIVE and not (isinstance(cls, type) and issubclass(cls, BackwardOptimizer)):
        raise ConfigError(
            "bwd_hook=True: only AdamW and Adam can be stepped inside backward, and this trainer's optimizer is "
            f"{_name(cls)}; {WAYS_IN}, or set bwd_hook=False"
        )


def _name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}" if hasattr(cls, "__qualname__") else repr(cls)


def take_over(optimizer: Any, scheduler: Any) -> BackwardOptimizer:
    """The optimizer of bwdfuse that `optimizer` holds. In place of torch's, puts one with its groups and state.

    Args:
        optimizer: As accelerate prepared it.
        scheduler: The learning-rate scheduler; it must reach the new optimizer through accelerate's wrapper.

    Raises:
        ConfigError: Another kind of optimizer, or a scheduler that would go on setting the old one's learning rate.
    """
    inner, holder = find_optimizer(optimizer)
    refuse_class(type(inner))
    if isinstance(inner, BackwardOptimizer):
        return inner
    ours = NATIVE[type(inner)]
    if holder is None or getattr(scheduler, "optimizer", None) is inner:
        raise ConfigError(
            f"bwd_hook=True: the learning-rate scheduler was built on a torch.optim.{ours.__name__} that bwdfuse.{ours.__name__} has "
            "to replace, and would go on setting the old one's learning rate; build both yourself, "
            f"optimizers=(bwdfuse.{ours.__name__}(groups), scheduler), or neither, or set bwd_hook=False"
        )
    native = ours([dict(group) for group in inner.param_groups], amsgrad=inner.defaults["amsgrad"])
    native.load_state_dict(inner.state_dict())
    holder.optimizer = native
    return native


def armed(optimizer: Any) -> BackwardOptimizer:
    """The armed optimizer of bwdfuse that `optimizer` holds.

    Raises:
        ConfigError: There is none, so that nothing is stepped inside backward.
    """
    inner, _ = find_optimizer(optimizer)
    if isinstance(inner, BackwardOptimizer) and inner.armed:
        return inner
    raise ConfigError(
        f"bwd_hook=True did not take effect: the optimizer is {_name(type(inner))} and not an armed one of bwdfuse; "
        "something replaced or disarmed it, or removed BwdHookCallback from the trainer; leave both as they are, or "
        "set bwd_hook=False"
    )


def disarm(optimizer: Any) -> None:
    """Takes the hooks off, so that the model is an ordinary one for whatever comes next."""
    inner, _ = find_optimizer(optimizer)
    if isinstance(inner, BackwardOptimizer):
        inner.disarm()


# ---- the callback --------------------------------------------------------------------------------------------------


def callback(bwd_hook: bool = True) -> "BwdHookCallback":
    """Steps each parameter inside backward, in a Trainer whose class cannot be changed.

    ``Trainer(..., callbacks=[callback()])`` is all: as training starts it puts bwdfuse.AdamW, with the same groups,
    state and schedule, where the trainer's own AdamW was (Adam for Adam), and arms it; one of bwdfuse that the trainer was given
    stays. What cannot be honoured raises. The gradient norm in the logs is the true one; this callback therefore moves
    to the front of the others.

    Where training ends with an exception the model stays armed: ``trainer.optimizer.optimizer.disarm()``.

    Args:
        bwd_hook: False leaves the trainer as it is.

    Raises:
        ConfigError: (a ValueError) from the trainer, when it is built or starts to train, for settings that cannot be
            honoured, and during training once the arguments are changed to such settings.
    """
    return BwdHookCallback(bwd_hook)


class BwdHookCallback(TrainerCallback):
    """Arms the optimizer when everything is in place and disarms it after training. Made by :func:`callback`.

    Args:
        bwd_hook: False makes it do nothing.
    """

    #: Whether the trainer logs the norm of gradients that are gone.
    corrects_logs = True

    def __init__(self, bwd_hook: bool = True) -> None:
        self.bwd_hook = bwd_hook

    def asked(self, args: Any) -> Any:
        """The flag."""
        return self.bwd_hook

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **objects: Any) -> None:
        if self.asked(args) is not False:
            check_run(args, self.asked(args), model)
            if (optimizer := objects.get("optimizer")) is not None:
                refuse_class(type(find_optimizer(optimizer)[0]))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **objects: Any) -> None:
        """Parameters, their groups and a resumed state are final now: after accelerate.prepare and the checkpoint."""
        if self.asked(args) is False:
            return
        check_run(args, self.asked(args), model)
        if self.corrects_logs:
            self._run_first(sys._getframe(1).f_locals.get("self"))
        optimizer = take_over(objects["optimizer"], objects.get("lr_scheduler"))
        optimizer.arm(model)
        optimizer._norm_is_replaced = self.corrects_logs
        if state.is_world_process_zero:
            print(announcement("bwd_hook=True", model) + _compiled(args), flush=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Arguments are mutable: clipping switched on now would find no gradients and do nothing."""
        check_arguments(args, self.asked(args))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **objects: Any) -> None:
        if self.corrects_logs and self.asked(args) is not False and "grad_norm" in logs:
            logs["grad_norm"] = armed(objects["optimizer"]).grad_norm()
            if state.log_history and "grad_norm" in state.log_history[-1]:
                state.log_history[-1]["grad_norm"] = logs["grad_norm"]

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self.asked(args) is not False:
            disarm(objects["optimizer"])

    def _run_first(self, handler: Any) -> None:
        """transformers tells callbacks in order, its own reporters first: they would record a norm of 0. A callback is
        not told who calls it, so the handler is taken from the frame that does."""
        if not isinstance(handler, CallbackHandler):
            raise ConfigError(
                f"bwd_hook=True: callback() was called by {_name(type(handler))} and not by transformers' "
                "CallbackHandler, so that the gradient norm cannot be reported; use the Trainer of "
                "bwdfuse.trainers.transformers"
            )
        handler.callbacks.remove(self)
        handler.callbacks.insert(0, self)


def _compiled(args: Any) -> str:
    if not args.torch_compile:
        return ""
    return (
        "; torch_compile=True: a whole compiled model hands out its gradients together at the end of backward, so that "
        "nothing is saved"
    )


class _OwnCallback(BwdHookCallback):
    """The same inside a trainer that has the flag among its arguments and logs the true norm by itself."""

    corrects_logs = False

    def asked(self, args: Any) -> Any:
        return getattr(args, "bwd_hook", False)


# ---- the trainer ---------------------------------------------------------------------------------------------------


class BwdHookTrainer(TrainerBase):
    """``bwd_hook`` for any subclass of transformers.Trainer whose loop is its own: list it first among the bases.

    With ``args.bwd_hook`` False every method is the stock one.

    Raises:
        ConfigError: (a ValueError) from the constructor and from train(), for settings that cannot be honoured.
    """

    model: Any
    optimizer_cls_and_kwargs: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._bwd_hook is not False:
            self._plug_in()

    @property
    def _bwd_hook(self) -> Any:
        return getattr(self.args, "bwd_hook", False)

    def _plug_in(self) -> None:
        check_run(self.args, self._bwd_hook, self.model)
        if self.optimizer is not None:
            refuse_class(type(find_optimizer(self.optimizer)[0]))
        if not _has_callback(self):
            self.add_callback(_OwnCallback())

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own; afterwards, also after an exception, the model is an ordinary one again."""
        if self._bwd_hook is False:
            return super().train(*args, **kwargs)
        try:
            return super().train(*args, **kwargs)
        finally:
            disarm(self.optimizer)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As transformers' own, with its parameter groups and hyper-parameters, of the class of bwdfuse."""
        if self._bwd_hook is False:
            self._refuse_armed()
            return super().create_optimizer(*args, **kwargs)
        self._plug_in()
        if self.optimizer is not None:
            return super().create_optimizer(*args, **kwargs)
        given = self.optimizer_cls_and_kwargs
        cls, options = given or self.get_optimizer_cls_and_kwargs(self.args, self.model)
        refuse_class(cls)
        self.optimizer_cls_and_kwargs = (NATIVE.get(cls, cls), dict(options))
        try:
            return super().create_optimizer(*args, **kwargs)
        finally:
            self.optimizer_cls_and_kwargs = given

    def _refuse_armed(self) -> None:
        inner, _ = find_optimizer(self.optimizer)
        if isinstance(inner, BackwardOptimizer) and inner.armed:
            raise ConfigError(
                f"bwd_hook=False, but the optimizer given to the trainer is armed (bwdfuse.{inner._name}(..., bwd_hook=True)), "
                "so that clipping would silently do nothing; set bwd_hook=True in the arguments and leave it out of the "
                "optimizer"
            )

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The norm of the gradients that were stepped; the stock one would report 0.0 for gradients that are gone."""
        if self._bwd_hook is False:
            return super()._get_grad_norm(model, grad_norm)
        return armed(self.optimizer).grad_norm()


# ---- what to import ------------------------------------------------------------------------------------------------


@dataclass(repr=False)
class TrainingArguments(BwdHookArguments, transformers.TrainingArguments):
    """transformers.TrainingArguments with ``bwd_hook``.

    Raises:
        ConfigError: (a ValueError) ``bwd_hook=True`` beside settings it cannot be honoured with; the message lists all
            of them and what to set instead.
    """


class Trainer(BwdHookTrainer, transformers.Trainer):
    """transformers.Trainer that honours ``bwd_hook`` of :class:`TrainingArguments`.

    Raises:
        ConfigError: (a ValueError) from the constructor and from train(), for settings that cannot be honoured.
    """

    __signature__ = inspect.signature(transformers.Trainer)
