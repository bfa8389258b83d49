from __future__ import annotations

import asyncio

import pytest

from loadtest.simulate.clock import NothingToCome, simulate


def test_a_day_passes_at_once_and_in_order() -> None:
    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        seen: list[tuple[str, float]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, round(loop.time(), 6)))

        await asyncio.gather(sleeper("late", 86_400.0), sleeper("early", 0.25), sleeper("middle", 3600.5))
        return seen

    assert simulate(main) == [("early", 0.25), ("middle", 3600.5), ("late", 86_400.0)]


def test_each_simulation_begins_at_zero() -> None:
    async def main() -> float:
        begun = asyncio.get_running_loop().time()
        await asyncio.sleep(5.0)
        return begun

    assert [simulate(main), simulate(main)] == [0.0, 0.0]


def test_deadlines_hold() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.0):
                await asyncio.sleep(8.0)
        return asyncio.get_running_loop().time()

    assert simulate(main) == pytest.approx(7.0)


def test_waiting_for_nothing_is_an_error_and_no_hang() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NothingToCome):
        simulate(main)
