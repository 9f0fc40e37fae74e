"""What bwdfuse raises. Importable without torch.

A message names the option, its value, why it cannot be honoured, and the exact setting to use instead.
"""


class BwdFuseError(RuntimeError):
    """Base of every error that bwdfuse raises on its own account."""


class ConfigError(BwdFuseError, ValueError):
    """A configuration that stepping inside backward cannot honour. Nothing was changed when it is raised."""


class AccumulationError(BwdFuseError):
    """A parameter received a second gradient in one update, or an update was left half done."""
