"""Engines of two backends on one node, and requests that one of them has no way to be asked."""

from __future__ import annotations

import msgspec
import pytest

from wire.outcomes import Outcome

from .bench import Bench, name


@pytest.fixture
def bench() -> Bench:
    """``e1`` is vLLM's and ``e2`` SGLang's."""
    bench = Bench(2, up=False)
    second = bench.machine.state.engines["e2"]
    second.settings = msgspec.structs.replace(second.settings, backend="sglang")
    bench.up("e1")
    bench.up("e2", max_rank=32)
    return bench


def load_on_sglang(bench: Bench, number: int) -> int:
    """An adapter whose load goes to ``e2``, since ``e1`` is busy; the ask, which waits for the install."""
    busy = bench.granted(bench.ask(None))
    assert busy.engine == "e1"
    ask = bench.ask(number)
    bench.fetched(number)
    assert "e2" in bench.calls
    return ask


@pytest.mark.parametrize("number", [None, 1])
def test_of_two_that_serve_the_one_that_can_be_asked_is_leased(bench: Bench, number: int | None) -> None:
    for engine in ("e1", "e2"):
        bench.down(engine)
        bench.up(engine, installed=(name(1),))
    asks = [bench.ask(number, not_by="sglang") for _ in range(4)]
    assert {bench.granted(ask).engine for ask in asks} == {"e1"}
    assert bench.granted(bench.ask(number)).engine == "e2"


def test_what_serves_where_it_can_not_be_asked_is_loaded_beside_it(bench: Bench) -> None:
    ask = load_on_sglang(bench, 1)
    bench.installed(1, "e2")
    assert bench.granted(ask).engine == "e2"
    other = bench.ask(1, not_by="sglang")
    bench.installed(1, "e1")
    assert not bench.fetches, "its bytes are in the arena"
    assert (bench.granted(other).engine, bench.granted(other).waited) == ("e1", True)
    assert bench.granted(bench.ask(1)).engine == "e2", "nothing changed for who can ask both"


def test_of_those_who_wait_for_one_load_each_gets_an_engine_that_can_be_asked(bench: Bench) -> None:
    ask = load_on_sglang(bench, 1)
    other = bench.ask(1, not_by="sglang")
    bench.installed(1, "e2")
    assert bench.granted(ask).engine == "e2"
    assert other not in bench.answers
    bench.installed(1, "e1")
    assert bench.granted(other).engine == "e1"


def test_a_load_that_has_no_engine_yet_goes_where_everybody_can_ask(bench: Bench) -> None:
    assert bench.granted(bench.ask(None)).engine == "e1"
    asks = [bench.ask(1), bench.ask(1, not_by="sglang")]
    bench.loaded(1, "e1")
    assert {bench.granted(ask).engine for ask in asks} == {"e1"}


def test_who_can_ask_any_engine_waits_for_no_slot_of_those_that_others_need(bench: Bench) -> None:
    bench.down("e1")
    bench.up("e1", slots=1)
    bench.ask(9)
    bench.loaded(9, "e1")
    ask, other = bench.ask(1), bench.ask(1, not_by="sglang")
    bench.loaded(1, "e2")
    assert bench.granted(ask).engine == "e2"
    assert other not in bench.answers


def test_an_engine_that_refuses_it_leaves_none_where_only_another_backend_is(bench: Bench) -> None:
    ask = bench.ask(1, not_by="sglang")
    bench.fetched(1)
    bench.rejected(1, "e1")
    assert (bench.refused(ask).outcome, bench.refused(ask).elsewhere) == (Outcome.UNFIT, True)
    ask = bench.ask(1)
    bench.installed(1, "e2")
    assert bench.granted(ask).engine == "e2"


def test_where_no_engine_can_be_asked_it_is_refused_at_once() -> None:
    bench = Bench()
    refused = bench.refused(bench.ask(1, not_by="vllm"))
    assert (refused.outcome, refused.elsewhere) == (Outcome.INVALID_REQUEST, True)
    assert not bench.fetches
    assert bench.refused(bench.ask(1, not_by="vllm", base="other")).outcome is Outcome.BASE_NOT_DEPLOYED
