"""The trainer's time is shared by what is measured, not by how often somebody asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.training.fairness import Shares, Stage, Turns

from .rig import Rig


@given(st.dictionaries(st.sampled_from("abcd"), st.floats(0.01, 5.0), min_size=2))
def test_whoever_always_wants_gets_the_same_time(cost: dict[str, float]) -> None:
    """No two are ever further apart than the longest of their turns."""
    shares = Shares()
    used = dict.fromkeys(cost, 0.0)
    for _ in range(200):
        name = shares.pick(cost)
        shares.charge(name, cost[name])
        used[name] += cost[name]
        assert max(used.values()) - min(used.values()) <= max(cost.values()) + 1e-6


def test_a_pause_saves_nothing_up() -> None:
    shares = Shares()
    for _ in range(100):
        shares.charge(shares.pick(["busy"]), 1.0)
    picked = []
    for _ in range(10):
        name = shares.pick(["busy", "back"])
        shares.charge(name, 1.0)
        picked.append(name)
    assert picked.count("busy") >= 4


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def order_of(turns: Turns, clock: Clock, *, pause: Callable[[], Awaitable[None]]) -> list[str]:
    """Two names that ask again after a pause: one holds the lock for 4 seconds, the other for 1."""
    order: list[str] = []

    async def work(name: str, seconds: float, times: int) -> None:
        for _ in range(times):
            async with turns.turn(name):
                order.append(name)
                await asyncio.sleep(0.002)
                clock.now += seconds
            await pause()

    await asyncio.gather(work("long", 4.0, 3), work("short", 1.0, 12))
    return order


async def test_short_operations_are_not_held_up_by_long_ones() -> None:
    clock = Clock()

    async def write_the_result() -> None:
        await asyncio.sleep(0.001)

    order = await order_of(Turns(grace_s=5.0, clock=clock), clock, pause=write_the_result)
    assert [order[:place].count("short") for place, name in enumerate(order) if name == "long"] == [0, 4, 8]


async def test_the_lock_is_not_kept_for_one_who_does_not_come() -> None:
    clock = Clock()
    turns = Turns(grace_s=0.01, clock=clock)

    async def go_away() -> None:
        await asyncio.sleep(0.05)

    order = await asyncio.wait_for(order_of(turns, clock, pause=go_away), 20)
    assert sorted(order) == ["long"] * 3 + ["short"] * 12


async def test_one_who_leaves_while_waiting_blocks_nobody() -> None:
    turns = Turns()
    released = asyncio.Event()

    async def hold() -> None:
        async with turns.turn("first"):
            await released.wait()

    async def want(name: str) -> str:
        async with turns.turn(name):
            return name

    holder = asyncio.create_task(hold())
    await asyncio.sleep(0)
    leaver, stayer = asyncio.create_task(want("leaver")), asyncio.create_task(want("stayer"))
    await asyncio.sleep(0)
    leaver.cancel()
    released.set()
    # and one who is told of his turn and is cancelled before he takes it
    assert await asyncio.wait_for(stayer, 5) == "stayer"
    await holder
    with pytest.raises(asyncio.CancelledError):
        await leaver
    assert await asyncio.wait_for(want("later"), 5) == "later"


async def test_one_who_is_cancelled_just_as_his_turn_comes_passes_it_on() -> None:
    turns = Turns()
    release = asyncio.Event()

    async def hold() -> None:
        async with turns.turn("first"):
            await release.wait()

    async def want(name: str) -> str:
        async with turns.turn(name):
            return name

    holder = asyncio.create_task(hold())
    await asyncio.sleep(0)
    unlucky = asyncio.create_task(want("unlucky"))
    await asyncio.sleep(0)
    behind = asyncio.create_task(want("behind"))
    await asyncio.sleep(0)
    release.set()
    await holder
    unlucky.cancel()
    assert await asyncio.wait_for(behind, 5) == "behind"


async def test_two_runs_share_the_trainer_by_its_time(rig: Rig) -> None:
    """Ten short operations go to each long one, as long as both runs have something to do."""
    session = await rig.session()
    long, short = await rig.run(session, 0), await rig.run(session, 1)
    rig.trainer.seconds |= {long: 0.3, short: 0.03}
    asked = [await rig.step(long, seq) for seq in range(1, 5)]
    asked += [await rig.step(short, seq) for seq in range(1, 21)]
    for accepted in asked:
        await rig.result(accepted)
    order = [policy for policy, _, _ in rig.trainer.log]
    third = [place for place, policy in enumerate(order) if policy == long][2]
    assert order[:third].count(short) >= 4
    assert [number for policy, _, number in rig.trainer.log if policy == short] == list(range(1, 21))


async def test_a_run_finishes_its_step_before_the_next_one_begins(rig: Rig) -> None:
    """Else all finish together, and while all their clients sample, nothing trains."""
    session = await rig.session()
    runs = [await rig.run(session, place) for place in range(3)]
    rig.trainer.pause_s = 0.5
    asked = []
    for run in runs:
        asked += [await rig.train(run, 1), await rig.step(run, 2), await rig.train(run, 3), await rig.step(run, 4)]
    for accepted in asked:
        await rig.result(accepted)
    order = [(policy, kind) for policy, kind, _ in rig.trainer.log]
    steps = [place for place, (_, kind) in enumerate(order) if kind == "optim_step"]
    assert len(steps) == 6
    assert all(order[place - 1] == (order[place][0], "forward_backward") for place in steps)
    assert sorted(policy for policy, _ in order[:6:2]) == sorted(runs)


async def test_a_step_that_is_finished_holds_up_nobody() -> None:
    """Who comes with the next batch instead of the optimiser's step waits like anybody else."""
    clock = Clock()
    turns = Turns(grace_s=60.0, sure_grace_s=60.0, clock=clock)
    order: list[str] = []

    async def work(name: str, *stages: Stage) -> None:
        left = list(stages)
        for stage in stages:
            async with turns.turn(name, stage, lambda: len(left) > 1):
                order.append(f"{name}{left[0].value}")
                await asyncio.sleep(0.001)
                clock.now += 1.0
            left.pop(0)

    batch, step = Stage.GRADIENTS, Stage.OPTIMISER
    await asyncio.wait_for(asyncio.gather(work("a", batch, batch, step, step), work("b", batch, step)), 20)
    assert order == ["a0", "b0", "b1", "a0", "a1", "a1"]
