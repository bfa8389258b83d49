"""Makes a SGLang server that we started keep our promises about adapters: what is put right, in which process."""

from __future__ import annotations

import functools
import os
import sys

from .terms import CPU_VARIABLE

_SCHEDULER = "sglang.srt.managers.scheduler"


def hook() -> None:
    """Have this process changed as soon as SGLang is about to use it: where it looks for plug-ins of others.

    What can't be changed ends the process, and the server with it.
    """
    from sglang.srt import plugins

    stock = plugins.load_plugins

    @functools.wraps(stock)
    def load_plugins() -> None:
        stock()
        if _SCHEDULER in sys.modules:
            # other processes have no use for what this imports
            change_scheduler()

    plugins.load_plugins = load_plugins


def change_scheduler() -> None:
    """Raises UnsupportedSglang."""
    from . import scheduler, seeds

    scheduler.patch()
    seeds.patch()
    if os.environ.get(CPU_VARIABLE) == "1":
        from . import cpu_standins, versions

        versions.check(versions.CPU_SEAMS)
        cpu_standins.compute_experts_in_torch()
        cpu_standins.hash_seeds_in_torch()
