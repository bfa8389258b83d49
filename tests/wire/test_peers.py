"""Peers that come late, go, are killed or stop; queues that fill; sockets that close."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.wire.helpers import (
    LONG_S,
    Asks,
    Keeper,
    Number,
    Silence,
    closing,
    raw_dealer,
    requester,
    responder,
    until,
)
from wire import endpoints, reactor
from wire.drops import Drop
from wire.frames import pack_ask
from wire.outcomes import DeadlinePassed, JournalUnavailable, NoHealthyNode
from wire.sockets import Responder


async def test_asks_wait_a_moment_for_a_peer_that_starts(endpoint: str) -> None:
    client = requester(endpoint)
    ask = asyncio.ensure_future(client.request(Number(3), timeout_s=LONG_S))
    await asyncio.sleep(0.1)
    server = responder(endpoint)
    with closing(client, server):
        assert (await ask).value == 6


async def test_an_absent_peer_is_told_apart_from_a_slow_one(endpoint: str) -> None:
    client = requester(endpoint, patience_s=0.1, gone=JournalUnavailable)
    with closing(client):
        with pytest.raises(JournalUnavailable, match="does not answer"):
            await client.request(Number(1), timeout_s=LONG_S)
        with pytest.raises(JournalUnavailable, match="does not answer"):
            await client.request(Number(1), timeout_s=LONG_S)
    impatient = requester(endpoint)
    with closing(impatient), pytest.raises(DeadlinePassed):
        await impatient.request(Number(1), timeout_s=0.05)


async def test_a_peer_that_goes_fails_what_is_in_flight_and_a_new_one_is_found(endpoint: str) -> None:
    client, server = requester(endpoint), responder(endpoint)
    with closing(client):
        for value in range(3):
            assert (await client.request(Number(value), timeout_s=LONG_S)).value == 2 * value
            waiting = [asyncio.ensure_future(client.request(Silence(), timeout_s=LONG_S)) for _ in range(10)]
            await until(lambda: client.in_flight == 10)
            server.close()
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {NoHealthyNode}
            assert not client.connected
            server = responder(endpoint)
        assert (await client.request(Number(9), timeout_s=LONG_S)).value == 18
        server.close()


SERVER = """
import asyncio, sys
from tests.wire.helpers import Asks, Number, double
from wire.sockets import Responder

async def serve():
    Responder(sys.argv[1], Asks, Number, double)
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


@contextlib.contextmanager
def serving_process(endpoint: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", SERVER, endpoint], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


async def test_a_killed_process_is_noticed_and_its_successor_serves(endpoint: str) -> None:
    client = requester(endpoint)
    with closing(client):
        with serving_process(endpoint) as process:
            assert (await client.request(Number(1), timeout_s=LONG_S)).value == 2
            waiting = asyncio.ensure_future(client.request(Silence(), timeout_s=LONG_S))
            await until(lambda: client.in_flight == 1)
            process.kill()
            with pytest.raises(NoHealthyNode, match="went away"):
                await waiting
        with serving_process(endpoint):
            assert (await client.request(Number(2), timeout_s=LONG_S)).value == 4


async def test_a_stopped_process_is_noticed_by_its_missing_heartbeat(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(endpoints, "HEARTBEAT_TIMEOUT_S", 0.5)
    client = requester(endpoint)
    with closing(client), serving_process(endpoint) as process:
        await client.request(Number(1), timeout_s=LONG_S)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(NoHealthyNode, match="went away"):
            await client.request(Silence(), timeout_s=LONG_S)
        os.kill(process.pid, signal.SIGCONT)
        assert (await client.request(Number(3), timeout_s=LONG_S)).value == 6


async def test_what_waited_for_a_peer_that_went_is_not_handed_to_its_successor(endpoint: str) -> None:
    client = requester(endpoint)
    with closing(client):
        with serving_process(endpoint) as process:
            await until(lambda: client.connected)
            os.kill(process.pid, signal.SIGSTOP)
            for _ in range(200):
                assert client.send(Number(1, padding=bytes(100_000)))
            process.kill()
        await until(lambda: not client.connected)
        keeper = Keeper()
        with closing(Responder(endpoint, Asks, Number, keeper)):
            await until(lambda: client.connected)
            assert client.send(Number(2))
            await until(lambda: Number(2) in keeper.asks)
            assert keeper.asks == [Number(2)]


async def test_no_arrival_is_missed_without_the_watchdog(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reactor, "_WATCHDOG_S", 3600.0)
    client, server = requester(endpoint), responder(endpoint)

    async def ask(value: int) -> None:
        for number in range(value, value + 200):
            assert (await client.request(Number(number), timeout_s=LONG_S)).value == 2 * number
            await asyncio.sleep(0)

    with closing(client, server):
        await asyncio.gather(*(ask(1000 * asker) for asker in range(10)))


async def test_asks_past_the_bound_in_flight_fail_at_once(endpoint: str) -> None:
    client, server = requester(endpoint, hwm=5), responder(endpoint)
    with closing(client, server):
        waiting = [asyncio.ensure_future(client.request(Silence(), timeout_s=LONG_S)) for _ in range(5)]
        await until(lambda: client.in_flight == 5)
        with pytest.raises(NoHealthyNode, match="5 requests in flight"):
            await client.request(Number(1), timeout_s=LONG_S)
        assert client.dropped[Drop.QUEUE_FULL] == 1
        for ask in waiting:
            ask.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        # the queue towards the peer has the same bound, and libzmq may not have emptied it yet
        await until(lambda: client.send(Silence()))
        assert (await client.request(Number(1), timeout_s=LONG_S)).value == 2


async def test_a_full_queue_is_an_error_and_never_a_wait(endpoint: str) -> None:
    with serving_process(endpoint) as process:
        client = requester(endpoint, hwm=10)
        with closing(client):
            await client.request(Number(1), timeout_s=LONG_S)
            os.kill(process.pid, signal.SIGSTOP)
            started = time.monotonic()
            taken = 0
            while client.send(Number(1, padding=bytes(100_000))):
                taken += 1
                assert taken < 1000
            assert client.dropped[Drop.QUEUE_FULL] == 1
            with pytest.raises(NoHealthyNode, match="queue_full"):
                await client.request(Number(1, padding=bytes(100_000)), timeout_s=LONG_S)
            assert time.monotonic() - started < LONG_S / 4


async def test_answers_for_a_peer_that_does_not_read_are_counted(endpoint: str) -> None:
    keeper = Keeper()
    server: Responder[Asks, Number] = Responder(endpoint, Asks, Number, keeper, hwm=10)
    with closing(server), raw_dealer(endpoint) as dealer:
        for number in range(1, 200):
            dealer.send(pack_ask(number, LONG_S, msgspec.msgpack.encode(Number(number))))
            await until(lambda: bool(keeper.asks) and keeper.asks[-1] == Number(number))  # noqa: B023
        large = Number(1, padding=bytes(100_000))
        sent = [reply(large) for reply in keeper.replies]
        assert False in sent
        assert server.dropped == {Drop.QUEUE_FULL: sent.count(False)}


async def test_an_answer_for_a_peer_that_is_gone_is_counted(endpoint: str) -> None:
    keeper = Keeper()
    server: Responder[Asks, Number] = Responder(endpoint, Asks, Number, keeper)
    with closing(server):
        with raw_dealer(endpoint) as dealer:
            for number in range(1, 2001):
                dealer.send(pack_ask(number, LONG_S, msgspec.msgpack.encode(Number(number))))
            await until(lambda: len(keeper.replies) == 2000)
        # each answer until libzmq notices that nobody is there goes into the void
        await until(lambda: keeper.replies.pop()(Number(1)) is False)
        assert server.dropped == {Drop.PEER_GONE: 1}


async def test_restarts_under_load_never_mix_up_or_hang_an_ask(endpoint: str) -> None:
    client, server = requester(endpoint, patience_s=0.05), responder(endpoint)
    outcomes = {"answered": 0, "failed": 0}
    stop = asyncio.Event()

    async def ask_on(value: int) -> None:
        while not stop.is_set():
            value += 1000
            try:
                assert (await client.request(Number(value), timeout_s=LONG_S)).value == 2 * value
                outcomes["answered"] += 1
            except NoHealthyNode:
                outcomes["failed"] += 1
                await asyncio.sleep(0.01)

    askers = [asyncio.ensure_future(ask_on(value)) for value in range(20)]
    with closing(client):
        for _ in range(5):
            answered = outcomes["answered"]
            await until(lambda: outcomes["answered"] > answered + 100)  # noqa: B023
            server.close()
            await until(lambda: not client.connected)
            server = responder(endpoint)
        stop.set()
        await asyncio.gather(*askers)
        server.close()
    assert client.in_flight == 0
    assert outcomes["failed"] > 0


async def test_closing_fails_what_is_in_flight_and_what_comes_after(endpoint: str) -> None:
    client, server = requester(endpoint), responder(endpoint)
    with closing(server):
        waiting = asyncio.ensure_future(client.request(Silence(), timeout_s=LONG_S))
        await until(lambda: client.in_flight == 1)
        client.close()
        client.close()
        with pytest.raises(NoHealthyNode, match="closed"):
            await waiting
        with pytest.raises(NoHealthyNode, match="closed"):
            await client.request(Number(1), timeout_s=LONG_S)
        assert client.send(Number(1)) is False


async def test_a_reply_after_closing_does_nothing(endpoint: str) -> None:
    keeper = Keeper()
    server: Responder[Asks, Number] = Responder(endpoint, Asks, Number, keeper)
    client = requester(endpoint)
    with closing(client):
        ask = asyncio.ensure_future(client.request(Number(1), timeout_s=LONG_S))
        await until(lambda: bool(keeper.replies))
        server.close()
        assert keeper.replies[0](Number(1)) is False
        with pytest.raises(NoHealthyNode):
            await ask


async def test_sockets_give_back_their_descriptors(endpoint: str) -> None:
    async def once() -> None:
        client, server = requester(endpoint), responder(endpoint)
        with closing(client, server):
            await client.request(Number(1), timeout_s=LONG_S)

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    await once()
    before = descriptors()
    for _ in range(10):
        await once()
    # libzmq closes in a thread of its own
    await until(lambda: descriptors() <= before)
