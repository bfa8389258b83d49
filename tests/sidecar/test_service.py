"""The sidecar as gateways meet it: real sockets, a real arena, a real store, engines that obey."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.interface import InstallUncertain
from catalog.names import adapter_name
from sidecar.service import Sidecar
from tests.sidecar.conftest import Gateway, Store, config, running, until
from tests.sidecar.fake_engine import FakeBackend
from wire.node import AskState, GatewayAlive, Granted, NodeReport, Refused, Release, Residency
from wire.outcomes import InvalidRequest, Outcome

DATA = b"a revision file's bytes" * 1000


def revision(store: Store, number: int) -> tuple[str, int]:
    data = DATA + bytes([number])
    return store.put(data), len(data)


@pytest.fixture
async def engine() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def gateway(sockets: Path, store: Store) -> Iterator[Gateway]:  # type: ignore[misc]
    gateway = Gateway(config(sockets, store))
    yield gateway
    gateway.close()


async def test_thousand_concurrent_first_asks_are_one_fetch_and_one_install(
    sockets: Path, store: Store, engine: FakeBackend, gateway: Gateway
) -> None:
    digest, size = revision(store, 1)
    async with running(config(sockets, store), engine) as sidecar:
        answers = await asyncio.gather(*(gateway.ask(digest, size, timeout_s=60.0) for _ in range(1000)))
        assert all(isinstance(answer, Granted) for answer in answers)
        report = await gateway.wire.request(AskState(), timeout_s=5.0)
        assert isinstance(report, NodeReport)
        assert (report.fetches, report.installs) == (1, 1)
        assert report.engines[0].outstanding == 1000
        assert engine.installs == [adapter_name("acme", digest)]
        leases = tuple(answer.lease for answer in answers if isinstance(answer, Granted))
        gateway.wire.send(Release(gateway="g1", instance="i1", leases=leases))
        await until(lambda: sidecar.machine.state.engines["e1"].outstanding == 0)


async def test_four_cold_policies_with_one_load_in_flight_and_one_queued(
    sockets: Path, store: Store, engine: FakeBackend, gateway: Gateway
) -> None:
    revisions = [revision(store, number) for number in range(4)]
    engine.gate.clear()
    async with running(config(sockets, store, loads_in_flight=1, loads_queued=1), engine):
        asking = [asyncio.create_task(gateway.ask(digest, size)) for digest, size in revisions]
        await until(lambda: sum(task.done() for task in asking) == 2)
        refused = [task.result() for task in asking if task.done()]
        assert len(refused) == 2
        for answer in refused:
            assert isinstance(answer, Refused)
            assert answer.outcome is Outcome.COLD_LOAD_BOUND
            assert answer.retry_after_s is not None
        engine.gate.set()
        answers = await asyncio.gather(*asking)
        assert sum(isinstance(answer, Granted) for answer in answers) == 2


async def test_base_and_warm_asks_are_answered_while_a_load_hangs(
    sockets: Path, store: Store, engine: FakeBackend, gateway: Gateway
) -> None:
    (warm, size), (cold, _) = revision(store, 1), revision(store, 2)
    async with running(config(sockets, store), engine):
        await gateway.ask(warm, size)
        engine.gate.clear()
        loading = asyncio.create_task(gateway.ask(cold, size))
        await until(lambda: len(engine.installs) == 2)
        base = await gateway.ask("", 0, timeout_s=5.0)
        again = await gateway.ask(warm, size, timeout_s=5.0)
        assert isinstance(base, Granted)
        assert isinstance(again, Granted)
        assert (base.adapter, base.waited, again.waited) == ("base-a", False, False)
        engine.gate.set()
        answer = await loading
        assert isinstance(answer, Granted)
        assert answer.waited


@pytest.mark.parametrize("damage", ["missing", "truncated", "corrupt", "link"])
async def test_damaged_artifact_is_refused_and_remembered_and_nothing_else_suffers(
    sockets: Path, store: Store, engine: FakeBackend, gateway: Gateway, damage: str
) -> None:
    (bad, size), (good, _) = revision(store, 1), revision(store, 2)
    path = store.blobs.path(bad)
    path.chmod(0o600)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "corrupt":
        path.write_bytes(b"x" * size)
    else:
        path.unlink()
        if damage == "link":
            path.symlink_to(store.blobs.path(good))
    async with running(config(sockets, store), engine):
        first = await gateway.ask(bad, size)
        again = await gateway.ask(bad, size)
        assert isinstance(first, Refused)
        assert isinstance(again, Refused)
        assert (first.outcome, again.outcome) == (Outcome.ARTIFACT_UNAVAILABLE, Outcome.KNOWN_BAD)
        assert isinstance(await gateway.ask(good, size), Granted)
        assert engine.installs == [adapter_name("acme", good)]


async def test_reads_that_hang_stop_no_other_cold_load(
    sockets: Path, store: Store, engine: FakeBackend, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, good = [revision(store, number) for number in range(4)], revision(store, 9)
    go_on, stuck = threading.Event(), {store.blobs.path(digest) for digest, _ in hanging}
    open_file = os.open

    def open_or_hang(path: Path, *rest: int) -> int:
        if path in stuck:
            go_on.wait(60.0)
        return open_file(path, *rest)

    async with running(config(sockets, store, load_timeout_s=0.2), engine) as sidecar:
        monkeypatch.setattr(os, "open", open_or_hang)
        try:
            for answer in await asyncio.gather(*(gateway.ask(digest, size) for digest, size in hanging)):
                assert isinstance(answer, Refused)
                assert answer.outcome is Outcome.DEADLINE
            assert isinstance(await gateway.ask(*good), Granted)
        finally:
            go_on.set()
        await until(lambda: list(sidecar.machine.state.cache) == [good[0]])


async def test_feed_tells_how_a_revision_came_and_went(sockets: Path, store: Store, gateway: Gateway) -> None:
    engine = FakeBackend(slots=1)
    (first, size), (second, _) = revision(store, 1), revision(store, 2)
    async with running(config(sockets, store), engine):
        await until(lambda: bool(gateway.messages))
        engine.gate.clear()
        asking = asyncio.create_task(gateway.ask(first, size))
        await until(lambda: Residency.INSTALLING in gateway.residencies(first))
        engine.gate.set()
        granted = await asking
        await until(lambda: gateway.residencies(first)[-1:] == [Residency.SERVING])
        gateway.wire.send(Release(gateway="g1", instance="i1", leases=(granted.lease,)))  # type: ignore[union-attr]
        await gateway.ask(second, size)
        await until(lambda: gateway.residencies(second)[-1:] == [Residency.SERVING])
        assert gateway.residencies(first)[-1:] == [Residency.RESIDENT]
        numbers = [number for number, _ in gateway.messages]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


async def test_state_holds_all_that_the_feed_told_up_to_its_number(
    sockets: Path, store: Store, engine: FakeBackend, gateway: Gateway
) -> None:
    digest, size = revision(store, 1)
    async with running(config(sockets, store), engine):
        await until(lambda: bool(gateway.messages))
        await gateway.ask(digest, size)
        report = await gateway.wire.request(AskState(), timeout_s=5.0)
        assert isinstance(report, NodeReport)
        assert report.resident == {digest: Residency.SERVING}
        assert report.engines[0].serving == (adapter_name("acme", digest),)
        await until(lambda: gateway.messages[-1][0] >= report.number)
        assert Residency.SERVING in gateway.residencies(digest)


async def test_dead_engine_is_noticed_restarted_and_filled_again(
    sockets: Path, store: Store, engine: FakeBackend, gateway: Gateway
) -> None:
    digest, size = revision(store, 1)
    async with running(config(sockets, store), engine):
        granted = await gateway.ask(digest, size)
        assert isinstance(granted, Granted)
        engine.die()
        gateway.wire.send(Release(gateway="g1", instance="i1", leases=(granted.lease,), failed_engine="e1"))
        await until(lambda: engine.starts == 2 and adapter_name("acme", digest) in engine.adapters)
        answer = await gateway.ask(digest, size)
        assert isinstance(answer, Granted)
        await until(lambda: gateway.engine_health()[-1:] == ["ready"])
        assert "dead" in gateway.engine_health()


async def test_failed_engine_is_looked_at_at_once(
    sockets: Path, store: Store, engine: FakeBackend, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.engines._HEALTH_EVERY_S", 3600.0)
    async with running(config(sockets, store), engine) as sidecar:
        await gateway.connect()
        engine.die()
        gateway.wire.send(Release(gateway="g1", instance="i1", leases=(), failed_engine="e1"))
        await until(lambda: not sidecar.machine.state.engines["e1"].ready)


async def test_unsure_install_is_settled_by_asking_the_engine(
    sockets: Path, store: Store, engine: FakeBackend, gateway: Gateway
) -> None:
    digest, size = revision(store, 1)
    engine.failure = InstallUncertain("no answer")
    async with running(config(sockets, store), engine):
        refused = await gateway.ask(digest, size)
        assert isinstance(refused, Refused)
        assert refused.outcome is Outcome.ENGINE_FAILED
        engine.failure = None
        engine.adapters.add(adapter_name("acme", digest))
        assert isinstance(await gateway.ask(digest, size), Granted)
        assert len(engine.installs) == 1


async def test_next_sidecar_adopts_what_the_engine_has(
    sockets: Path, store: Store, engine: FakeBackend, gateway: Gateway
) -> None:
    digest, size = revision(store, 1)
    settings = config(sockets, store)
    async with running(settings, engine) as sidecar:
        await gateway.ask(digest, size)
        segment = sidecar.arena.path
        assert stat.S_IMODE(segment.stat().st_mode) == 0o600
    assert engine.detached
    assert engine.adapters
    assert not segment.exists()
    async with running(settings, engine):
        answer = await gateway.ask(digest, size)
        assert isinstance(answer, Granted)
        assert not answer.waited
        assert len(engine.installs) == 1


async def test_restarted_gateway_frees_what_it_held(
    sockets: Path, store: Store, engine: FakeBackend, gateway: Gateway
) -> None:
    digest, size = revision(store, 1)
    async with running(config(sockets, store), engine) as sidecar:
        await gateway.connect()
        await gateway.ask(digest, size)
        gateway.wire.send(GatewayAlive(gateway="g1", instance="i2"))
        await until(lambda: sidecar.machine.state.engines["e1"].outstanding == 0)


async def test_restarted_gateways_first_lease_stands_though_it_comes_before_its_sign_of_life(
    sockets: Path, store: Store, engine: FakeBackend, gateway: Gateway
) -> None:
    digest, size = revision(store, 1)
    async with running(config(sockets, store), engine) as sidecar:
        await gateway.ask(digest, size)
        gateway.instance = "i2"
        assert isinstance(await gateway.ask(digest, size), Granted)
        gateway.wire.send(GatewayAlive(gateway="g1", instance="i2"))
        await gateway.connect()
        assert sidecar.machine.state.engines["e1"].outstanding == 1


async def test_second_sidecar_of_a_node_leaves_the_first_ones_arena_alone(
    sockets: Path, store: Store, engine: FakeBackend
) -> None:
    async with running(config(sockets, store), engine) as sidecar:
        with pytest.raises(InvalidRequest, match="another process serves"):
            Sidecar(config(sockets, store), {})
        assert sidecar.arena.path.exists()
