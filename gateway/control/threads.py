"""Work in threads that outlives nobody's hold on what it works with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``asyncio.to_thread``, but a cancelled caller goes on only once the thread is done.

    Whoever cleans up after it (closes the file that the thread writes to, say) must not come while it still runs.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            # looked at, so that it is not reported as one that nobody cared for
            work.exception()
        raise
