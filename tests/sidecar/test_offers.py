"""What the registrar's feed tells a sidecar, over real sockets, and what the node makes of it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs

from sidecar.events import RevisionOffered
from sidecar.offers import OfferFeed
from tests.sidecar.conftest import Gateway, Store, config, running, until
from tests.sidecar.fake_engine import FakeBackend
from wire.events import (
    AnyEvent,
    ArtifactFacts,
    ArtifactsCondemned,
    ArtifactsRemoved,
    ChannelMoved,
    Event,
    PolicyCreated,
    RevisionPublished,
    Split,
)
from wire.node import Granted, Release
from wire.sockets import ZEROMQ, FeedPublisher

POLICY = "acme/p"


def published(revision: int, digest: str, size: int = 100, policy: str = POLICY) -> RevisionPublished:
    facts = ArtifactFacts(digest=digest, size=size, rank=8, targets=("q",), dtype="bf16", tensors=2, parameters=50)
    return RevisionPublished(policy=policy, revision=revision, artifact=facts)


def moved(*arms: int, channel: str = "stable") -> ChannelMoved:
    return ChannelMoved(policy=POLICY, channel=channel, target=tuple(Split(arm) for arm in arms))


class Registrar:
    """The publishing side of the feed."""

    def __init__(self, sockets: Path) -> None:
        self.endpoint = f"ipc://{sockets}/registrar-feed"
        self._feed: FeedPublisher[Event] = FeedPublisher(self.endpoint, Event, epoch=1, heartbeat_s=0.05)
        self._seq = 0

    def say(self, *bodies: AnyEvent) -> None:
        for body in bodies:
            self._seq += 1
            self._feed.publish(Event(seq=self._seq, at_ms=0, actor="test", body=body))

    def close(self) -> None:
        self._feed.close()


@pytest.fixture
async def registrar(sockets: Path) -> Iterator[Registrar]:  # type: ignore[misc]
    registrar = Registrar(sockets)
    yield registrar
    registrar.close()


async def heard(registrar: Registrar, held: Callable[[str], bool], *bodies: AnyEvent) -> list[str]:
    """The digests that are offered of what is said."""
    offers: list[RevisionOffered] = []
    feed = OfferFeed(
        registrar.endpoint,
        offers.append,
        lambda policy: policy == "last/one" or held(policy),
        pytest.fail,
        curve=None,
        sockets=ZEROMQ,
    )
    # nothing is heard before the subscription is
    await until(lambda: not feed.silent)
    registrar.say(*bodies, published(1, "last", policy="last/one"))
    await until(lambda: bool(offers) and offers[-1].digest == "last")
    feed.close()
    return [offer.digest for offer in offers[:-1]]


async def test_new_latest_and_moved_stable_are_offers(registrar: Registrar) -> None:
    said = (
        PolicyCreated(policy=POLICY, base="b"), published(1, "one"), published(2, "two"), published(3, "three"),
        moved(1), moved(2, 3), moved(1, channel="canary"), moved(), moved(99),
    )  # fmt: skip
    assert await heard(registrar, lambda policy: True, *said) == ["one", "two", "three", "one", "two", "three"]


async def test_policies_that_are_not_held_are_passed_over(registrar: Registrar) -> None:
    assert await heard(registrar, lambda policy: policy != POLICY, published(1, "one"), moved(1)) == []


async def test_removed_artifacts_are_told_whoever_had_named_them(registrar: Registrar) -> None:
    removed: list[str] = []
    feed = OfferFeed(registrar.endpoint, pytest.fail, lambda policy: False, removed.append, curve=None, sockets=ZEROMQ)
    await until(lambda: not feed.silent)
    registrar.say(
        ArtifactsCondemned(digests=("a",)), ArtifactsRemoved(digests=("a", "b")), ArtifactsRemoved(digests=("c",))
    )
    await until(lambda: len(removed) == 3)
    feed.close()
    assert removed == ["a", "b", "c"]


async def test_published_revision_of_a_served_policy_is_in_the_arena_before_it_is_asked_for(
    sockets: Path, store: Store, registrar: Registrar
) -> None:
    old, new, stranger = (b"%d" % number * 5000 for number in range(3))
    digests = [store.put(data) for data in (old, new, stranger)]
    node = structs.replace(config(sockets, store), registrar_feed=registrar.endpoint)
    gateway = Gateway(node)
    async with running(node, FakeBackend()) as sidecar:
        answer = await gateway.ask(digests[0], len(old), policy=POLICY)
        assert isinstance(answer, Granted)
        gateway.wire.send(Release(gateway="g1", instance="i1", leases=(answer.lease,)))
        async with asyncio.timeout(20.0):
            while not sidecar.machine.state.cache.resident(digests[1]):
                registrar.say(published(1, digests[2], len(stranger), "other/p"), published(2, digests[1], len(new)))
                await asyncio.sleep(0.05)
        assert sidecar.machine.state.cache.get(digests[2]) is None
        assert isinstance(await gateway.ask(digests[1], len(new), policy=POLICY), Granted)
        assert sidecar.machine.state.counts["fetched"] == 2
    gateway.close()


async def test_a_load_does_not_wait_for_a_prefetch_and_ends_it(
    sockets: Path, store: Store, registrar: Registrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, other = b"o" * 5000, b"n" * 6000, b"x" * 7000
    digests = [store.put(data) for data in (old, new, other)]
    readv, reading, go_on = os.readv, threading.Event(), threading.Event()

    def slow(file: int, buffers: list[memoryview]) -> int:
        if os.fstat(file).st_size == len(new):
            reading.set()
            go_on.wait(20.0)
            return readv(file, [buffers[0][:10]])
        return readv(file, buffers)

    monkeypatch.setattr(os, "readv", slow)
    node = structs.replace(config(sockets, store), registrar_feed=registrar.endpoint)
    gateway = Gateway(node)
    async with running(node, FakeBackend()) as sidecar:
        state = sidecar.machine.state
        await gateway.ask(digests[0], len(old), policy=POLICY)
        async with asyncio.timeout(20.0):
            while not reading.is_set():
                registrar.say(published(2, digests[1], len(new)))
                await asyncio.sleep(0.05)
        assert isinstance(await gateway.ask(digests[2], len(other), policy="acme/x"), Granted)
        assert state.cache.get(digests[1]) is not None, "its thread still writes there"
        go_on.set()
        await until(lambda: state.cache.get(digests[1]) is None)
        assert state.counts["prefetches_given_up"] == 1
        assert digests[1] not in state.failures
    gateway.close()
