"""bwdfuse steps each parameter inside backward and frees its gradient at once.

``bwdfuse.AdamW(model.parameters(), lr=1e-5, bwd_hook=True)`` in a loop of your own, ``optim.bwd_hook=true`` in verl.
Importing it needs neither torch nor a GPU; what is missing is said by ``bwdfuse.show()`` and raised on use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bwdfuse._version import __version__
from bwdfuse.errors import AccumulationError, BwdFuseError, ConfigError

if TYPE_CHECKING:
    from bwdfuse import functional, memory, optim
    from bwdfuse.optim import Adam, AdamW
    from bwdfuse.report import build_info, show
    from bwdfuse.threads import get_num_threads, set_num_threads

__all__ = [
    "AccumulationError",
    "Adam",
    "AdamW",
    "BwdFuseError",
    "ConfigError",
    "__version__",
    "build_info",
    "functional",
    "get_num_threads",
    "memory",
    "optim",
    "set_num_threads",
    "show",
]

# Loaded on first use: torch takes seconds to import and the NumPy entry points do not need it.
_LAZY = {
    "Adam": ("bwdfuse.optim", "Adam"),
    "AdamW": ("bwdfuse.optim", "AdamW"),
    "build_info": ("bwdfuse.report", "build_info"),
    "get_num_threads": ("bwdfuse.threads", "get_num_threads"),
    "set_num_threads": ("bwdfuse.threads", "set_num_threads"),
    "show": ("bwdfuse.report", "show"),
    "functional": ("bwdfuse.functional", None),
    "memory": ("bwdfuse.memory", None),
    "optim": ("bwdfuse.optim", None),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'bwdfuse' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    loaded = import_module(module)
    value = getattr(loaded, attribute) if attribute else loaded
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
