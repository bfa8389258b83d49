"""One engine of each backend for the whole suite."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from backends.interface import Health
from tests.backends.support import Caller

from .stage import START_S, Contract


@pytest_asyncio.fixture(scope="package", loop_scope="package", params=["vllm", "sglang"])
async def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Contract]:
    stage = Contract(tmp_path_factory.mktemp(f"contract-{request.param}"), request.param)
    try:
        async with stage.running(START_S):
            yield stage
    finally:
        stage.arena.close()


@pytest_asyncio.fixture(loop_scope="package")
async def caller(stage: Contract) -> AsyncIterator[Caller]:
    async with stage.called() as caller:
        yield caller
    assert await stage.backend.health() is Health.READY, stage.backend.detail
