"""Entry point of the group ``verl.plugins``: verl imports it at the end of ``import verl``.

It only tells Hydra about our keys; nothing of verl changes, and nothing heavy is imported, until ``optim.bwd_hook`` is
on. verl hides an error raised here in its debug log, and Hydra would then call the key unknown, so say it aloud.
Where plugins are switched off (``VERL_USE_EXTERNAL_PLUGINS=none``), ``VERL_USE_EXTERNAL_MODULES=bwdfuse.trainers.verl``
does the same.
"""

import logging
from typing import Any

try:
    from hydra.core.plugins import Plugins

    from bwdfuse.trainers._verl_hydra import BwdFuseConfigSource, BwdFuseSearchPath

    Plugins.instance().register(BwdFuseConfigSource)
    Plugins.instance().register(BwdFuseSearchPath)
except Exception as error:
    logging.getLogger(__name__).warning(
        "bwdfuse could not plug into verl, so optim.bwd_hook will be unknown: %s: %s", type(error).__name__, error
    )
    raise


def optimizer_config(*, bwd_hook: Any, nonfinite: Any, bwd_hook_facts: dict[str, Any], **stock_options: Any) -> Any:
    """The optimizer's config object, built by Hydra from ``optim``: verl's own class unless ``bwd_hook`` is on."""
    if bwd_hook is False:
        from hydra.utils import get_class

        return get_class(bwd_hook_facts["stock_target"])(**stock_options)

    from bwdfuse.trainers._verl_config import BwdHookOptimizerConfig

    return BwdHookOptimizerConfig(
        bwd_hook=bwd_hook, nonfinite=nonfinite, bwd_hook_facts=bwd_hook_facts, **stock_options
    )
