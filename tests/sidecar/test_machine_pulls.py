"""The machine against a model of its world, trainers included: the same promises hold, whatever comes from them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from sidecar.admission import Stage
from sidecar.effects import AnyEffect, CancelPull, ClearExtent, StartPull
from sidecar.events import PullDone, PullFailed, TransferBound, TransferOffered, TransferWithdrawn
from wire.transfer import Offered

from .bench import BASE, digest
from .node_model import ADAPTERS
from .test_machine import Node


class Written(msgspec.Struct):
    """A transfer as its trainer has it: it will be revision ``number``."""

    number: int
    pull: StartPull | None = None
    bound: bool = False
    cancelled: bool = False


class PullingNode(Node):
    def __init__(self) -> None:
        super().__init__()
        self.transfers: dict[str, Written] = {}
        self.made = 0

    def perform(self, effect: AnyEffect) -> None:
        if isinstance(effect, StartPull):
            written = self.transfers[effect.transfer]
            assert written.pull is None, "pulled once"
            written.pull = effect
            self.place(effect.transfer, effect.extent)
        elif isinstance(effect, CancelPull):
            written = self.transfers[effect.transfer]
            assert written.pull is not None
            assert not written.cancelled, "told to end once"
            written.cancelled = True
        else:
            super().perform(effect)

    def clear(self, effect: ClearExtent) -> None:
        pulled = [name for name, place in self.extents.items() if place[0] == effect.extent.offset]
        if pulled and effect.digest not in self.extents:
            del self.extents[pulled[0]]
        else:
            super().clear(effect)

    @rule(number=ADAPTERS, expected=st.booleans())
    def trainer_writes(self, number: int, expected: bool) -> None:
        self.made += 1
        name = f"transfer-{self.made}"
        self.transfers[name] = Written(number)
        nodes = ("n1",) if expected else ()
        offer = Offered(transfer=name, policy=f"t/p{number % 2}", base=BASE, rank=8, size=10_000, nodes=nodes)
        self.send(TransferOffered(trainer="here", offer=offer))

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def digest_is_known(self, data: st.DataObject) -> None:
        self.bind(data.draw(st.sampled_from(sorted(self.transfers))))

    def bind(self, name: str) -> None:
        written = self.transfers[name]
        written.bound = True
        self.send(TransferBound(transfer=name, digest=digest(written.number)))

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def trainer_withdraws(self, data: st.DataObject) -> None:
        self.send(TransferWithdrawn(transfer=data.draw(st.sampled_from(sorted(self.transfers)))))

    @precondition(lambda self: any(written.pull for written in self.transfers.values()))
    @rule(data=st.data(), works=st.booleans())
    def pull_ends(self, data: st.DataObject, works: bool) -> None:
        under_way = sorted(name for name, written in self.transfers.items() if written.pull)
        self.end_pull(data.draw(st.sampled_from(under_way)), works)

    def end_pull(self, name: str, works: bool) -> None:
        written = self.transfers.pop(name)
        assert written.pull is not None
        generation = written.pull.extent.generation
        if works:
            self.send(PullDone(transfer=name, generation=generation, digest=digest(written.number)))
            where = self.extents.pop(name, None)
            if where is not None:
                self.extents[digest(written.number)] = where
        else:
            del self.extents[name]
            self.send(PullFailed(transfer=name, generation=generation, message="m"))

    @rule()
    def sidecar_restarts(self) -> None:
        self.transfers.clear()
        super().sidecar_restarts()

    @invariant()
    def a_fetch_that_a_load_needs_is_not_cancelled(self) -> None:
        pulled = {digest(written.number) for written in self.transfers.values() if written.pull and written.bound}
        fetching = {load.digest for load in self.machine.state.queue if load.stage is Stage.FETCHING}
        for wanted in fetching - pulled:
            assert wanted in self.fetches, "a load waits for bytes that nobody brings"
            assert self.fetches[wanted].extent.generation not in self.cancelled, "it holds a permit for nothing"

    def the_world_works(self) -> None:
        for name in [name for name, written in self.transfers.items() if written.pull]:
            self.end_pull(name, works=True)
        super().the_world_works()


class TestPullingNode(PullingNode.TestCase):  # type: ignore[name-defined, misc]
    settings = hypothesis_settings(max_examples=150, stateful_step_count=60, deadline=None)


@pytest.mark.soak
class TestPullingNodeAtLength(PullingNode.TestCase):  # type: ignore[name-defined, misc]
    settings = hypothesis_settings(max_examples=4000, stateful_step_count=80, deadline=None)
