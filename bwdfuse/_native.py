"""Loads the C extension once and keeps the reason when it cannot be loaded, so that importing bwdfuse never fails."""

from types import ModuleType
from typing import Any

extension: ModuleType | None = None
reason: str | None = None

try:
    from bwdfuse import _C

    extension = _C
except ImportError as exc:
    reason = f"{type(exc).__name__}: {exc}"


def native() -> Any:
    """The extension module ``bwdfuse._C``.

    Raises:
        BwdFuseError: it could not be loaded; the message says why.
    """
    if extension is None:
        from bwdfuse.errors import BwdFuseError

        raise BwdFuseError(
            f"the native part of bwdfuse could not be loaded ({reason}). Reinstall it with "
            "`pip install --force-reinstall --no-deps bwdfuse`, or build it from source with a C compiler"
        )
    return extension
