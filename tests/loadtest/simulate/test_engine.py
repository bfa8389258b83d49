"""The engine model against schedules reckoned by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from backends.interface import Removal
from loadtest.simulate.clock import simulate
from loadtest.simulate.engine import BASE_CONTENT, DIED, EngineModel, Sequence
from tests.loadtest.simulate.support import constants


class Bench:
    """An engine, and what came out of it: (time, name, content) of tokens, and the ends of calls."""

    def __init__(self, slots: int = 2, **changes: Any) -> None:
        self.engine = EngineModel(constants(**changes), slots)
        self.tokens: list[tuple[float, str, str]] = []
        self.ends: list[tuple[float, str, object]] = []
        self.failures: list[str] = []
        self._loop = asyncio.get_running_loop()

    def ask(self, name: str, adapter: str = "", prompt: int = 1, tokens: int = 1) -> Sequence:
        def token(content: str, last: bool) -> None:
            self.tokens.append((round(self._loop.time(), 6), name, content))

        sequence = Sequence(adapter, prompt, tokens, token, self.failures.append)
        if not self.engine.submit(sequence):
            self.failures.append("unknown adapter")
        return sequence

    def install(self, adapter: str, content: str = "", seconds: float = 2.0) -> None:
        self.engine.install(adapter, seconds, lambda: content or adapter, self._end(adapter))

    def remove(self, adapter: str) -> None:
        self.engine.remove(adapter, self._end(adapter))

    def _end(self, adapter: str) -> Callable[[Removal | str | None], None]:
        return lambda result: self.ends.append((round(self._loop.time(), 6), adapter, result))

    def times(self, name: str) -> list[float]:
        return [at for at, who, _ in self.tokens if who == name]


def run(scene: Callable[[], Any]) -> Any:
    async def main() -> Any:
        bench = scene()
        await asyncio.sleep(1000)
        return bench

    return simulate(main)


def test_one_request_has_a_token_a_step() -> None:
    def scene() -> Bench:
        bench = Bench()
        bench.ask("a", tokens=3)
        return bench

    assert run(scene).tokens == [(1.0, "a", BASE_CONTENT), (2.0, "a", BASE_CONTENT), (3.0, "a", BASE_CONTENT)]


def test_what_comes_during_a_step_is_in_the_next() -> None:
    def scene() -> Bench:
        bench = Bench()
        bench.ask("a", tokens=3)
        asyncio.get_running_loop().call_at(1.5, lambda: bench.ask("b", tokens=2))
        return bench

    bench = run(scene)
    assert bench.times("a") == [1.0, 2.0, 3.0]
    assert bench.times("b") == [3.0, 4.0]


def test_sequences_adapters_and_prompts_make_a_step_longer() -> None:
    def scene() -> Bench:
        bench = Bench(
            sequence_s=0.1, prefill_s=0.01, adapters_s=2.0, adapter_s=0.2, adapter_prompt_s=3.0, adapter_prefill_s=0.001
        )
        bench.install("x", seconds=0.0)
        loop = asyncio.get_running_loop()
        loop.call_at(1.0, lambda: (bench.ask("a", "x", prompt=10, tokens=2), bench.ask("b", prompt=20)))
        return bench

    bench = run(scene)
    # the first request begins a step at once: 1 + 0.1 + 0.1 of its prompt, 2 + 0.2 + 3 + 0.01 of its adapter; the next
    # step has a token of it, 0.1 + 2 + 0.2, and the second request with its prompt, 0.1 + 0.2
    assert bench.times("a") == pytest.approx([7.41, 11.01])
    assert bench.times("b") == pytest.approx([11.01])


def test_a_long_prompt_takes_several_steps_and_others_go_on() -> None:
    def scene() -> Bench:
        bench = Bench(step_tokens=4)
        bench.ask("a", tokens=5)
        asyncio.get_running_loop().call_at(0.5, lambda: bench.ask("long", prompt=7))
        return bench

    # beside the token of "a" three are left in each step: 3 + 3 + 1 of the prompt
    bench = run(scene)
    assert bench.times("a") == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert bench.times("long") == [4.0]


def test_no_more_run_at_once_than_the_batch_holds() -> None:
    def scene() -> Bench:
        bench = Bench(max_batch=2)
        for name in "abc":
            bench.ask(name, tokens=2)
        return bench

    bench = run(scene)
    # "a" began alone, the others had come by its second step
    assert (bench.times("a"), bench.times("b"), bench.times("c")) == ([1.0, 2.0], [2.0, 3.0], [3.0, 4.0])


def test_loads_that_take_longer_than_a_share_of_a_step_have_one_each() -> None:
    def scene() -> Bench:
        bench = Bench(slots=3)
        bench.ask("a", tokens=4)
        asyncio.get_running_loop().call_at(0.5, lambda: (bench.install("x"), bench.install("y")))
        return bench

    bench = run(scene)
    assert bench.ends == [(3.0, "x", None), (6.0, "y", None)]
    assert bench.times("a") == [1.0, 4.0, 7.0, 8.0]


def test_as_many_loads_run_between_two_steps_as_a_share_of_a_step_has_room_for() -> None:
    def scene() -> Bench:
        bench = Bench(slots=4)
        bench.ask("a", tokens=3)
        asyncio.get_running_loop().call_at(0.5, lambda: [bench.install(name, seconds=0.1) for name in "wxyz"])
        return bench

    bench = run(scene)
    # a quarter of a step of one second
    assert bench.ends == [(1.1, "w", None), (1.2, "x", None), (2.3, "y", None), (2.4, "z", None)]
    assert bench.times("a") == [1.0, 2.2, 3.4]


def test_all_loads_run_at_once_where_nothing_is_computed() -> None:
    def scene() -> Bench:
        bench = Bench(slots=3)
        for name in "xyz":
            bench.install(name)
        return bench

    assert run(scene).ends == [(2.0, "x", None), (4.0, "y", None), (6.0, "z", None)]


def test_a_removal_waits_for_no_load_and_is_busy_for_one_that_waits() -> None:
    def scene() -> Bench:
        bench = Bench(slots=4)
        bench.install("old", seconds=0.0)
        loop = asyncio.get_running_loop()
        loop.call_at(1.0, lambda: bench.ask("a", tokens=4))
        loop.call_at(1.5, lambda: [bench.install(name) for name in "xy"])
        loop.call_at(1.6, lambda: [bench.remove(name) for name in ("y", "old")])
        return bench

    assert run(scene).ends == [
        (0.0, "old", None),
        (4.0, "x", None),
        (4.5, "y", Removal.BUSY),
        (5.0, "old", Removal.REMOVED),
        (8.0, "y", None),
    ]


def test_calls_sent_one_by_one_let_a_step_in_between() -> None:
    def scene() -> Bench:
        bench = Bench(slots=3)
        bench.ask("a", tokens=3)
        loop = asyncio.get_running_loop()

        def next_one(_: object) -> None:
            loop.call_later(0.001, lambda: bench.install("y"))

        loop.call_at(0.5, lambda: bench.engine.install("x", 2.0, lambda: "x", next_one))
        return bench

    bench = run(scene)
    assert bench.times("a") == [1.0, 4.0, 7.0]
    assert bench.ends == [(6.0, "y", None)]


def test_a_slot_answers_with_what_was_written_into_it() -> None:
    def scene() -> Bench:
        bench = Bench()
        bench.install("x", content="bytes of x", seconds=0.5)
        asyncio.get_running_loop().call_at(1.0, lambda: bench.ask("a", "x"))
        return bench

    assert run(scene).tokens == [(2.0, "a", "bytes of x")]


def test_a_removal_is_busy_while_a_request_names_the_adapter() -> None:
    def scene() -> Bench:
        bench = Bench()
        bench.install("x", seconds=0.5)
        loop = asyncio.get_running_loop()
        loop.call_at(1.0, lambda: bench.ask("a", "x", tokens=2))
        loop.call_at(1.5, lambda: bench.remove("x"))
        loop.call_at(9.0, lambda: (bench.remove("x"), bench.remove("x")))
        return bench

    bench = run(scene)
    assert [end for _, _, end in bench.ends] == [None, Removal.BUSY, Removal.REMOVED, Removal.ABSENT]
    assert bench.times("a") == [2.0, 3.5]


def test_full_slots_and_lost_bytes_fail_an_install_and_take_nothing() -> None:
    def gone() -> str:
        raise OSError("the extent was given away")

    def scene() -> Bench:
        bench = Bench(slots=1)
        bench.engine.install("x", 1.0, gone, bench._end("x"))
        bench.install("y")
        bench.install("z")
        return bench

    bench = run(scene)
    assert bench.ends == [
        (1.0, "x", "the extent was given away"),
        (3.0, "y", None),
        (5.0, "z", "no free slot: 1 of 1 are taken"),
    ]


def test_an_aborted_request_frees_its_adapter() -> None:
    def scene() -> Bench:
        bench = Bench()
        bench.install("x", seconds=0.5)
        loop = asyncio.get_running_loop()
        asked: list[Sequence] = []
        loop.call_at(1.0, lambda: asked.append(bench.ask("a", "x", tokens=100)))
        loop.call_at(2.5, lambda: bench.engine.abort(asked[0]))
        loop.call_at(5.0, lambda: bench.remove("x"))
        return bench

    bench = run(scene)
    assert bench.times("a") == [2.0]
    assert bench.ends[-1] == (5.5, "x", Removal.REMOVED)
    assert bench.engine.unfinished == 0


def test_death_fails_everything_under_way() -> None:
    def scene() -> Bench:
        bench = Bench()
        bench.ask("a", tokens=9)
        loop = asyncio.get_running_loop()
        loop.call_at(0.5, lambda: bench.install("x"))
        loop.call_at(1.5, bench.engine.die)
        loop.call_at(2.0, lambda: bench.ask("late"))
        return bench

    bench = run(scene)
    assert bench.failures == [DIED, "unknown adapter"]
    assert bench.ends == [(1.5, "x", DIED)]
