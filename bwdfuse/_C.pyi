"""Types of the native extension; the docstrings are in the C sources."""

from collections.abc import Callable
from typing import Any, TypedDict, final

class _Rule(TypedDict):
    states: tuple[str, ...]
    hypers: tuple[str, ...]
    defaults: dict[str, float]

def rules() -> dict[str, _Rule]: ...
def isa_info() -> dict[str, Any]: ...
def build_info() -> dict[str, Any]: ...
def get_num_threads() -> int: ...
def set_num_threads(n: int, /) -> None: ...
def step_(
    rule: str, arrays: tuple[Any, ...], hypers: tuple[float, ...], /, *, step: float, isa: str | None
) -> tuple[float, int]: ...

@final
class Slot:
    name: str
    group: int
    armed: bool
    last_update: int
    grad_sq_sum: float
    def hook(self, param: Any, /) -> None: ...
    def step(self) -> None: ...
    def zero_grad(self, *args: Any, **kwargs: Any) -> None: ...

@final
class Plan:
    slots: list[Slot]
    poison: str | None
    fired: int
    params_stepped: int
    update: int
    updates: int
    param_steps: int
    native_steps: int
    skipped: int
    @property
    def exchange(self) -> bool: ...
    def __new__(
        cls,
        optimizer: Any,
        rule: str,
        *,
        nonfinite: str = "off",
        kernel: Callable[..., Any] | None = None,
        exchange: bool = True,
    ) -> Plan: ...
    def add(self, param: Any, /, group: int, name: str, armed: bool) -> Slot: ...
    def step(self) -> int: ...
    def close(self) -> int: ...
    def acknowledge(self) -> None: ...
    def end_backward(self) -> None: ...
    def forget(self) -> None: ...
