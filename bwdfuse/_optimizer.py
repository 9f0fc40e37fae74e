"""What every optimizer of this package shares: slots, arming, the closing step(), counters, state. Knows no update rule."""

import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as optimizer_module

from bwdfuse import _checkpoint as checkpoint
from bwdfuse import _fsdp1 as fsdp1
from bwdfuse import _late_readers, attach
from bwdfuse._native import native
from bwdfuse.errors import AccumulationError, ConfigError

# Options of torch's signature that choose an implementation and have no choice here: stored as torch's neutral values, so that
# a state_dict written here never forces one on the optimizer that loads it. `fused` stays as it was given: torch takes it from
# the file, and its fused and plain steps round differently.
_NEUTRAL = {"foreach": None, "capturable": False, "differentiable": False}
_WHY_NOT = {
    "foreach": "there is one native step and no foreach variant; leave foreach unset",
    "capturable": "the step counter lives on the host; set capturable=False",
    "differentiable": "the native step is not recorded by autograd; set differentiable=False",
}


class BackwardOptimizer(torch.optim.Optimizer):
    """What every rule shares: slots, arming, the closing step(), state and its checkpoints."""

    _kernel: Callable | None = None  # tests put torch's own kernel here, behind the same hooks
    _norm_is_replaced = (
        False  # True: a trainer reads a norm of freed gradients by clipping at inf, and its adapter replaces it
    )
    _exchange = True  # False: read tensors through Python attributes, as on a torch without the exchange table

    def __init__(
        self,
        params,
        defaults: dict[str, Any],
        *,
        rule: str,
        fixed: dict[str, Any],
        implementation: dict[str, Any],
        bwd_hook: bool,
        nonfinite: str,
        state_dtype: torch.dtype | str | None,
    ) -> None:
        """
        Args:
            defaults: options that may differ between param groups.
            rule: key of ``_C.rules()``.
            fixed: options that choose the rule, so that every param group has the same.
            implementation: options of torch's signature that choose between its implementations.
        """
        if nonfinite not in ("off", "skip", "raise"):
            raise ConfigError(f"{self._name}(nonfinite={nonfinite!r}): set 'off', 'skip' or 'raise'")
        self._rule, self._fixed = rule, fixed
        self._check_options({**defaults, **implementation})
        self.nonfinite = nonfinite
        self.state_dtype = checkpoint.state_dtype(self._name, state_dtype)
        self._make_plan()
        super().__init__(params, {**defaults, **fixed, **_NEUTRAL})
        if bwd_hook:
            self.arm()

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _make_plan(self) -> None:
        self._plan = native().Plan(
            self, self._rule, nonfinite=self.nonfinite, kernel=self._kernel, exchange=self._exchange
        )
        self._state_names: tuple[str, ...] = native().rules()[self._rule]["states"]
        self._slot_ids: list[int] = []
        self._armed_count = 0
        self._finalizer: weakref.finalize | None = None
        self._units: fsdp1.Units | None = None
        self._warned_unfired = False
        self._norm_of: tuple[int, float] | None = None

    # ---- arming ------------------------------------------------------------------------------------------------

    @property
    def armed(self) -> bool:
        """Whether hooks are registered, so that backward steps the parameters."""
        return self._finalizer is not None

    def arm(self, model: torch.nn.Module | None = None) -> None:
        """Registers the hooks and allocates the state. Call it again after parameters were replaced or unfrozen.

        Constructing with ``bwd_hook=True`` arms at once. Arm by hand after what replaces parameters (``fully_shard``,
        ``accelerator.prepare``). The state of parameters that are gone is dropped.

        Args:
            model: gives parameters their names in messages.

        Raises:
            ConfigError: a parameter cannot be stepped inside backward (dtype, device, meta, another optimizer's hook, an old
                gradient), none is trainable, or several ranks hold unsharded replicas. Nothing was changed.
            AccumulationError: an update is open; call ``step()`` first.
        """
        if self._plan.fired or self._plan.poison:
            raise AccumulationError(
                self._plan.poison or "arm() in the middle of an update: call step() after backward first"
            )
        params = self._params()
        names = attach.name_parameters(self.param_groups, model)
        attach.refuse_unarmable(params, names, own={id(slot) for slot in self._plan.slots})
        attach.refuse_unreduced(params)
        if not any(p.requires_grad for p in params):
            raise ConfigError(
                "bwd_hook=True: no parameter of this optimizer requires a gradient; unfreeze one, or set bwd_hook=False"
            )
        units = fsdp1.find_units(params, model)
        if units is not None:
            units.refuse_unarmable()
        self.disarm()
        fresh = [p for p in params if self._needs_state(p)]
        try:
            for param in fresh:
                self._init_state(param)
            slots = self._rebuild_slots(names, armed=True)
            handles = attach.register(zip(slots, params, strict=True), units)
        except BaseException:
            for param in fresh:
                self.state.pop(param, None)
            self._slot_ids = []
            raise
        known = {id(p) for p in params}
        for param in [p for p in self.state if isinstance(p, torch.Tensor) and id(p) not in known]:
            del self.state[param]
        self._units = units
        self._finalizer = weakref.finalize(self, attach.remove, handles)
        self._finalizer.atexit = False
        _late_readers.watch(self)

    def disarm(self) -> None:
        """Removes the hooks. Gradients stay after backward again, and ``step()`` steps all of them."""
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None
            self._norm_is_replaced = False
            _late_readers.unwatch(self)
            self._slot_ids = []

    def _needs_state(self, param: torch.Tensor) -> bool:
        return param.requires_grad and not fsdp1.is_elsewhere(param) and not self.state.get(param)

    def _params(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _rebuild_slots(self, names: dict[int, str], *, armed: bool) -> list:
        self._plan.forget()
        for g, group in enumerate(self.param_groups):
            for param in group["params"]:
                steps_here = param.requires_grad and not fsdp1.is_elsewhere(param)
                self._plan.add(param, group=g, name=names[id(param)], armed=armed and steps_here)
        self._slot_ids = list(map(id, self._params()))
        self._armed_count = sum(slot.armed for slot in self._plan.slots)
        return self._plan.slots

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; an armed optimizer arms the new parameters too. A parameter of two groups or an option that does not exist
        here raises and leaves the groups as they were."""
        before = len(self.param_groups)
        if isinstance(param_group, dict):
            self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            checkpoint.refuse_dtypes(self._name, self.param_groups[before:], self.state_dtype)
            seen = self._params()
            if len(seen) != len({id(p) for p in seen}):
                raise ConfigError(
                    "a parameter is listed twice in one param group: list each once, or it would be stepped twice"
                )
            if self.armed:
                self.arm()
        except BaseException:
            del self.param_groups[before:]
            raise

    # ---- called by the plan ------------------------------------------------------------------------------------

    def _begin_backward(self) -> bool:
        """Before the first parameter of a backward is stepped: what may have changed since arming, and how it will end."""
        self._check_groups()
        attach.refuse_unreduced(self._params())
        torch.autograd.Variable._execution_engine.queue_callback(self._plan.end_backward)
        return True

    @torch.no_grad()
    def _init_state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Fills ``state[param]`` as torch does: a 0-dim float32 ``step`` and the moments shaped and laid out like it."""
        state = self.state[param]
        state["step"] = torch.zeros((), dtype=torch.float32)
        dtype = checkpoint.dtype_of_state(param, self.state_dtype)
        for name in self._state_names:
            state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        return state

    # ---- torch.optim.Optimizer ---------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None):
        """Armed: closes the update, whose parameters backward has stepped. Unarmed: steps every parameter with a gradient.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            What the closure returned, else None.

        Raises:
            AccumulationError: the update was left half done, by an error or an interrupted backward.
            BwdFuseError: armed, and no hook fired or a gradient is left that a hook should have consumed.
        """
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or optimizer_module._global_optimizer_pre_hooks
            or optimizer_module._global_optimizer_post_hooks
            or torch.autograd._profiler_enabled()
        ):
            return self._observed_step(closure)
        return self._step(closure)

    # torch wraps every class's step() to run hooks and to appear in profiles, unless it is marked as wrapped. That costs more
    # than a small update (10 us measured), so the wrapper is called when somebody looks.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None = None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ids = list(map(id, self._params()))
        if self.armed:
            if ids != self._slot_ids:
                raise ConfigError(
                    "step(): the parameters in param_groups were replaced after arming (accelerator.prepare, fully_shard), so their "
                    "hooks never fired; call optimizer.arm(model) once the model has its final parameters"
                )
            self._plan.close()
            self._warn_unfired()
        else:
            self._check_groups()
            if ids != self._slot_ids:
                self._rebuild_slots(attach.name_parameters(self.param_groups, None), armed=False)
                self._units = fsdp1.find_units(self._params(), None)
            self._plan.step()
        return loss

    _observed_step = torch.optim.Optimizer.profile_hook_step(_step)

    def _warn_unfired(self) -> None:
        if self._warned_unfired or self._plan.params_stepped == self._armed_count:
            return
        self._warned_unfired = True
        last = self._plan.update - 1
        names = [slot.name for slot in self._plan.slots if slot.armed and slot.last_update != last]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        warnings.warn(
            f"{len(names)} parameters had no gradient in update {last} and were not stepped, as in torch: {shown}. "
            "This is said once; stats()['params_stepped'] counts them in every update",
            stacklevel=3,
        )

    def acknowledge_partial_update(self) -> None:
        """Accepts an update that was left half done: its parameters stay as they are, gradients that are left are dropped, and
        the next backward starts a new update. ``state[param]['step']`` says which parameters were stepped."""
        for param in self._params():
            param.grad = None
        self._plan.acknowledge()

    def stats(self) -> dict[str, Any]:
        """Counts of what was done.

        Returns:
            ``updates`` closed by ``step()``; ``params_stepped`` in the last one; ``param_steps`` in total and ``native_steps``, those
            of them that the C kernel ran; ``skipped`` for non-finite gradients; ``grad_norm`` of the last update, or None where that
            needs a collective and ``grad_norm()`` was not called.
        """
        plan = self._plan
        known = self._norm_of is not None and self._norm_of[0] == self._norm_update()
        return {
            "updates": plan.updates,
            "params_stepped": plan.params_stepped,
            "param_steps": plan.param_steps,
            "native_steps": plan.native_steps,
            "skipped": plan.skipped,
            "grad_norm": self.grad_norm() if known or not any(map(self._shard_groups, self._params())) else None,
        }

    def _shard_groups(self, param: torch.Tensor) -> tuple:
        return attach.shard_groups(param, self._units)

    def _norm_update(self) -> int:
        return self._plan.update if self._plan.fired else self._plan.update - 1

    def grad_norm(self) -> float:
        """The 2-norm of all gradients of the last update (of the open one, once backward has run), from sums in double.

        A collective when parameters are sharded: every rank must call it, and one all-reduce runs per process group of shards.

        Returns:
            The norm; 0.0 before the first update.
        """
        update = self._norm_update()
        if self._norm_of is not None and self._norm_of[0] == update:
            return self._norm_of[1]
        sums: dict[tuple, float] = {}
        for slot, param in zip(self._plan.slots, self._params(), strict=False):
            key = (param.device.type, self._shard_groups(param))
            sums[key] = sums.get(key, 0.0) + (slot.grad_sq_sum if slot.last_update == update else 0.0)
        total = 0.0
        for (device, groups), part in sums.items():
            if groups:
                reduced = torch.tensor(part, dtype=torch.float64, device=device)
                for group in groups:
                    torch.distributed.all_reduce(reduced, group=group)
                part = reduced.item()
            total += part
        self._norm_of = (update, math.sqrt(total))
        return self._norm_of[1]

    def __repr__(self) -> str:
        params = self._params()
        trainable = sum(p.requires_grad for p in params)
        tensors = [v for s in self.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        mib = sum(getattr(t, "_local_tensor", t).nbytes for t in tensors) / 2**20
        how = "armed: steps inside backward" if self.armed else "not armed: steps in step()"
        return f"{super().__repr__()}[{how}; {trainable} of {len(params)} parameters trainable; state {mib:.1f} MiB]"

    # ---- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's, plus ``bwdfuse_format``: only tensors, numbers, strings, lists and dicts. ``torch.optim`` loads it.

        Raises:
            AccumulationError: an update was left half done, so this is not the state of any update.
        """
        if self._plan.poison:
            raise AccumulationError(self._plan.poison)
        return {**super().state_dict(), "bwdfuse_format": checkpoint.FORMAT}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, from here or from ``torch.optim``. Hyper-parameters come from the file, implementation flags do not.

        A half-done update is forgotten. Missing group options take this optimizer's defaults. States take this optimizer's
        ``state_dtype``; rounding them to a smaller one is said in a warning.

        Raises:
            ConfigError: written by a newer bwdfuse, incomplete, of other shapes, or with an option that does not exist here.
            ValueError: torch's own, for other groups. Nothing was changed.
        """
        checkpoint.check(self, state_dict, self._state_names)
        super().load_state_dict(state_dict)
        checkpoint.restore_states(self, state_dict, self._state_names)
        self._plan.acknowledge()

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("_rule", "_fixed", "nonfinite", "state_dtype")}
        return {**super().__getstate__(), **own, "_rearm": self.armed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        copied = "_plan" not in self.__dict__  # by pickle or deepcopy, not by load_state_dict
        super().__setstate__({k: v for k, v in state.items() if k != "_rearm"})
        if copied:
            self._make_plan()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            group.update(_NEUTRAL, **self._fixed, fused=self.defaults["fused"])
            for param in group["params"]:
                if self.state.get(param):
                    checkpoint.normalise_step(self.state[param])
                elif self.armed and self._needs_state(param):
                    self._init_state(param)
        if state.get("_rearm"):
            self.arm()

    # ---- options -----------------------------------------------------------------------------------------------

    def _check_groups(self) -> None:
        for group in self.param_groups:
            self._refuse_implementation(group)

    def _refuse_implementation(self, group: dict[str, Any]) -> None:
        for name, why in _WHY_NOT.items():
            if group.get(name):
                raise ConfigError(f"{self._name}({name}={group[name]!r}): {why}")
        for name, value in self._fixed.items():
            if bool(group.get(name, value)) is not value:
                raise ConfigError(f"{self._name}({name}={group[name]!r}): {self._why_fixed(name, group[name])}")

    def _why_fixed(self, name: str, value: Any) -> str:
        """Why an option of a param group cannot differ from the optimizer's, with the way out."""
        raise NotImplementedError

    def _check_options(self, group: dict[str, Any]) -> None:
        """Raises ConfigError for an option of a param group that cannot be honoured."""
        raise NotImplementedError
