"""The generator against a server whose behaviour is known: what it sends when, and what it makes of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from loadtest.generator import Beside, Generator, Sample, completion, post

_OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
_LATER = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\ncontent-length: 5\r\n\r\nlater"
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def server(answer: Callable[[asyncio.StreamWriter, bytes], object]) -> AsyncIterator[Generator]:
    """A generator of requests to a server that calls ``answer(writer, body)`` for each."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                done = answer(writer, await reader.readexactly(length))
                if asyncio.iscoroutine(done):
                    await done
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    generator = Generator("127.0.0.1", listening.sockets[0].getsockname()[1])
    try:
        yield generator
    finally:
        generator.close()
        listening.close()


async def test_requests_leave_at_their_times_and_latency_counts_from_those() -> None:
    async with server(lambda writer, body: writer.write(_OK)) as generator:
        samples = await generator.run_at([(0.0, post("/", b"{}")), (0.1, post("/", b"{}")), (0.1, post("/", b"{}"))])
    assert [one.status for one in samples] == [200] * 3
    assert samples[1].intended - samples[0].intended == pytest.approx(0.1)
    assert samples[1].intended == samples[2].intended
    assert all(one.intended <= one.first_byte <= one.first_token <= one.done for one in samples)


async def test_a_stream_has_a_time_for_each_piece() -> None:
    async def tokens(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(_STREAM)
        for pause in (0.0, 0.02, 0.2, 0.02):
            await writer.drain()
            await asyncio.sleep(pause)
            writer.write(b"5\r\ntoken\r\n")
        writer.write(b"0\r\n\r\n")

    async with server(tokens) as generator:
        (sample,) = await generator.run([post("/", b"{}")], 1.0)
    assert len(sample.pieces) == 4
    assert sample.longest_gap() == pytest.approx(sample.pieces[2] - sample.pieces[1])
    assert sample.longest_gap(until=sample.pieces[1]) < sample.longest_gap()


async def test_a_patient_client_comes_back_when_it_was_told_to() -> None:
    answers = [_LATER, _OK]
    async with server(lambda writer, body: writer.write(answers.pop(0))) as generator:
        tries = await generator.patient(post("/", b"{}"), 0.0)
    assert [(one.status, one.retry_after_s) for one in tries] == [(429, 1.0), (200, 0.0)]
    assert tries[0].text == "later"
    assert tries[1].done - tries[0].done >= 1.0


async def test_a_broken_connection_has_no_status() -> None:
    async with server(lambda writer, body: writer.transport.abort()) as generator:
        (sample,) = await generator.at_once([post("/", b"{}")])
    assert sample.status == 0


async def test_a_stream_beside_work_is_hung_up_on_when_that_is_done() -> None:
    gone = asyncio.Event()

    async def endless(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(_STREAM)
        try:
            while not writer.is_closing():
                await asyncio.sleep(0.01)
                writer.write(b"5\r\ntoken\r\n")
                await writer.drain()
        finally:
            gone.set()

    async with server(endless) as generator:
        beside = await generator.beside(post("/", b"{}"), lambda: asyncio.sleep(0.2), 0.2)
        async with asyncio.timeout(10):
            await gone.wait()
    assert beside.until - beside.since >= 0.2
    assert 0 < beside.longest_gap_s <= beside.until - beside.since


def test_what_a_stream_loses_is_told_by_its_rate_before() -> None:
    before = [place * 0.1 for place in range(21)]
    # of the second that the work took, six tenths made a token each
    during = [2.1, 2.2, 2.3, 2.7, 2.8, 2.9]
    sample = Sample(0.0, 0.0, 3.0, 200, tuple(before + during))
    assert Beside(sample, 2.0, 3.0).stalled_s == pytest.approx(0.4)
    assert Beside(sample, 2.0, 3.0).longest_gap_s == pytest.approx(0.4)


def test_a_completion_asks_for_exactly_so_many_tokens() -> None:
    head, _, body = completion("a/b", prompt=[1, 2], tokens=3, token="secret").partition(b"\r\n\r\n")
    asked = msgspec.json.decode(body)
    assert (asked["model"], asked["prompt"], asked["max_tokens"], asked["min_tokens"]) == ("a/b", [1, 2], 3, 3)
    assert asked["ignore_eos"] is True
    assert b"authorization: Bearer secret" in head
