"""verl's FSDP language-model engine, of either version, whose parameters are stepped inside backward.

Everything is verl's own code up to the points where gradients would have been used: how often backward runs, whether
it runs at all, and what is left to do after it.
"""

import inspect
import math
import os
from collections.abc import Callable
from typing import Any

import torch
import verl
from tensordict import TensorDict
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.utils import tensordict_utils
from verl.utils.device import get_device_id, get_device_name, get_vendor
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.engine.utils import prepare_micro_batches

from bwdfuse import _fsdp1 as fsdp1
from bwdfuse._optimizer import BackwardOptimizer
from bwdfuse.errors import AccumulationError, BwdFuseError, ConfigError
from bwdfuse.trainers._announce import announcement
from bwdfuse.trainers._verl_config import BwdHookOptimizerConfig

MODEL_TYPE, BACKENDS = "language_model", ("fsdp", "fsdp2")


class BwdHookFSDPEngine(FSDPEngineWithLMHead):
    """verl's engine, unchanged for every model whose settings do not ask for stepping inside backward."""

    optimizer: BackwardOptimizer

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self._skipped = False  # this update, for a loss that is not finite
        self._kept = 0  # parameters so far, for a gradient that is not finite
        self._bwd_hook = isinstance(optimizer_config, BwdHookOptimizerConfig) and not engine_config.forward_only
        if self._bwd_hook:
            optimizer_config.check_ranks(self.get_data_parallel_size())

    def _build_optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        """verl's, from settings that name bwdfuse; armed here, since what is set before wrapping never fires."""
        optimizer = super()._build_optimizer(module)
        if self._bwd_hook:
            optimizer.arm(module)
            if self.rank == 0:
                print(announcement("optim.bwd_hook=True", module), flush=True)
        return optimizer

    def forward_backward_batch(self, data: TensorDict, loss_function: Callable, forward_only: bool = False) -> Any:
        if self._bwd_hook and not forward_only:
            self._check_armed()
            self._refuse_micro_batches(data)
            self._skipped = False
        return super().forward_backward_batch(data, loss_function, forward_only)

    def forward_step(self, micro_batch: TensorDict, loss_function: Callable, forward_only: bool) -> Any:
        """verl's; where any rank's loss is not finite, every rank gets a loss whose backward touches no parameter."""
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        if self._bwd_hook and not forward_only and _on_any_rank(not math.isfinite(output["loss"])):
            self._skipped = True
            self._forget_forward()
            loss = torch.zeros((), device=get_device_id(), requires_grad=True)
        return loss, output

    def optimizer_step(self) -> float:
        """Closes the update. Like verl's: returns the gradient norm, and warns where the update was skipped."""
        if not self._bwd_hook:
            return super().optimizer_step()
        if self._skipped:
            # verl sees the non-finite norm after backward, and warns, steps nothing and logs it, on every rank.
            print("WARN: bwdfuse: the loss is not finite on some rank; no parameter is updated on any rank", flush=True)
            return math.nan
        self._check_armed()
        self.optimizer.step()
        self._check_nothing_left()
        kept = self.optimizer.stats()["skipped"] - self._kept
        if kept:
            self._kept += kept
            print(f"WARN: bwdfuse: {kept} parameters kept their value, their gradient is not finite", flush=True)
        return self.optimizer.grad_norm()

    # ---- guards ------------------------------------------------------------------------------------------------

    def _check_armed(self) -> None:
        if not (isinstance(self.optimizer, BackwardOptimizer) and self.optimizer.armed):
            kind = f"{type(self.optimizer).__module__}.{type(self.optimizer).__qualname__}"
            raise BwdFuseError(
                f"optim.bwd_hook=True is set, but the engine's optimizer is {kind} and not an "
                "armed optimizer of bwdfuse.optim: something replaced or disarmed it after the engine was built; keep the "
                "optimizer that verl built, or set optim.bwd_hook=False"
            )

    def _check_nothing_left(self) -> None:
        """A parameter that is not the optimizer's would keep its gradient and never be stepped."""
        for name, param in self.module.named_parameters():
            if param.grad is not None:
                raise BwdFuseError(
                    f"optim.bwd_hook=True: parameter {name!r} still has its gradient after the update, so it is not "
                    "stepped inside backward: it was added or replaced after the engine was built; keep the parameters "
                    "that verl built, or set optim.bwd_hook=False"
                )

    def _refuse_micro_batches(self, data: TensorDict) -> None:
        """The number that counts is verl's own, of the batch at hand: settings can change after they were checked."""
        tensordict_utils.assign_non_tensor(data, sp_size=self.ulysses_sequence_parallel_size)
        group = self.get_data_parallel_group()
        count = len(prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)[0])
        if count > 1:
            here, ranks = len(data), self.get_data_parallel_size()
            micro = tensordict_utils.get_non_tensor_data(data=data, key="micro_batch_size_per_gpu", default=None)
            dynamic = tensordict_utils.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True)
            raise AccumulationError(
                f"optim.bwd_hook=True: this update takes {count} micro-batches on this rank, and each backward would "
                f"step every parameter; nothing was changed. It holds {here} samples on each of {ranks} ranks, with "
                f"data.use_dynamic_bsz={dynamic} data.micro_batch_size_per_gpu={micro}; set data.use_dynamic_bsz=False "
                f"data.train_batch_size={here * ranks} data.micro_batch_size_per_gpu={here}, or optim.bwd_hook=False"
            )

    def _forget_forward(self) -> None:
        """Lets FSDP start the next forward cleanly after one that no backward follows."""
        if isinstance(self.module, FullyShardedDataParallel):
            fsdp1.forget_forward(self.module)
        elif hasattr(self.module, "reset_iter_state"):  # torch >= 2.13; before, the next backward cleans up
            self.module.reset_iter_state()


def _on_any_rank(condition: bool) -> bool:
    """One all-reduce over all ranks, sequence-parallel ones included: FSDP's collectives span them too."""
    flag = torch.tensor(float(condition), device=get_device_id())
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag.item())


# ---- registration --------------------------------------------------------------------------------------------------


#: Methods of verl's engine that ours overrides.
OVERRIDDEN = ("__init__", "_build_optimizer", "forward_backward_batch", "forward_step", "optimizer_step")


def install() -> None:
    """Registers the engine under the vendor's key, which verl prefers to its own; checks that verl will choose it.

    Raises:
        ConfigError: Another plugin's engine is in the way, or this verl's engine is not the one we know.
    """
    found = [EngineRegistry.get_engine_cls(MODEL_TYPE, backend) for backend in BACKENDS]
    if all(engine is BwdHookFSDPEngine for engine in found):
        return
    for engine in found:
        if engine is not FSDPEngineWithLMHead:
            raise ConfigError(
                f"optim.bwd_hook=True extends verl's own FSDP engine, but {engine.__module__}.{engine.__qualname__} is "
                "registered for this device; leave that plugin out (VERL_USE_EXTERNAL_PLUGINS=bwdfuse), or set "
                "optim.bwd_hook=False"
            )
    _check_interface()
    device = os.getenv("VERL_ENGINE_DEVICE") or get_device_name()
    vendor = os.getenv("VERL_ENGINE_VENDOR") or get_vendor()
    EngineRegistry.register(MODEL_TYPE, list(BACKENDS), device=device, vendor=vendor)(BwdHookFSDPEngine)
    if any(EngineRegistry.get_engine_cls(MODEL_TYPE, backend) is not BwdHookFSDPEngine for backend in BACKENDS):
        raise ConfigError(
            f"optim.bwd_hook=True: verl {verl.__version__} does not choose the engine that bwdfuse registers; upgrade "
            "bwdfuse, or set optim.bwd_hook=False"
        )


def _check_interface() -> None:
    """What we override must still be there with the same parameters, or a guard would silently be dead."""
    for name in OVERRIDDEN:
        stock, ours = getattr(FSDPEngineWithLMHead, name, None), getattr(BwdHookFSDPEngine, name)
        if stock is None or list(inspect.signature(stock).parameters) != list(inspect.signature(ours).parameters):
            raise ConfigError(
                f"optim.bwd_hook=True: {name}() of verl {verl.__version__}'s FSDP engine is not the one this bwdfuse "
                "knows; upgrade bwdfuse, or set optim.bwd_hook=False"
            )
