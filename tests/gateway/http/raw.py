"""HTTP by hand, for tests that look at bytes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

HOST = b"host: test\r\n"


def chat(body: bytes, extra: bytes = b"", version: bytes = b"1.1") -> bytes:
    """A data request."""
    head = b"POST /v1/chat/completions HTTP/%b\r\n%bcontent-length: %d\r\n%b\r\n" % (version, HOST, len(body), extra)
    return head + body


def get(target: bytes, extra: bytes = b"") -> bytes:
    return b"GET %b HTTP/1.1\r\n%b%b\r\n" % (target, HOST, extra)


@dataclass
class Answer:
    """One parsed response; ``chunks`` are set when it was chunked."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    chunks: list[bytes] = field(default_factory=list)


class RawClient:
    """A client socket; small receive buffers make a slow reader."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    @asynccontextmanager
    async def connected(cls, port: int) -> AsyncIterator[RawClient]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        client = cls(reader, writer)
        try:
            yield client
        finally:
            writer.transport.abort()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def shut_write(self) -> None:
        self.writer.write_eof()

    def leave(self) -> None:
        """As a process that exits: the socket is closed both ways."""
        self.writer.close()

    async def answer(self, *, head_only: bool = False) -> Answer:
        """The next response. Raises asyncio.IncompleteReadError when it is cut short."""
        head = await self._wait(self.reader.readuntil(b"\r\n\r\n"))
        status_line, *lines = head.decode("latin-1").split("\r\n")[:-2]
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        answer = Answer(int(status_line.split(" ")[1]), headers)
        if answer.status == 100 or answer.status == 204 or head_only:
            return answer
        if headers.get("transfer-encoding") == "chunked":
            while chunk := await self.chunk():
                answer.chunks.append(chunk)
            answer.body = b"".join(answer.chunks)
        elif "content-length" in headers:
            answer.body = await self._wait(self.reader.readexactly(int(headers["content-length"])))
        else:
            answer.body = await self.rest()
        return answer

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        size = int(await self._wait(self.reader.readuntil(b"\r\n")), 16)
        return (await self._wait(self.reader.readexactly(size + 2)))[:-2]

    async def rest(self) -> bytes:
        """All bytes until the server closes."""
        return await self._wait(self.reader.read())

    async def closed(self) -> bool:
        """The server closes without another byte."""
        try:
            return await self.rest() == b""
        except ConnectionError:
            return True

    async def _wait(self, what: Awaitable[bytes]) -> bytes:
        async with asyncio.timeout(10):
            return await what


Script = Callable[["UpstreamSide"], Awaitable[None]]


@dataclass
class UpstreamSide:
    """One connection that an upstream accepted."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int

    async def request(self) -> tuple[bytes, bytes]:
        """Head and body of the next request."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
        )
        return head, await self.reader.readexactly(length)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def left(self) -> None:
        """Wait until the gateway closed the connection."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            return


class RawUpstream:
    """Listens, and runs ``script`` for each connection."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.accepted = 0

    @classmethod
    @asynccontextmanager
    async def running(cls, script: Script) -> AsyncIterator[RawUpstream]:
        upstream = cls(0)
        tasks: set[asyncio.Task[None]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            upstream.accepted += 1
            try:
                await script(UpstreamSide(reader, writer, upstream.accepted))
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()
                tasks.discard(task)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        upstream.port = server.sockets[0].getsockname()[1]
        try:
            yield upstream
        finally:
            server.close()
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset instead of an orderly end."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    writer.transport.abort()


async def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    """Wait for something that nobody announces."""
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not come to be")
