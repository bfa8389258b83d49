"""The machine against a model of its world: whatever happens in whatever order, the promises hold."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import invariant

from sidecar.admission import Stage
from sidecar.audit import audit
from sidecar.effects import StartInstall
from sidecar.events import Tick
from sidecar.report import residencies
from sidecar.slots import SlotState
from wire.node import Residency

from .bench import digest
from .node_model import NodeModel


class Node(NodeModel):
    @invariant()
    def books_are_right(self) -> None:
        assert audit(self.machine.state) == []

    @invariant()
    def reports_tell_of_every_change(self) -> None:
        stands = residencies(self.machine.state)
        for number in range(5):
            known = digest(number)
            assert self.told.get(known, Residency.ABSENT) is stands.get(known, Residency.ABSENT)

    @invariant()
    def in_flight_is_bounded(self) -> None:
        permitted, paced = 2, 3
        assert self.machine.state.queue.in_flight <= permitted + paced + permitted - 1

    @invariant()
    def every_lease_is_counted_once(self) -> None:
        counted = Counter(lease.engine for lease in self.machine.state.leases)
        for name, engine in self.machine.state.engines.items():
            assert engine.outstanding == counted[name] >= 0

    @invariant()
    def who_has_no_answer_yet_is_waiting(self) -> None:
        waiting = {ask for load in self.machine.state.queue for w in load.waiters.values() for ask in w.asks}
        assert waiting == self.unanswered

    @invariant()
    def what_no_load_needs_is_not_pinned(self) -> None:
        state = self.machine.state
        needed = {load.digest for load in state.queue if load.stage is not Stage.WAITING}
        needed |= {slot.digest for engine in state.engines.values() for slot in engine.slots.values() if slot.unsure}
        needed |= {call.digest for call in self.under_way() if isinstance(call, StartInstall)}
        assert {digest for digest in state.cache if state.cache.pinned(digest)} <= needed

    @invariant()
    def a_fetch_that_a_load_needs_is_not_cancelled(self) -> None:
        fetching = {load.digest for load in self.machine.state.queue if load.stage is Stage.FETCHING}
        for wanted in fetching:
            assert wanted in self.fetches, "a load waits for a fetch that nobody performs"
            assert self.fetches[wanted].extent.generation not in self.cancelled, "it holds a permit for nothing"

    @invariant()
    def unsure_installs_keep_their_bytes(self) -> None:
        for engine in self.machine.state.engines.values():
            for slot in engine.slots.values():
                if slot.unsure and slot.state is SlotState.INSTALLING:
                    assert self.machine.state.cache.pinned(slot.digest)

    @invariant()
    def what_is_said_to_serve_serves(self) -> None:
        for name, engine in self.machine.state.engines.items():
            serving = {adapter for adapter in engine.slots if engine.serving(adapter)}
            assert serving <= self.engines[name].adapters

    @invariant()
    def nothing_new_waits_on_a_cordoned_node(self) -> None:
        if self.cordoned:
            waiting = [load for load in self.machine.state.queue if load.stage is Stage.WAITING and not load.background]
            assert all(load.started for load in waiting), "only what had begun"

    @invariant()
    def nothing_was_found_wrong(self) -> None:
        assert self.machine.state.counts["audit_findings"] == 0

    def teardown(self) -> None:
        """Once the world behaves, everybody gets an answer and everything is given back."""
        if not any(model.up for model in self.engines.values()):
            self.boot("e1", frozenset())
        for _ in range(60):
            self.the_world_works()
            while self.orphans:
                self.late_call_ends()
            self.now += 1.0
            self.held.clear()
            self.send(Tick())
        assert not self.unanswered
        state = self.machine.state
        assert len(state.leases) == 0
        assert not list(state.queue)
        assert not any(state.cache.pinned(digest) for digest in state.cache)
        assert not any(slot.unsure for engine in state.engines.values() for slot in engine.slots.values())


class TestNode(Node.TestCase):  # type: ignore[name-defined, misc]
    settings = hypothesis_settings(max_examples=150, stateful_step_count=60, deadline=None)


@pytest.mark.soak
class TestNodeAtLength(Node.TestCase):  # type: ignore[name-defined, misc]
    settings = hypothesis_settings(max_examples=4000, stateful_step_count=80, deadline=None)
