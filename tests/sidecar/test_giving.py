"""What a node gives to others: within bounds, for as long as they take it, out of its arena or its disk."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from blake3 import blake3

from sidecar import giving
from sidecar.arena import Arena
from sidecar.disk import DiskTier
from sidecar.events import AnyEvent
from sidecar.extents import HEADER_BYTES, Extent
from sidecar.giving import Giver
from sidecar.machine import Machine
from sidecar.policies.lru import Lru
from sidecar.service import Sidecar
from sidecar.settings import SidecarSettings
from tests.wire.helpers import raw_dealer
from wire.drops import Drop
from wire.frames import pack_ask
from wire.outcomes import ArtifactUnavailable
from wire.peers import CHUNK_CREDITS, MAX_CHUNK_BYTES, AnswerOfPeer, AskOfPeer, Given, NotGiven, Take, Taken, WhyNot
from wire.sockets import ZEROMQ, Codec, Requester

from .bench import settings
from .conftest import Gateway, Store, config, running, until
from .fake_engine import FakeBackend

DATA = [os.urandom(1_500_000) for _ in range(3)]
DIGESTS = [blake3(data).hexdigest() for data in DATA]
MOST = 2


class Taker:
    """Another node's connection."""

    def __init__(self, endpoint: str, name: str = "n2") -> None:
        self.name = name
        self.wire: Requester[AskOfPeer, AnswerOfPeer] = Requester(
            endpoint, AskOfPeer, AnswerOfPeer, gone=ArtifactUnavailable, max_bytes=2 << 20
        )

    async def take(
        self, digest: str = DIGESTS[0], offset: int = 0, length: int = 1000, timeout_s: float = 10.0
    ) -> AnswerOfPeer:
        ask = Take(digest=digest, node=self.name, offset=offset, length=length)
        return await self.wire.request(ask, timeout_s=timeout_s)

    def taken(self, digest: str = DIGESTS[0]) -> None:
        self.wire.send(Taken(digest=digest))


def why(answer: AnswerOfPeer) -> WhyNot:
    assert isinstance(answer, NotGiven), answer
    return answer.why


@pytest.fixture
def node(sockets: Path, store: Store) -> SidecarSettings:
    return config(sockets, store, bytes_endpoint=f"ipc://{sockets}/bytes", peer_transfers=MOST, arena_bytes=8 << 20)


@pytest.fixture
async def giver(node: SidecarSettings, store: Store) -> AsyncIterator[Sidecar]:
    """A node that has the first revision in its arena."""
    async with running(node, FakeBackend()) as sidecar:
        gateway = Gateway(node)
        await gateway.ask(store.put(DATA[0]), len(DATA[0]))
        yield sidecar
        gateway.close()


@pytest.fixture
async def takers(node: SidecarSettings) -> AsyncIterator[list[Taker]]:
    takers = [Taker(node.bytes_endpoint, f"n{number}") for number in range(2, 6)]
    yield takers
    for taker in takers:
        taker.wire.close()


def gives(sidecar: Sidecar) -> int:
    assert sidecar._giver is not None
    return len(sidecar._giver._gives)


def chunks(sidecar: Sidecar) -> int:
    assert sidecar._giver is not None
    return sum(give.given for give in sidecar._giver._gives.values()) // MAX_CHUNK_BYTES


async def test_any_part_is_given_and_counted_when_it_ends(giver: Sidecar, takers: list[Taker]) -> None:
    answer = await takers[0].take(offset=1_400_000, length=100_000)
    assert answer == Given(data=DATA[0][1_400_000:], size=len(DATA[0]))
    assert giver.machine.state.counts["given_bytes"] == 0
    takers[0].taken()
    await until(lambda: giver.machine.state.counts["given_bytes"] == 100_000)


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        ({"length": 0}, "length"), ({"length": MAX_CHUNK_BYTES + 1}, "length"), ({"offset": -1}, "offset"),
        ({"offset": len(DATA[0]), "length": 1}, "offset"), ({"digest": "../../etc/passwd"}, "digest"),
    ],
)  # fmt: skip
async def test_what_is_out_of_bounds_is_refused_by_name(
    giver: Sidecar, takers: list[Taker], ask: dict[str, int], field: str
) -> None:
    answer = await takers[0].take(**ask)  # type: ignore[arg-type]
    assert isinstance(answer, NotGiven)
    assert (answer.why, answer.field) == (WhyNot.INVALID, field)


async def test_what_is_not_here_is_told_at_once(giver: Sidecar, takers: list[Taker]) -> None:
    assert why(await takers[0].take(DIGESTS[1])) is WhyNot.ABSENT


async def test_an_asker_s_name_is_logged_in_short(
    giver: Sidecar, node: SidecarSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    taker = Taker(node.bytes_endpoint, "n2\n" * 1000)
    await taker.take()
    taker.wire.close()
    said = [record.getMessage() for record in caplog.records if "to node" in record.getMessage()]
    assert len(said) == 1 and len(said[0]) < 300 and "\n" not in said[0]


async def test_past_the_bound_others_wait_for_their_turn(giver: Sidecar, takers: list[Taker]) -> None:
    for taker in takers[:MOST]:
        assert isinstance(await taker.take(), Given)
    third = asyncio.create_task(takers[MOST].take())
    await asyncio.sleep(0.2)
    assert not third.done()
    assert gives(giver) == MOST
    takers[0].taken()
    assert isinstance(await third, Given)


async def test_past_those_who_wait_the_answer_is_busy(
    giver: Sidecar, takers: list[Taker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving, "_MAX_WAITING", 1)
    for taker in takers[:MOST]:
        await taker.take()
    waiting = asyncio.create_task(takers[MOST].take(timeout_s=1.0))
    await until(lambda: bool(giver._giver and giver._giver._waiting))
    assert why(await takers[MOST + 1].take()) is WhyNot.BUSY
    assert why(await waiting) is WhyNot.BUSY, "told before it stops waiting"


@pytest.mark.parametrize("one_way", [False, True])
async def test_nobody_waits_longer_than_others_however_late_its_deadline(
    giver: Sidecar, takers: list[Taker], monkeypatch: pytest.MonkeyPatch, one_way: bool
) -> None:
    monkeypatch.setattr(giving, "_LONGEST_WAIT_S", 0.5)
    assert giver._giver is not None
    for taker in takers[:MOST]:
        await taker.take()
    started = time.monotonic()
    if one_way:
        # what is sent before there is a connection is lost
        await takers[MOST].take(DIGESTS[1])
        assert takers[MOST].wire.send(Take(digest=DIGESTS[0], node="n4", offset=0, length=1))
        await until(lambda: bool(giver._giver and giver._giver._waiting))
        await until(lambda: not (giver._giver and giver._giver._waiting))
    else:
        assert why(await takers[MOST].take(timeout_s=86_400.0)) is WhyNot.BUSY
    assert time.monotonic() - started < giving._IDLE_S, "not because others left"


async def test_for_who_does_not_read_no_more_is_queued_than_it_may_ask_for(
    giver: Sidecar, node: SidecarSettings
) -> None:
    assert giver._giver is not None
    responder, bound = giver._giver._responder, 2 * CHUNK_CREDITS * MOST
    ask = Codec[AskOfPeer](AskOfPeer).encode(Take(digest=DIGESTS[0], node="n2", offset=0, length=MAX_CHUNK_BYTES))
    given = 0
    with raw_dealer(node.bytes_endpoint, rcvhwm=1) as dealer:
        while not responder.dropped[Drop.QUEUE_FULL] and given < 2 * bound:
            given += 1
            dealer.send(pack_ask(given, 60.0, ask))
            await until(lambda: responder.dropped[Drop.QUEUE_FULL] > 0 or chunks(giver) == given)  # noqa: B023
        assert bound <= given < bound + 8
        assert gives(giver) == 0, "it has left"


async def test_one_taker_has_no_more_chunks_asked_for_than_its_credits(giver: Sidecar, takers: list[Taker]) -> None:
    await takers[0].take()
    answers = await asyncio.gather(*(takers[0].take(length=MAX_CHUNK_BYTES) for _ in range(CHUNK_CREDITS + 4)))
    refused = [answer for answer in answers if isinstance(answer, NotGiven)]
    assert all(answer.field == "node" for answer in refused)
    assert len(answers) - len(refused) >= CHUNK_CREDITS


async def test_who_leaves_without_a_word_holds_nothing_for_long(
    giver: Sidecar, takers: list[Taker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving, "_IDLE_S", 0.2)
    await takers[0].take()
    assert giver.machine.state.cache.pinned(DIGESTS[0])
    takers[0].wire.close()
    await until(lambda: not giver.machine.state.cache.pinned(DIGESTS[0]))
    assert gives(giver) == 0


async def test_nobody_holds_the_arena_s_room_for_ever(
    giver: Sidecar, takers: list[Taker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving, "_LONGEST_S", 0.3)
    async with asyncio.timeout(10.0):
        while gives(giver) == 0:
            await takers[0].take()
        while gives(giver):
            takers[0].wire.send(Take(digest=DIGESTS[0], node="n2", offset=0, length=1))
            await asyncio.sleep(0.05)


class Held:
    """A giver whose node has nothing in its arena, and copies on its disk."""

    def __init__(self, sockets: Path, tmp_path: Path) -> None:
        told = settings(bytes_endpoint=f"ipc://{sockets}/bytes")
        self.events: list[AnyEvent] = []
        self.arena = Arena("segment", 8 << 20, root=tmp_path)
        self.disk = DiskTier(tmp_path / "tier", 8 << 20, self.arena, Lru())
        self.giver = Giver(told, Machine(told).state, self.events.append, sockets=ZEROMQ)
        self.giver.open(self.arena, self.disk)

    def keep(self, number: int) -> None:
        extent = Extent(HEADER_BYTES, len(DATA[number]), 1)
        with self.arena.begin(extent) as view:
            view[:] = DATA[number]
        self.arena.seal(extent, DIGESTS[number])
        self.disk.arrived(DIGESTS[number], extent)
        self.disk.wait()
        self.arena.clear(extent)

    async def close(self) -> None:
        await self.giver.close()
        self.disk.close()
        self.arena.close()


async def test_what_only_the_disk_has_is_given_even_when_it_leaves_meanwhile(sockets: Path, tmp_path: Path) -> None:
    held = Held(sockets, tmp_path)
    held.keep(1)
    taker = Taker(held.giver.endpoint)
    first = await taker.take(DIGESTS[1], length=1 << 20)
    held.disk.distrust(DIGESTS[1])
    second = await taker.take(DIGESTS[1], offset=1 << 20, length=len(DATA[1]) - (1 << 20))
    assert isinstance(first, Given) and isinstance(second, Given)
    assert first.data + second.data == DATA[1]
    taker.taken(DIGESTS[1])
    await until(lambda: bool(held.events))
    assert why(await taker.take(DIGESTS[1])) is WhyNot.ABSENT
    taker.wire.close()
    await held.close()


async def test_closing_ends_what_is_under_way(sockets: Path, tmp_path: Path) -> None:
    held = Held(sockets, tmp_path)
    held.keep(1)
    taker = Taker(held.giver.endpoint)
    await taker.take(DIGESTS[1])
    await held.close()
    with pytest.raises(ArtifactUnavailable):
        await taker.take(DIGESTS[1], timeout_s=5.0)
    taker.wire.close()
