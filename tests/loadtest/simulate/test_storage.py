"""The model of storage: it hangs as real storage does, also for whoever gives up."""

from __future__ import annotations

import asyncio
import random

import pytest

from loadtest.simulate.clock import simulate
from loadtest.simulate.storage import ArtifactStore, Faults, MemoryArena, MemoryFetcher
from sidecar.extents import HEADER_BYTES, Extent
from tests.loadtest.simulate.support import constants
from wire.outcomes import DeadlinePassed

EXTENT = Extent(HEADER_BYTES, 1000, 1)


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("hanging", [False, True])
def test_a_fetch_that_hangs_ends_past_its_time_out_even_if_it_was_cancelled(cancelled: bool, hanging: bool) -> None:
    told: list[float] = []

    async def scene() -> tuple[float, BaseException | None]:
        loop = asyncio.get_running_loop()
        store = ArtifactStore(constants(fetch_s=4.0), random.Random(1))
        store.faults = Faults(hanging=1.0 if hanging else 0.0)
        fetcher = MemoryFetcher(store, MemoryArena("segment", 1 << 20), timeout_s=10.0)
        fetch = loop.create_task(fetcher.fetch("d", EXTENT, lambda message: told.append(loop.time())))
        await asyncio.sleep(1.0)
        if cancelled:
            fetch.cancel()
        await asyncio.wait([fetch])
        return loop.time(), None if fetch.cancelled() else fetch.exception()

    ended, error = simulate(scene)
    assert told == ([pytest.approx(10.0)] if hanging else [])
    if cancelled:
        assert (ended, error) == (pytest.approx(15.0 if hanging else 1.0), None)
    else:
        assert ended == pytest.approx(19.0 if hanging else 4.0)
        assert isinstance(error, DeadlinePassed) == hanging
