"""The two settings that bwdfuse adds to a trainer. Knows no trainer and imports no torch."""

from dataclasses import dataclass

#: What to do with a gradient that is not finite: step anyway, leave that parameter as it is, or raise.
NONFINITE_POLICIES = ("off", "skip", "raise")


@dataclass(frozen=True)
class BwdHookConfig:
    """What the user asked for.

    Args:
        bwd_hook: Step every parameter inside backward, as soon as its gradient is complete, and free that gradient.
        nonfinite: One of :data:`NONFINITE_POLICIES`. ``skip`` and ``raise`` decide parameter by parameter and cost one
            more pass over each gradient.
    """

    bwd_hook: bool = False
    nonfinite: str = "off"
