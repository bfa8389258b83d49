"""The machine against a model of its world, other nodes included: the same promises hold, whatever these do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from msgspec import structs

from sidecar.effects import AnyEffect, ClearExtent, StartFetch
from sidecar.events import AnyEvent, Asked, FetchDone, GiveBegun, GiveEnded, PeerFailed
from sidecar.slots import SlotState
from wire.peers import Peer

from .test_machine import Node

PEERS = tuple(Peer(name, f"ipc:///nowhere/{name}") for name in ("n1", "n2", "n3", "n4"))
TOLD = st.lists(st.sampled_from(PEERS), max_size=3, unique=True).map(tuple)
# the shortest of a node's pauses: after one that was silent
PAUSE_S = 5.0


class NodeAmongOthers(Node):
    def __init__(self) -> None:
        super().__init__()
        self.peers: tuple[Peer, ...] = ()
        self.gives: dict[int, str] = {}
        self.made = 0
        # by name, and whether what it gave was wrong
        self.failed_at: dict[tuple[str, bool], float] = {}

    def send(self, event: AnyEvent) -> None:
        if isinstance(event, Asked) and event.request.digest:
            event = structs.replace(event, request=structs.replace(event.request, peers=self.peers))
        super().send(event)

    def perform(self, effect: AnyEffect) -> None:
        if isinstance(effect, StartFetch):
            names = [peer.node for peer in effect.peers]
            assert "n1" not in names, "asks itself"
            assert len(names) <= 2
            for name in names:
                failed_at = max(self.failed_at.get((name, wrong), -1e9) for wrong in (False, True))
                assert self.now - failed_at >= PAUSE_S, "asks who failed just now"
        super().perform(effect)

    def clear(self, effect: ClearExtent) -> None:
        assert effect.digest not in self.gives.values(), "evicted while it is given"
        super().clear(effect)

    @rule(peers=TOLD)
    def gateways_know_of(self, peers: tuple[Peer, ...]) -> None:
        self.peers = peers

    @precondition(lambda self: any(fetch.peers for fetch in self.fetches.values()))
    @rule(data=st.data(), ending=st.sampled_from(("gives", "dies", "gives wrong bytes")))
    def a_peer_is_asked(self, data: st.DataObject, ending: str) -> None:
        """Whatever comes of it, the fetch goes on: the next one is asked, or the store."""
        fetch = self.fetches[data.draw(st.sampled_from(sorted(d for d, f in self.fetches.items() if f.peers)))]
        name = data.draw(st.sampled_from(fetch.peers)).node
        if ending == "gives":
            del self.fetches[fetch.digest]
            self.cancelled.discard(fetch.extent.generation)
            # it answers again
            self.failed_at.pop((name, False), None)
            done = FetchDone(digest=fetch.digest, generation=fetch.extent.generation, source="peer", peer=name)
            self.send(done)
            return
        wrong = ending == "gives wrong bytes"
        self.failed_at[name, wrong] = self.now
        self.send(PeerFailed(node=name, wrong=wrong, message="m"))

    @precondition(lambda self: any(self.machine.state.cache.resident(digest) for digest in self.machine.state.cache))
    @rule(data=st.data())
    def another_node_takes(self, data: st.DataObject) -> None:
        cache = self.machine.state.cache
        digest = data.draw(st.sampled_from(sorted(digest for digest in cache if cache.resident(digest))))
        self.made += 1
        self.gives[self.made] = digest
        self.send(GiveBegun(give=self.made, digest=digest))

    @precondition(lambda self: self.gives)
    @rule(data=st.data())
    def it_has_taken_or_left(self, data: st.DataObject) -> None:
        self.end_give(data.draw(st.sampled_from(sorted(self.gives))))

    def end_give(self, number: int) -> None:
        self.send(GiveEnded(give=number, digest=self.gives.pop(number), given_bytes=1))

    @rule()
    def sidecar_restarts(self) -> None:
        self.gives.clear()
        self.failed_at.clear()
        super().sidecar_restarts()

    @invariant()
    def what_is_given_is_there(self) -> None:
        for digest in self.gives.values():
            assert self.machine.state.cache.resident(digest)

    @invariant()
    def what_no_load_needs_is_not_pinned(self) -> None:
        """Nor what nobody takes: a give that ended holds nothing."""
        cache = self.machine.state.cache
        given = {digest for digest in cache if self.gives_of(digest)}
        assert given == set(self.gives.values())

    def gives_of(self, digest: str) -> list[Any]:
        entry = self.machine.state.cache.get(digest)
        return [owner for owner in entry.pins if isinstance(owner, tuple) and owner[0] == "give"] if entry else []

    @invariant()
    def unsure_installs_keep_their_bytes(self) -> None:
        for engine in self.machine.state.engines.values():
            for slot in engine.slots.values():
                assert not slot.unsure or slot.state is not SlotState.INSTALLING or self.pinned(slot.digest)

    def pinned(self, digest: str) -> bool:
        return self.machine.state.cache.pinned(digest)

    def the_world_works(self) -> None:
        for number in list(self.gives):
            self.end_give(number)
        super().the_world_works()


class TestNodeAmongOthers(NodeAmongOthers.TestCase):  # type: ignore[name-defined, misc]
    settings = hypothesis_settings(max_examples=150, stateful_step_count=60, deadline=None)


@pytest.mark.soak
class TestNodeAmongOthersAtLength(NodeAmongOthers.TestCase):  # type: ignore[name-defined, misc]
    settings = hypothesis_settings(max_examples=4000, stateful_step_count=80, deadline=None)
