"""Loads in vLLM's core loop: answered at once, or later and between steps, and never half."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCoreProc

from backends.vllm import core
from backends.vllm.terms import FAILED, PENDING


class Core(EngineCoreProc):  # type: ignore[misc]
    """A core without an engine: its workers answer what they are told to."""

    def __init__(self, slots: int = 2) -> None:
        self.vllm_config = SimpleNamespace(lora_config=SimpleNamespace(max_loras=slots))
        self.scheduler = SimpleNamespace(requests={})
        self.working = True
        self.answers: dict[str, list[list[str]]] = {}
        self.called: list[tuple[str, tuple[Any, ...]]] = []

    def has_work(self) -> bool:
        return self.working

    def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append((method, args))
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
    core.finish_loads(engine)
    assert not answer.done()
    core.finish_loads(engine)
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
    engine.answers = {"roost_add_lora": [[PENDING]], "roost_finish_lora": [[f"{FAILED}extent 1 was given away"]]}
    with pytest.raises(core.AdapterRefused, match="given away"):
        core.add_lora(engine, request(1))
    assert core.loads_of(engine) == {}
    assert core.adapters_of(engine) == {}
