"""Bytes taken from another node, whatever that one does: they are right, or come from the store."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec import structs

from catalog.blobs import BlobStore
from sidecar.arena import Arena
from sidecar.effects import StartFetch
from sidecar.events import AnyEvent, PeerFailed, RevisionOffered
from sidecar.extents import HEADER_BYTES, Extent
from sidecar.fetch import Fetcher
from sidecar.neighbours import MAX_PEERS
from sidecar.peers import Peers
from sidecar.service import Sidecar
from sidecar.settings import SidecarSettings
from wire.node import FleetKeys, Granted
from wire.outcomes import ArtifactUnavailable, DeadlinePassed
from wire.peers import AnswerOfPeer, AskOfPeer, Given, NotGiven, Peer, Take, WhyNot
from wire.sockets import ZEROMQ, CurveKeys, Reply, Requester, Responder, Sockets, make_keys

from .bench import settings
from .conftest import Gateway, Store, config, running, until
from .fake_engine import FakeBackend

DATA = os.urandom(3_500_000)
DIGEST = blake3(DATA).hexdigest()
WRONG = os.urandom(1 << 20)


def node(sockets: Path, store: Store, name: str, **changes: object) -> SidecarSettings:
    folder = sockets / name
    folder.mkdir()
    given: dict[str, object] = {
        "node": name, "bytes_endpoint": f"ipc://{folder}/bytes", "arena_bytes": 32 << 20, "full_state_every_s": 60.0,
    }  # fmt: skip
    return config(folder, store, **{**given, **changes})


@asynccontextmanager
async def serving(settings: SidecarSettings) -> AsyncIterator[tuple[Sidecar, Gateway]]:
    """A node and its gateway."""
    async with running(settings, FakeBackend()) as sidecar:
        gateway = Gateway(settings)
        try:
            yield sidecar, gateway
        finally:
            gateway.close()


def at(settings: SidecarSettings) -> Peer:
    return Peer(settings.node, settings.bytes_endpoint)


async def load(gateway: Gateway, digest: str, data: bytes, *peers: Peer) -> None:
    assert isinstance(await gateway.ask(digest, len(data), peers=peers), Granted)


def holds(sidecar: Sidecar, digest: str, data: bytes) -> bool:
    with sidecar.arena.read(sidecar.machine.state.cache.extent(digest)) as view:
        return bytes(view) == data


async def test_what_one_node_has_the_other_takes_and_the_store_is_left_alone(sockets: Path, store: Store) -> None:
    first, second = node(sockets, store, "n1"), node(sockets, store, "n2")
    digest = store.put(DATA)
    async with serving(first) as (giver, one), serving(second) as (taker, two):
        await load(one, digest, DATA)
        store.blobs.remove(digest)
        await load(two, digest, DATA, at(first))
        assert holds(taker, digest, DATA)
        assert taker.machine.state.arrived_bytes == {"peer": len(DATA)}
        await until(lambda: giver.machine.state.counts["given_bytes"] == len(DATA))
        assert not giver.machine.state.cache._held, "nothing is kept for who has left"


async def test_bytes_that_are_on_their_way_are_waited_for(
    sockets: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = node(sockets, store, "n1"), node(sockets, store, "n2")
    digest = store.put(DATA)
    async with serving(first) as (giver, one), serving(second) as (taker, two):
        go_on, fetch = asyncio.Event(), giver._fetcher.fetch

        async def slow(*arguments: Any) -> Any:
            await go_on.wait()
            return await fetch(*arguments)

        monkeypatch.setattr(giver._fetcher, "fetch", slow)
        loading = asyncio.create_task(load(one, digest, DATA))
        await until(lambda: giver.machine.state.cache.get(digest) is not None)
        taking = asyncio.create_task(load(two, digest, DATA, at(first)))
        await until(lambda: bool(giver._giver and giver._giver._waiting))
        go_on.set()
        await asyncio.gather(loading, taking)
        assert taker.machine.state.arrived_bytes == {"peer": len(DATA)}


async def test_two_nodes_that_were_told_of_each_other_do_not_wait_for_each_other(sockets: Path, store: Store) -> None:
    first, second = node(sockets, store, "n1"), node(sockets, store, "n2")
    digest = store.put(DATA)
    async with serving(first) as (one, gateway), serving(second) as (other, another):
        async with asyncio.timeout(10.0):
            await asyncio.gather(load(gateway, digest, DATA, at(second)), load(another, digest, DATA, at(first)))
        assert one.machine.state.counts["given_bytes"] + other.machine.state.counts["given_bytes"] <= len(DATA)


async def test_who_is_getting_it_from_another_names_that_one(sockets: Path, store: Store) -> None:
    first, second, third = (node(sockets, store, name) for name in ("n1", "n2", "n3"))
    digest = store.put(DATA)
    async with serving(first) as (giver, one), serving(second) as (between, _), serving(third) as (taker, three):
        await load(one, digest, DATA)
        store.blobs.remove(digest)
        entry = between.machine.state.cache.reserve(digest, len(DATA), 0.0)
        assert entry is not None
        between.machine.state.cache.ask(digest, (at(first), at(third)))
        await load(three, digest, DATA, at(second))
        assert taker.machine.state.arrived_bytes == {"peer": len(DATA)}
        await until(lambda: giver.machine.state.counts["given_bytes"] == len(DATA))


@pytest.mark.parametrize(
    "named",
    [
        Peer("n9", "tcp://127.0.0.1:9"), Peer("n9", "tcp://127.0.0.1:9", make_keys()[0]), Peer("n1", "ipc:///nowhere"),
        Peer("wrong", "ipc:///nowhere"), Peer("n" * 1000, "ipc:///nowhere"), Peer("n9\nn8", "ipc:///nowhere"),
    ],
    ids=["not of this host", "key that nobody knows", "itself", "gave wrong bytes", "long", "lines"],
)  # fmt: skip
async def test_not_whoever_is_named_is_asked(sockets: Path, store: Store, named: Peer) -> None:
    digest = store.put(DATA)
    one = Peer("one", f"ipc://{sockets}/one")

    def name_it(ask: AskOfPeer, reply: Reply[AnswerOfPeer]) -> None:
        reply(NotGiven(why=WhyNot.ABSENT, message="m", peers=(named,)))

    responder: Responder[AskOfPeer, AnswerOfPeer] = Responder(one.endpoint, AskOfPeer, AnswerOfPeer, name_it)
    async with serving(node(sockets, store, "n1")) as (taker, gateway):
        taker._apply(PeerFailed(node="wrong", wrong=True, message="m"))
        await load(gateway, digest, DATA, one)
        assert list(taker._peers._wires) == [one]
        assert taker.machine.state.arrived_bytes == {"store": len(DATA)}
    responder.close()


async def test_a_way_from_node_to_node_has_an_end(sockets: Path, store: Store) -> None:
    digest = store.put(DATA)
    asked: list[int] = []

    def name_the_next(number: int) -> Responder[AskOfPeer, AnswerOfPeer]:
        def answer(ask: AskOfPeer, reply: Reply[AnswerOfPeer]) -> None:
            if isinstance(ask, Take):
                asked.append(number)
                reply(NotGiven(why=WhyNot.ABSENT, message="m", peers=(peers[(number + 1) % len(peers)],)))

        return Responder(peers[number].endpoint, AskOfPeer, AnswerOfPeer, answer)

    peers = [Peer(f"p{number}", f"ipc://{sockets}/p{number}") for number in range(10)]
    responders = [name_the_next(number) for number in range(len(peers))]
    async with serving(node(sockets, store, "n1")) as (taker, gateway):
        await load(gateway, digest, DATA, peers[8])
        assert asked == [8, 9, 0, 1, 2, 3]
        assert taker.machine.state.arrived_bytes == {"store": len(DATA)}
    for responder in responders:
        responder.close()


async def test_a_revision_that_is_published_is_read_from_the_store_by_one_of_those_that_have_its_policy(
    sockets: Path, store: Store
) -> None:
    old, new = os.urandom(100_000), DATA
    before, after = store.put(old), store.put(new)
    first, second, third = (node(sockets, store, name) for name in ("n1", "n2", "n3"))
    async with serving(first) as (a, one), serving(second) as (b, two), serving(third) as (c, three):
        for gateway, told in ((one, ()), (two, (at(first),)), (three, (at(second),))):
            assert isinstance(await gateway.ask(before, len(old), policy="acme/p", peers=told), Granted)
        # no guess is fetched while loads may still come
        await asyncio.sleep(0.5)
        for sidecar in (a, b, c):
            sidecar._apply(RevisionOffered(policy="acme/p", digest=after, size=len(new)))
        for sidecar in (a, b, c):
            await until(lambda: sidecar.machine.state.cache.resident(after))  # noqa: B023
        came = [dict(sidecar.machine.state.arrived_bytes) for sidecar in (a, b, c)]
        assert came == [{"store": len(old + new)}, {"peer": len(old + new)}, {"peer": len(old + new)}]


async def test_whoever_takes_no_part_neither_gives_nor_asks(sockets: Path, store: Store) -> None:
    first, second = node(sockets, store, "n1"), node(sockets, store, "n2", peer_transfers=0)
    digest = store.put(DATA)
    async with serving(first) as (giver, one), serving(second) as (taker, two):
        await load(one, digest, DATA)
        await load(two, digest, DATA, at(first))
        assert taker.machine.state.arrived_bytes == {"store": len(DATA)}
        assert taker.machine.state.bytes_endpoint == ""
        assert giver.machine.state.counts["given_bytes"] == 0


def bad_giver(behaviour: str) -> Callable[[AskOfPeer, Reply[AnswerOfPeer]], None]:
    """A node that has the bytes, and does not give them as it should."""

    def answer(ask: AskOfPeer, reply: Reply[AnswerOfPeer]) -> None:
        if not isinstance(ask, Take):
            return
        data, size = DATA[ask.offset : ask.offset + ask.length], len(DATA)
        late = ask.offset >= 2 << 20
        if behaviour == "wrong bytes" and late:
            data = WRONG[: ask.length]
        elif behaviour == "another size":
            size += 1
        elif (behaviour == "silent from the start") or (behaviour == "silent in the middle" and late):
            return
        elif behaviour == "short in the middle" and late:
            data = data[:-1]
        elif behaviour in ("busy", "absent") or (behaviour == "has no more" and late):
            reply(NotGiven(why=WhyNot.BUSY if behaviour == "busy" else WhyNot.ABSENT, message="m"))
            return
        reply(Given(data=data, size=size))

    return answer


@pytest.mark.parametrize(
    ("behaviour", "wrong"),
    [
        ("wrong bytes", True), ("another size", True), ("silent from the start", False),
        ("silent in the middle", False), ("short in the middle", False), ("has no more", False), ("busy", None),
        ("absent", None), ("not there", False),
    ],
)  # fmt: skip
async def test_who_gives_badly_costs_a_fetch_and_no_more(
    sockets: Path, store: Store, behaviour: str, wrong: bool | None
) -> None:
    digest = store.put(DATA)
    bad = Peer("bad", f"ipc://{sockets}/bad")
    responder: Responder[AskOfPeer, AnswerOfPeer] | None = None
    if behaviour != "not there":
        responder = Responder(bad.endpoint, AskOfPeer, AnswerOfPeer, bad_giver(behaviour), max_bytes=2 << 20)
    async with serving(node(sockets, store, "n1")) as (taker, gateway):
        await load(gateway, digest, DATA, bad)
        state = taker.machine.state
        assert holds(taker, digest, DATA)
        assert state.arrived_bytes == {"store": len(DATA)}
        assert state.neighbours.faults == ({"bad": 1} if wrong else {})
        state.neighbours.told("acme/p", "0" * 64, (bad,))
        asked_again = bool(state.neighbours.of("0" * 64, asyncio.get_running_loop().time()))
        assert asked_again is (wrong is None)
    if responder is not None:
        responder.close()


async def test_what_another_node_says_is_logged_and_kept_in_short(
    sockets: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    digest, long = store.put(DATA), "no\n" * 300_000
    refuses, stops = (Peer(name, f"ipc://{sockets}/{name}") for name in ("refuses", "stops"))

    def refuse(ask: AskOfPeer, reply: Reply[AnswerOfPeer]) -> None:
        reply(NotGiven(why=WhyNot.BUSY, message=long))

    def stop(ask: AskOfPeer, reply: Reply[AnswerOfPeer]) -> None:
        if isinstance(ask, Take) and ask.offset == 0:
            reply(Given(data=DATA[: ask.length], size=len(DATA)))
        else:
            refuse(ask, reply)

    responders: list[Responder[AskOfPeer, AnswerOfPeer]] = [
        Responder(peer.endpoint, AskOfPeer, AnswerOfPeer, answer) for peer, answer in ((refuses, refuse), (stops, stop))
    ]
    caplog.set_level(logging.INFO)
    async with serving(node(sockets, store, "n1")) as (taker, gateway):
        await load(gateway, digest, DATA, refuses, stops)
        silence = taker.machine.state.neighbours._silent.blocked("stops", asyncio.get_running_loop().time())
    said = [*(record.getMessage() for record in caplog.records), silence.message if silence else ""]
    assert len([text for text in said if "no\\nno" in text]) >= 2
    assert all(len(text) < 400 and "\n" not in text for text in said)
    for responder in responders:
        responder.close()


async def test_of_many_that_are_named_few_are_looked_at() -> None:
    looked_at: list[Peer] = []
    many = tuple(Peer(f"n{number}", "ipc:///x") for number in range(20_000))
    peers = Peers(settings(), pytest.fail, lambda peer: looked_at.append(peer) is None, sockets=naming(many))
    answer = await peers.take(Peer("one", "ipc:///one"), DIGEST, 0, 1, 1.0)
    peers.close()
    assert isinstance(answer, NotGiven)
    assert looked_at == list(answer.peers) == list(many[:MAX_PEERS])


async def test_the_second_is_asked_where_the_first_has_nothing(sockets: Path, store: Store) -> None:
    first, second, third = (node(sockets, store, name) for name in ("n1", "n2", "n3"))
    digest = store.put(DATA)
    async with serving(first), serving(second) as (_, two), serving(third) as (taker, three):
        await load(two, digest, DATA)
        await load(three, digest, DATA, at(first), at(second))
        assert taker.machine.state.arrived_bytes == {"peer": len(DATA)}


async def test_over_tcp_only_nodes_that_a_gateway_knows(sockets: Path, store: Store) -> None:
    keys = {name: make_keys() for name in ("n1", "n2", "n3", "stranger")}
    curves = {name: CurveKeys(*pair, peers=()) for name, pair in keys.items()}
    first = structs.replace(node(sockets, store, "n1", bytes_endpoint="tcp://127.0.0.1:*"), curve=curves["n1"])  # type: ignore[arg-type]
    async with running(first, FakeBackend()) as giver:
        endpoint = giver.machine.state.bytes_endpoint
        assert giver._giver is not None
        peer = Peer("n1", endpoint, keys["n1"][0])
        giver._giver.allow(FleetKeys(gateway="g1", keys={"n2": keys["n2"][0], "n3": keys["n3"][0]}))
        giver._giver.allow(FleetKeys(gateway="g2", keys={"n4": "no key"}))
        for name, pair in keys.items():
            assert giver._giver.knows(Peer(name, "tcp://127.0.0.1:9", pair[0])) is (name in ("n2", "n3"))
        assert not giver._giver.knows(Peer("n3", "tcp://127.0.0.1:9", keys["n2"][0])), "n2 under another's name"
        for name, let_in in (("n2", True), ("stranger", False)):
            asker: Requester[AskOfPeer, AnswerOfPeer] = Requester(
                endpoint,
                AskOfPeer,
                AnswerOfPeer,
                curve=curves[name],
                server_public=peer.public,
                gone=ArtifactUnavailable,
            )
            take = Take(digest="0" * 64, node=name, offset=0, length=1)
            if let_in:
                answer = await asker.request(take, timeout_s=10.0)
                assert isinstance(answer, NotGiven) and answer.why is WhyNot.ABSENT
                giver._giver.allow(FleetKeys(gateway="g1", keys={"n3": keys["n3"][0]}))
                with pytest.raises(DeadlinePassed):
                    await asker.request(take, timeout_s=0.5)
            else:
                with pytest.raises((ArtifactUnavailable, DeadlinePassed)):
                    await asker.request(take, timeout_s=10.0)
            asker.close()


# what a node does with one ask for a chunk; as few as one wrong byte is another digest
MOVES = ("gives", "gives", "gives", "gives", "wrong", "short", "refuses", "dies")


class Scripted:
    """A node on a wire that is none: it answers by its script, and well once that is at its end."""

    def __init__(self, data: bytes, script: list[str]) -> None:
        self.data, self.script = data, list(script)
        self.gave_wrong = self.failed = False

    async def request(self, ask: Take, *, timeout_s: float) -> AnswerOfPeer:
        await asyncio.sleep(0)
        move = self.script.pop(0) if self.script else "gives"
        data = self.data[ask.offset : ask.offset + ask.length]
        if move == "dies":
            self.script = ["dies"] * 20
            raise ArtifactUnavailable("it went away")
        if move == "refuses":
            return NotGiven(why=WhyNot.BUSY, message="m")
        if move == "wrong":
            data = bytes([data[0] ^ 1]) + data[1:]
        return Given(data=data[:-1] if move == "short" else data, size=len(self.data))

    def send(self, ask: AskOfPeer) -> bool:
        return True

    def close(self) -> None:
        """There is nothing."""


class Naming(Scripted):
    def __init__(self, named: tuple[Peer, ...]) -> None:
        super().__init__(DATA, [])
        self.named = named

    async def request(self, ask: Take, *, timeout_s: float) -> AnswerOfPeer:
        return NotGiven(why=WhyNot.ABSENT, message="m", peers=self.named)


def naming(named: tuple[Peer, ...]) -> Sockets:
    """To nodes that all name others."""
    return ZEROMQ._replace(requester=lambda *_, **__: Naming(named))


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scripts=st.lists(st.lists(st.sampled_from(MOVES), max_size=4), min_size=1, max_size=2),
    chunks=st.integers(1, 3),
    stored=st.booleans(),
)
def test_whatever_the_others_do_only_right_bytes_are_sealed(
    tmp_path: Path, scripts: list[list[str]], chunks: int, stored: bool
) -> None:
    data = DATA[: (chunks << 20) - 17]
    digest = blake3(data).hexdigest()
    extent = Extent(HEADER_BYTES, len(data), 1)
    wires = [Scripted(data, script) for script in scripts]
    told: list[AnyEvent] = []

    async def fetch(arena: Arena) -> str | None:
        names = {f"ipc:///{number}": wire for number, wire in enumerate(wires)}
        sockets = ZEROMQ._replace(requester=lambda endpoint, *_, **__: names[endpoint])
        peers = Peers(settings(), told.append, lambda peer: True, sockets=sockets)
        others = tuple(Peer(str(number), f"ipc:///{number}") for number in range(len(wires)))
        fetcher = Fetcher(blobs, arena, workers=1, timeout_s=20.0)
        effect = StartFetch(digest=digest, extent=extent, peers=others)
        try:
            source = await fetcher.fetch(digest, extent, pytest.fail, peers.sources(effect))
            await asyncio.sleep(0)
            return "store" if source is None else source.name
        finally:
            peers.close()
            fetcher.close()

    blobs = BlobStore(tmp_path / "store")
    blobs.remove(digest)
    if stored:
        with blobs.writer() as writer:
            writer.write(data)
            writer.commit()
    arena = Arena("segment", 4 << 20, root=tmp_path)
    try:
        source = None
        with suppress(ArtifactUnavailable):
            source = asyncio.run(fetch(arena))
        whole = any(set(script[:chunks]) <= {"gives"} for script in scripts)
        assert source == ("peer" if whole else "store" if stored else None)
        if source is None:
            with pytest.raises(ArtifactUnavailable):
                arena.read(extent)
        else:
            with arena.read(extent) as view:
                assert bytes(view) == data
        blamed = {event.node for event in told if isinstance(event, PeerFailed) and event.wrong}
        assert blamed == {
            str(number) for number, script in enumerate(scripts) if is_wrong(script, scripts[:number], chunks)
        }
    finally:
        arena.close()


def is_wrong(script: list[str], before: list[list[str]], chunks: int) -> bool:
    """Whether all that came of a node that was asked was of the right length, and not right."""
    asked = not any(set(earlier[:chunks]) <= {"gives"} for earlier in before)
    took = script[:chunks]
    return asked and "wrong" in took and set(took) <= {"gives", "wrong"}
