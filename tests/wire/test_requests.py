"""Asks and answers between a Requester and a Responder: deadlines, errors, and garbage from either side."""

import asyncio
import socket
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.wire.helpers import (
    LONG_S,
    Asks,
    Fail,
    Keeper,
    Number,
    Silence,
    closing,
    raw_dealer,
    requester,
    responder,
    until,
)
from wire.drops import Drop
from wire.frames import Verdict, pack_answer, pack_ask, unpack_ask
from wire.outcomes import DeadlinePassed, InvalidRequest, JournalUnavailable, NoHealthyNode, TooLarge
from wire.sockets import Reply, Requester, Responder


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
        with pytest.raises(DeadlinePassed, match=r"within 0\.001 s"):
            await client.request(Silence(), timeout_s=1e-7)
        with pytest.raises(DeadlinePassed):
            await client.request(Number(1), timeout_s=0.0)
        assert client.in_flight == 0


async def test_an_answer_after_the_deadline_is_not_sent(endpoint: str) -> None:
    keeper = Keeper()
    server = Responder(endpoint, Asks, Number, keeper)
    with closing(server), raw_dealer(endpoint) as dealer:
        dealer.send(pack_ask(1, 0.05, msgspec.msgpack.encode(Number(1))))
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


async def test_bytes_that_are_not_zeromq_cost_nobody_else_anything(endpoint: str) -> None:
    client, server = requester(endpoint), responder(endpoint)
    with closing(client, server):
        for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" + bytes(8) + b"\x7f" + bytes(200)):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(endpoint.removeprefix("ipc://"))
                stranger.sendall(noise)
                assert (await client.request(Number(21), timeout_s=LONG_S)).value == 42


async def test_garbage_answers_are_counted_and_the_ask_still_gets_its_own(endpoint: str) -> None:
    with zmq.Context.instance().socket(zmq.ROUTER) as router:
        router.linger = 0
        Path(endpoint.removeprefix("ipc://")).parent.mkdir()
        router.bind(endpoint)
        client = requester(endpoint)
        with closing(client):
            ask = asyncio.ensure_future(client.request(Number(1), timeout_s=LONG_S))
            await until(lambda: bool(router.poll(0)))
            peer, frame = router.recv_multipart()
            number, _, _ = unpack_ask(frame)
            good = msgspec.msgpack.encode(Number(2))
            for answer in (
                b"",
                b"junk",
                pack_answer(number, Verdict.ANSWER, b"\xc1"),
                pack_answer(number + 1, Verdict.ANSWER, good),
            ):
                router.send_multipart([peer, answer])
            router.send_multipart([peer, pack_answer(number, Verdict.ANSWER, good)])
            assert (await ask).value == 2
            assert client.dropped == {Drop.BAD_FRAME: 2, Drop.UNDECODABLE: 1, Drop.LATE_ANSWER: 1}


async def test_an_endpoint_that_is_none_is_refused(folder: object) -> None:
    for endpoint in ("nowhere", "ipc://" + f"{folder}/" + "x" * 200, "tcp://127.0.0.1:notaport"):
        with pytest.raises(InvalidRequest, match="cannot serve at") as caught:
            responder(endpoint)
        assert caught.value.field == "endpoint"
        with pytest.raises(InvalidRequest, match="cannot connect to"):
            requester(endpoint)
