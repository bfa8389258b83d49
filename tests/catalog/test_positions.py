from __future__ import annotations

import asyncio
import itertools

from catalog.positions import Positions


async def test_each_is_called_once_when_its_position_is_reached() -> None:
    positions = Positions(3)
    order: list[str] = []
    for seq in (9, 3, 5, 4):
        positions.when(
            seq, lambda seq=seq: order.append(f"{seq}"), timeout_s=60, otherwise=lambda: order.append("late")
        )
    assert (order, len(positions)) == (["3"], 3)
    positions.reach(5)
    positions.reach(4)
    assert (order, positions.reached) == (["3", "4", "5"], 5)
    positions.reach(100)
    assert order == ["3", "4", "5", "9"]
    assert len(positions) == 0


async def test_who_waited_too_long_is_called_otherwise_and_never_again() -> None:
    positions = Positions(0)
    late = asyncio.Event()
    order: list[str] = []
    positions.when(1, lambda: order.append("short"), timeout_s=0.0, otherwise=late.set)
    positions.when(1, lambda: order.append("long"), timeout_s=60, otherwise=lambda: order.append("never"))
    await asyncio.wait_for(late.wait(), 10)
    positions.reach(1)
    assert order == ["long"]


async def test_at_the_end_everybody_is_called_otherwise() -> None:
    positions = Positions(0)
    order: list[str] = []
    for number in range(3):
        positions.when(
            number + 1, lambda: order.append("then"), timeout_s=60, otherwise=lambda n=number: order.append(f"{n}")
        )
    positions.give_up()
    assert (order, len(positions)) == (["0", "1", "2"], 0)


async def test_who_gave_up_leaves_no_place_behind() -> None:
    positions = Positions(0)
    late, all_late = itertools.count(1), asyncio.Event()

    def count() -> None:
        if next(late) == 1000:
            all_late.set()

    called: list[str] = []
    positions.when(7, lambda: called.append("patient"), timeout_s=60, otherwise=count)
    for turn in range(1000):
        positions.when(1 << 40, lambda: called.append("never"), timeout_s=0.0, otherwise=count)
        if turn % 100 == 99:
            await asyncio.sleep(0.001)
    await asyncio.wait_for(all_late.wait(), 10)
    assert len(positions) == 1
    assert positions.places < 100
    positions.reach(7)
    assert called == ["patient"]
