"""Loads in vLLM's core loop: answered at once, or later and between steps, and never half."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCoreProc

from backends.vllm import core
from backends.vllm.pace import SHARE, Pace
from backends.vllm.terms import FAILED, PENDING


class Core(EngineCoreProc):  # type: ignore[misc]
    """A core without an engine: its workers answer what they are told to."""

    def __init__(self, slots: int = 2) -> None:
        self.vllm_config = SimpleNamespace(lora_config=SimpleNamespace(max_loras=slots))
        self.scheduler = SimpleNamespace(requests={})
        self.working = True
        self.answers: dict[str, list[list[str]]] = {}
        self.called: list[tuple[str, tuple[Any, ...]]] = []
        self.now = 0.0
        self.futures: dict[int, Any] = {}
        self.takes_s: dict[str, float] = {}
        self.roost_pace = Pace(lambda: self.now)

    def has_work(self) -> bool:
        return self.working

    def step(self, seconds: float, *asked: int) -> int:
        """One turn of the loop, in which loads are ``asked`` for; how many loads began before the step."""
        begun = len(self.began())
        self.asked = list(asked)
        core.process_input_queue(self)
        self.now += seconds
        return len(self.began()) - begun

    def handle_calls(self) -> None:
        for number in self.asked:
            self.futures[number] = core.add_lora(self, request(number))

    def began(self) -> list[int]:
        return [args[0].lora_int_id for method, args in self.called if method == "roost_add_lora"]

    def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append((method, args))
        self.now += self.takes_s.get(method, 0.0)
        return self.answers[method].pop(0) if self.answers.get(method) else [""]


def request(lora_id: int) -> Any:
    return SimpleNamespace(lora_int_id=lora_id, lora_name=f"acme@{lora_id}", load_inplace=False)


def test_a_load_that_is_over_at_once_is_answered_at_once() -> None:
    engine = Core()
    assert core.add_lora(engine, request(1)) is True
    assert core.adapters_of(engine) == {1: "acme@1"}


def test_a_load_under_way_is_answered_between_steps() -> None:
    engine = Core()
    engine.answers = {
        "roost_add_lora": [[PENDING, ""]],
        "roost_finish_lora": [[PENDING, ""], [PENDING, ""], ["", ""]],
    }
    answer = core.add_lora(engine, request(1))
    assert isinstance(answer, Future)
    assert not answer.done()
    assert core.adapters_of(engine) == {}
    assert core.remove_unless_busy(engine, 1) == core.BUSY
    for done in (False, False, True):
        assert answer.done() is False
        core.finish_loads(engine)
        assert answer.done() is done
    assert answer.result(0) is True
    assert core.adapters_of(engine) == {1: "acme@1"}
    assert [args for method, args in engine.called if method == "roost_finish_lora"] == [(1, False)] * 3


def test_an_idle_core_waits_for_the_end() -> None:
    engine = Core()
    engine.working = False
    engine.answers = {"roost_add_lora": [[PENDING]]}
    assert core.add_lora(engine, request(1)) is True
    assert ("roost_finish_lora", (1, True)) in engine.called


def test_a_load_under_way_takes_its_slot() -> None:
    engine = Core(slots=1)
    engine.answers = {"roost_add_lora": [[PENDING]], "roost_finish_lora": [[PENDING]]}
    core.add_lora(engine, request(1))
    with pytest.raises(core.AdapterRefused, match="no free slot: 1 of 1"):
        core.add_lora(engine, request(2))
    with pytest.raises(core.AdapterRefused, match="id 1 is taken"):
        core.add_lora(engine, request(1))


@pytest.mark.parametrize("late", [False, True])
def test_what_one_worker_could_not_load_is_dropped_by_all(late: bool) -> None:
    engine = Core(slots=1)
    problem = f"{FAILED}extent 1 was given away"
    if late:
        engine.answers = {
            "roost_add_lora": [[PENDING, PENDING]], "roost_finish_lora": [["", PENDING], ["", problem]],
        }  # fmt: skip
        answer = core.add_lora(engine, request(1))
        assert isinstance(answer, Future)
        core.finish_loads(engine)
        assert not answer.done()
        core.finish_loads(engine)
        with pytest.raises(core.AdapterRefused, match="given away"):
            answer.result(0)
    else:
        engine.answers = {"roost_add_lora": [[problem, PENDING]]}
        with pytest.raises(core.AdapterRefused, match="given away"):
            core.add_lora(engine, request(1))
    assert engine.called[-1] == ("roost_drop_lora", (1,))
    assert core.adapters_of(engine) == {}
    assert core.add_lora(engine, request(2)) is True


def test_a_load_that_failed_while_it_was_asked_for_is_no_success() -> None:
    """Who calls in the engine's process looks at what comes back, not into a Future."""
    engine = Core()
    engine.working = False
    engine.answers = {"roost_add_lora": [[PENDING]], "roost_finish_lora": [[f"{FAILED}extent 1 was given away"]]}
    with pytest.raises(core.AdapterRefused, match="given away"):
        core.add_lora(engine, request(1))
    assert core.loads_of(engine) == {}
    assert core.adapters_of(engine) == {}


def answered(engine: Core) -> list[int]:
    return [number for number, answer in engine.futures.items() if answer is True or answer.done()]


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Core:
    """A core whose last step took 80 ms, and each of whose loads takes 8 ms."""
    monkeypatch.setattr(core, "_stock_process_input_queue", Core.handle_calls)
    engine = Core(slots=64)
    engine.takes_s["roost_add_lora"] = 0.008
    engine.step(0.08)
    return engine


def test_loads_take_a_share_of_a_step_between_two_of_them(busy: Core) -> None:
    assert busy.step(0.08, *range(1, 9)) == SHARE * 0.08 // 0.008 == 2
    assert answered(busy) == [1, 2]
    assert [busy.step(0.08) for _ in range(4)] == [2, 2, 2, 0]
    assert busy.began() == answered(busy) == list(range(1, 9))
    assert len(core.adapters_of(busy)) == 8


def test_a_load_runs_between_any_two_steps_however_short_they_are(busy: Core) -> None:
    busy.step(0.001)
    assert [busy.step(0.001, 1, 2, 3), busy.step(0.001), busy.step(0.001), busy.step(0.001)] == [1, 1, 1, 0]


def test_long_steps_let_more_loads_through(busy: Core) -> None:
    assert busy.step(1.6, *range(1, 40)) == 2
    assert busy.step(0.08) == 37


def test_an_idle_core_begins_all_that_wait(busy: Core) -> None:
    busy.step(0.08, *range(1, 9))
    busy.working = False
    assert busy.step(0.0, 9, 10) == 8
    assert answered(busy) == list(range(1, 11))


def test_a_load_that_waits_keeps_its_slot_and_its_id(busy: Core) -> None:
    busy.step(0.08, *range(1, 65))
    assert core.remove_unless_busy(busy, 64) == core.BUSY
    for number, why in ((65, "no free slot: 64 of 64"), (64, "id 64 is taken")):
        with pytest.raises(core.AdapterRefused, match=why):
            core.add_lora(busy, request(number))


def test_a_load_that_waited_and_is_refused_frees_its_slot(busy: Core) -> None:
    busy.step(0.08, 1, 2, 3, 4)
    busy.answers["roost_add_lora"] = [[""], [f"{FAILED}extent 4 was given away"]]
    busy.step(0.08)
    assert busy.futures[3].result(0)
    with pytest.raises(core.AdapterRefused, match="given away"):
        busy.futures[4].result(0)
    assert sorted(core.adapters_of(busy)) == [1, 2, 3]
    assert not core.loads_of(busy)
