"""Asks and answers between a Requester and a Responder: deadlines, peers that go, queues that fill, and garbage."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from tests.wire.helpers import Asks, Fail, Number, Silence, closing, double, until
from wire import endpoints
from wire.drops import Drop
from wire.frames import pack_answer, pack_ask, unpack_ask
from wire.outcomes import DeadlinePassed, InvalidRequest, JournalUnavailable, NoHealthyNode, TooLarge
from wire.sockets import Reply, Requester, Responder

LONG_S = 60.0


def requester(endpoint: str, **options: object) -> Requester[Asks, Number]:
    return Requester(endpoint, Asks, Number, **options)  # type: ignore[arg-type]


def responder(endpoint: str, **options: object) -> Responder[Asks, Number]:
    return Responder(endpoint, Asks, Number, double, **options)  # type: ignore[arg-type]


@contextlib.contextmanager
def raw_dealer(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """A peer that does not speak our wire."""
    with zmq.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        yield dealer


class Keeper:
    """A handler that keeps what it is asked, for the test to answer."""

    def __init__(self) -> None:
        self.asks: list[Asks] = []
        self.replies: list[Reply[Number]] = []

    def __call__(self, ask: Asks, reply: Reply[Number]) -> None:
        self.asks.append(ask)
        self.replies.append(reply)


async def test_each_answer_goes_to_its_own_ask(endpoint: str) -> None:
    keeper = Keeper()
    server = Responder(endpoint, Asks, Number, keeper)
    client = requester(endpoint)
    with closing(client, server):
        asks = [asyncio.ensure_future(client.request(Number(value), timeout_s=LONG_S)) for value in range(300)]
        await until(lambda: len(keeper.replies) == 300)
        for ask, reply in sorted(zip(keeper.asks, keeper.replies, strict=True), key=lambda pair: -pair[0].value):
            assert reply(Number(ask.value * 2))
        assert [answer.value for answer in await asyncio.gather(*asks)] == [2 * value for value in range(300)]
        assert client.in_flight == 0


async def test_it_works_over_tcp_between_many_requesters() -> None:
    server = responder("tcp://127.0.0.1:*")
    clients = [requester(server.endpoint) for _ in range(5)]
    with closing(*clients, server):
        answers = await asyncio.gather(
            *(client.request(Number(i), timeout_s=LONG_S) for i in range(20) for client in clients)
        )
    assert [answer.value for answer in answers] == [2 * i for i in range(20) for _ in range(5)]


async def test_the_peer_learns_how_long_the_asker_waits(endpoint: str) -> None:
    keeper = Keeper()
    server = Responder(endpoint, Asks, Number, keeper)
    client = requester(endpoint)
    with closing(client, server):
        loop = asyncio.get_running_loop()
        ask = asyncio.ensure_future(client.request(Number(1), timeout_s=LONG_S))
        asked_at = loop.time()
        await until(lambda: bool(keeper.replies))
        reply = keeper.replies[0]
        assert asked_at + LONG_S - 10 < reply.deadline <= loop.time() + LONG_S
        assert reply.wanted
        assert not reply.expired
        reply(Number(7))
        assert (await ask).value == 7


async def test_an_ask_without_an_answer_ends_at_its_deadline(endpoint: str) -> None:
    client, server = requester(endpoint), responder(endpoint)
    with closing(client, server):
        await client.request(Number(1), timeout_s=LONG_S)
        with pytest.raises(DeadlinePassed, match=r"within 0\.05 s"):
            await client.request(Silence(), timeout_s=0.05)
        with pytest.raises(DeadlinePassed):
            await client.request(Number(1), timeout_s=0.0)
        assert client.in_flight == 0


async def test_an_answer_after_the_deadline_is_not_sent(endpoint: str) -> None:
    keeper = Keeper()
    server = Responder(endpoint, Asks, Number, keeper)
    client = requester(endpoint)
    with closing(client, server):
        with pytest.raises(DeadlinePassed):
            await client.request(Number(1), timeout_s=0.3)
        await until(lambda: bool(keeper.replies) and keeper.replies[0].expired)
        assert keeper.replies[0](Number(2)) is False
        assert server.dropped[Drop.EXPIRED] == 1


async def test_an_answer_to_an_asker_that_stopped_waiting_is_dropped_and_counted(endpoint: str) -> None:
    keeper = Keeper()
    server = Responder(endpoint, Asks, Number, keeper)
    client = requester(endpoint)
    with closing(client, server):
        ask = asyncio.ensure_future(client.request(Number(1), timeout_s=LONG_S))
        await until(lambda: bool(keeper.replies))
        ask.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ask
        assert keeper.replies[0](Number(2))
        await until(lambda: client.dropped[Drop.LATE_ANSWER] == 1)
        again = asyncio.ensure_future(client.request(Number(2), timeout_s=LONG_S))
        await until(lambda: len(keeper.replies) == 2)
        keeper.replies[1](Number(4))
        assert (await again).value == 4


async def test_a_reply_is_for_one_answer(endpoint: str) -> None:
    keeper = Keeper()
    server = Responder(endpoint, Asks, Number, keeper)
    client = requester(endpoint)
    with closing(client, server):
        ask = asyncio.ensure_future(client.request(Number(1), timeout_s=LONG_S))
        await until(lambda: bool(keeper.replies))
        keeper.replies[0](Number(2))
        with pytest.raises(RuntimeError, match="answered already"):
            keeper.replies[0](Number(3))
        assert (await ask).value == 2


async def test_one_way_asks_want_no_answer(endpoint: str) -> None:
    keeper = Keeper()
    server = Responder(endpoint, Asks, Number, keeper)
    client = requester(endpoint)
    with closing(client, server):
        assert client.send(Number(0)) is False
        assert client.dropped[Drop.PEER_GONE] == 1
        await until(lambda: client.connected)
        assert client.send(Number(1)) is True
        await until(lambda: bool(keeper.replies))
        assert keeper.asks == [Number(1)]
        assert not keeper.replies[0].wanted
        assert not keeper.replies[0].expired
        assert keeper.replies[0](Number(2)) is False


async def test_a_failing_handler_fails_one_ask_at_once(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    client, server = requester(endpoint), responder(endpoint)
    with closing(client, server):
        with pytest.raises(NoHealthyNode, match="failed on the request"):
            await client.request(Fail(), timeout_s=LONG_S)
        assert server.dropped[Drop.HANDLER_FAILED] == 1
        assert "a bug in the handler" in caplog.text
        assert (await client.request(Number(4), timeout_s=LONG_S)).value == 8


async def test_an_ask_that_the_peer_does_not_know_fails_at_once(endpoint: str) -> None:
    class Novelty(msgspec.Struct, frozen=True, tag=True, tag_field="t"):
        """A message of a newer version."""

    server = responder(endpoint)
    client: Requester[Novelty, Number] = Requester(endpoint, Novelty, Number, gone=JournalUnavailable)
    with closing(client, server):
        with pytest.raises(JournalUnavailable, match="did not understand"):
            await client.request(Novelty(), timeout_s=LONG_S)
        assert server.dropped[Drop.UNKNOWN] == 1


async def test_messages_over_the_bound_are_refused_where_they_are_made(endpoint: str) -> None:
    def inflate(ask: Asks, reply: Reply[Number]) -> None:
        reply(Number(1, padding=bytes(2000)))

    server: Responder[Asks, Number] = Responder(endpoint, Asks, Number, inflate, max_bytes=1000)
    client = requester(endpoint, max_bytes=1000)
    with closing(client, server):
        with pytest.raises(TooLarge):
            await client.request(Number(1, padding=bytes(2000)), timeout_s=LONG_S)
        with pytest.raises(NoHealthyNode, match="failed on the request"):
            await client.request(Number(1), timeout_s=LONG_S)


GARBAGE = [
    ([b""], Drop.BAD_FRAME),
    ([b"\x00" * 5], Drop.BAD_FRAME),
    ([b"GET / HTTP/1.1\r\n\r\n"], Drop.BAD_FRAME),
    ([b"one", b"two", b"three"], Drop.BAD_FRAME),
    ([b"x"] * 50, Drop.BAD_FRAME),
    ([pack_ask(1, float("nan"), b"")], Drop.BAD_FRAME),
    ([pack_ask(1, 1.0, b"\xc1")], Drop.UNDECODABLE),
    ([pack_ask(0, 1.0, b"\xc1")], Drop.UNDECODABLE),
    ([pack_ask(1, 1.0, msgspec.msgpack.encode({"t": "Nothing"}))], Drop.UNKNOWN),
    ([pack_ask(1, 1.0, msgspec.msgpack.encode({"t": "Number", "value": "x"}))], Drop.INVALID),
    ([pack_ask(1, 0.0, msgspec.msgpack.encode({"t": "Number", "value": 1}))], Drop.EXPIRED),
]


@pytest.mark.parametrize(("frames", "reason"), GARBAGE, ids=range(len(GARBAGE)))
async def test_garbage_is_counted_and_service_goes_on(endpoint: str, frames: list[bytes], reason: Drop) -> None:
    client, server = requester(endpoint), responder(endpoint)
    with closing(client, server), raw_dealer(endpoint) as dealer:
        dealer.send_multipart(frames)
        await until(lambda: server.dropped.total() == 1)
        assert server.dropped[reason] == 1
        assert (await client.request(Number(21), timeout_s=LONG_S)).value == 42


async def test_an_oversized_frame_costs_its_sender_the_connection_and_nobody_else(endpoint: str) -> None:
    client, server = requester(endpoint, max_bytes=1000), responder(endpoint, max_bytes=1000)
    with closing(client, server), raw_dealer(endpoint) as dealer:
        dealer.send(pack_ask(1, 10.0, bytes(1_000_000)))
        assert (await client.request(Number(21), timeout_s=LONG_S)).value == 42
        assert server.dropped.total() == 0


async def test_garbage_answers_are_counted_and_the_ask_still_gets_its_own(endpoint: str) -> None:
    with zmq.Context.instance().socket(zmq.ROUTER) as router:
        router.linger = 0
        os.makedirs(os.path.dirname(endpoint.removeprefix("ipc://")))  # noqa: PTH103, PTH120
        router.bind(endpoint)
        client = requester(endpoint)
        with closing(client):
            ask = asyncio.ensure_future(client.request(Number(1), timeout_s=LONG_S))
            await until(lambda: bool(router.poll(0)))
            peer, frame = router.recv_multipart()
            number, _, _ = unpack_ask(frame)
            good = msgspec.msgpack.encode(Number(2))
            for answer in (b"", b"junk", pack_answer(number, 0, b"\xc1"), pack_answer(number + 1, 0, good)):  # type: ignore[arg-type]
                router.send_multipart([peer, answer])
            router.send_multipart([peer, pack_answer(number, 0, good)])  # type: ignore[arg-type]
            assert (await ask).value == 2
            assert client.dropped == {Drop.BAD_FRAME: 2, Drop.UNDECODABLE: 1, Drop.LATE_ANSWER: 1}


async def test_asks_wait_a_moment_for_a_peer_that_starts(endpoint: str) -> None:
    client = requester(endpoint, patience_s=LONG_S)
    ask = asyncio.ensure_future(client.request(Number(3), timeout_s=LONG_S))
    await asyncio.sleep(0.1)
    server = responder(endpoint)
    with closing(client, server):
        assert (await ask).value == 6


async def test_an_absent_peer_is_told_apart_from_a_slow_one(endpoint: str) -> None:
    client = requester(endpoint, patience_s=0.1, gone=JournalUnavailable)
    with closing(client):
        with pytest.raises(JournalUnavailable, match="nobody answers"):
            await client.request(Number(1), timeout_s=LONG_S)
        with pytest.raises(JournalUnavailable, match="nobody answers"):
            await client.request(Number(1), timeout_s=LONG_S)
    impatient = requester(endpoint, patience_s=LONG_S)
    with closing(impatient), pytest.raises(DeadlinePassed):
        await impatient.request(Number(1), timeout_s=0.05)


async def test_a_peer_that_goes_fails_what_is_in_flight_and_a_new_one_is_found(endpoint: str) -> None:
    client, server = requester(endpoint, patience_s=LONG_S), responder(endpoint)
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
    client = requester(endpoint, patience_s=LONG_S)
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
    client = requester(endpoint, patience_s=LONG_S)
    with closing(client), serving_process(endpoint) as process:
        await client.request(Number(1), timeout_s=LONG_S)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(NoHealthyNode, match="went away"):
            await client.request(Silence(), timeout_s=LONG_S)
        os.kill(process.pid, signal.SIGCONT)
        assert (await client.request(Number(3), timeout_s=LONG_S)).value == 6


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


async def test_answers_for_a_peer_that_does_not_read_or_is_gone_are_counted(endpoint: str) -> None:
    keeper = Keeper()
    server = Responder(endpoint, Asks, Number, keeper, hwm=10)
    with closing(server):
        with raw_dealer(endpoint) as dealer:
            dealer.rcvhwm = 1
            for number in range(1, 200):
                dealer.send(pack_ask(number, LONG_S, msgspec.msgpack.encode(Number(number))))
                await until(lambda number=number: len(keeper.replies) == number)  # type: ignore[misc]
            answer = Number(1, padding=bytes(100_000))
            received = [reply(answer) for reply in keeper.replies[:-1]]
            assert False in received
            assert server.dropped[Drop.QUEUE_FULL] == received.count(False)
        last = keeper.replies[-1]
        await until(lambda: server.dropped[Drop.PEER_GONE] > 0 or _answered_nowhere(server, last))
        assert server.dropped[Drop.PEER_GONE] > 0


def _answered_nowhere(server: Responder[Asks, Number], reply: Reply[Number]) -> bool:
    probe: Reply[Number] = Reply(server, reply.peer, 1, reply.deadline)
    probe(Number(1))
    return False


async def test_closing_fails_what_is_in_flight_and_what_comes_after(endpoint: str) -> None:
    client, server = requester(endpoint), responder(endpoint)
    keeper = server
    with closing(keeper):
        waiting = asyncio.ensure_future(client.request(Silence(), timeout_s=LONG_S))
        await until(lambda: client.in_flight == 1)
        client.close()
        client.close()
        with pytest.raises(NoHealthyNode, match="closed"):
            await waiting
        with pytest.raises(NoHealthyNode, match="closed"):
            await client.request(Number(1), timeout_s=LONG_S)
        assert client.send(Number(1)) is False
    server.close()


async def test_a_reply_after_closing_does_nothing(endpoint: str) -> None:
    keeper = Keeper()
    server = Responder(endpoint, Asks, Number, keeper)
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
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    await once()
    before = descriptors()
    for _ in range(10):
        await once()
    # libzmq closes in a thread of its own
    await until(lambda: descriptors() <= before)


async def test_an_endpoint_that_is_none_is_refused(folder: object) -> None:
    for endpoint in ("nowhere", "ipc://" + f"{folder}/" + "x" * 200, "tcp://127.0.0.1:notaport"):
        with pytest.raises(InvalidRequest, match="cannot serve at") as caught:
            responder(endpoint)
        assert caught.value.field == "endpoint"
        with pytest.raises(InvalidRequest, match="cannot connect to"):
            requester(endpoint)
