"""Loads the C extension once and keeps the reason when it cannot be loaded, so that importing bwdfuse never fails."""

try:
    from bwdfuse import _C as extension
except ImportError as exc:
    extension = None
    reason: str | None = f"{type(exc).__name__}: {exc}"
else:
    reason = None


def native():
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
