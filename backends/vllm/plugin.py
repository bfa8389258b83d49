"""The ``vllm.general_plugins`` entry point: makes a vLLM server that we started keep our promises about adapters.

vLLM calls ``register`` in every process of an engine: the API server, the engine core, the workers. It does nothing
unless the driver's environment variable is set, so that another vLLM of the same environment stays as it is.
"""

from __future__ import annotations

import os
from multiprocessing import current_process, parent_process

from .terms import ACTIVATION


def register() -> None:
    """Patch this process. Raises UnsupportedVllm, which ends the engine at its start, where it can't be done."""
    if os.environ.get(ACTIVATION) != "1":
        return
    from . import core, worker

    core.patch()
    worker.patch()
    if _is_cpu():
        from . import cpu_kernels, cpu_moe

        cpu_kernels.patch()
        cpu_moe.patch()
        if not _serves_http():
            from . import cpu_sampling

            cpu_sampling.patch()
    if _serves_http():
        from . import server

        server.patch()


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _serves_http() -> bool:
    # importing the server's modules costs the engine core seconds and memory that it has no use for
    return parent_process() is None or current_process().name.startswith("ApiServer")
