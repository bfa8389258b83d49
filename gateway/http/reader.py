"""Reads requests off one connection: bytes in, messages out, no sockets.

llhttp in its strict mode refuses most smuggling shapes by itself (both Content-Length and Transfer-Encoding, repeated
or odd lengths, bad chunk sizes, folded lines, a space before the colon, bare line feeds, control characters); what it
lets through is checked here once a head is complete.
"""

from __future__ import annotations

from collections import deque

import httptools

from gateway.http.answers import Refusal
from gateway.http.headers import Headers, Pair, connection_options, forwardable
from gateway.http.limits import HttpLimits
from wire.outcomes import Outcome


class Message:
    """One request as it is read. A refused one has only its ``refusal`` and is the last of its connection."""

    __slots__ = (
        "chunked",
        "complete",
        "control",
        "expects_continue",
        "headers",
        "keep_alive",
        "length",
        "method",
        "old",
        "pieces",
        "received",
        "refusal",
        "target",
    )

    def __init__(self, method: bytes, target: bytes, headers: list[Pair], *, old: bool, keep_alive: bool) -> None:
        self.method = method
        self.target = target
        self.headers = Headers(headers)
        self.old = old
        self.keep_alive = keep_alive
        self.control = False
        self.length: int | None = None
        self.chunked = False
        self.expects_continue = False
        self.pieces: list[bytes] = []
        self.received = 0
        self.complete = False
        self.refusal: Refusal | None = None

    @property
    def path(self) -> bytes:
        return self.target.partition(b"?")[0]

    def take(self) -> bytes:
        """What was read of the body and not taken yet."""
        pieces, self.pieces = self.pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _Refused(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def _bad(reason: str, message: str) -> _Refused:
    return _Refused(Refusal(400, reason, message))


class RequestReader:
    """Turns the bytes of a connection into ``messages``.

    A message appears once its head is complete and has passed every check; its body grows until ``complete``. Feed
    slices of bounded size: what is kept beyond the limits is at most one slice. After a refusal, or the last request of
    a connection, ``done`` is true and further bytes are ignored.
    """

    def __init__(self, data_routes: frozenset[tuple[bytes, bytes]], limits: HttpLimits) -> None:
        self.messages: deque[Message] = deque()
        self.done = False
        self._data_routes = data_routes
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: list[Pair] = []
        self._message: Message | None = None
        self._begun = False
        self._trailers = 0
        # Bytes since a head was completed or a piece of body came: bounds what the parser itself may hold of unfinished
        # fields, and chunk framing that carries nothing.
        self._unproductive = 0
        self._upgrading = False

    @property
    def between(self) -> bool:
        """No request is half read."""
        return not self._begun

    @property
    def unfinished(self) -> Message | None:
        """The message whose body is still coming."""
        return self._message

    def feed(self, data: bytes | memoryview) -> None:
        """Never raises: what is wrong becomes a refused message."""
        if self.done:
            return
        self._unproductive += len(data)
        try:
            self._parse(data)
            if self._unproductive > self._limits.max_head_bytes and self._begun:
                raise self._overlong()
        except _Refused as refused:
            self._refuse(refused.refusal)

    def time_out(self) -> None:
        """The client took too long over the request that is half read."""
        part = "head" if self._message is None else "body"
        self._refuse(Refusal(408, f"slow_{part}", f"the request's {part} did not arrive in time"))

    def cut_off(self) -> None:
        """The client ended what it sends. A request that is half read will never be whole."""
        if self._begun and not self.done:
            part = "head" if self._message is None else "body"
            self._refuse(Refusal(400, f"short_{part}", f"the request ends in the middle of its {part}"))

    def _parse(self, data: bytes | memoryview) -> None:
        offset = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            offset = upgrade.args[0]
        except httptools.HttpParserCallbackError as error:
            # What a callback raised, llhttp has stopped at.
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            # Bytes behind a request that asked for the connection to be closed are no request.
            if not self.done:
                raise _bad("malformed", f"malformed HTTP: {error}") from None
        if offset is not None:
            self._decline_upgrade(memoryview(data)[offset:])

    def _decline_upgrade(self, rest: memoryview) -> None:
        """Read the head again without its Upgrade field: the parser takes bodies behind one for another protocol."""
        old = self._parser
        headers = [pair for pair in self._headers if pair[0] not in (b"upgrade", b"connection")]
        headers.append((b"connection", b", ".join(connection_options(self._headers) - {b"upgrade"})))
        line = b"%b %b HTTP/%b\r\n" % (old.get_method(), self._target, old.get_http_version().encode())
        head = b"".join((line, *[b"%b: %b\r\n" % pair for pair in headers], b"\r\n"))
        self._upgrading = False
        self._parser = httptools.HttpRequestParser(self)
        self._parse(head)
        self._parse(rest)

    def _overlong(self) -> _Refused:
        if self._message is not None:
            return _bad("chunk_framing", "too many bytes of chunk framing without content")
        return _Refused(Refusal(431, "head_bytes", f"the request's head exceeds {self._limits.max_head_bytes} bytes"))

    def _refuse(self, refusal: Refusal) -> None:
        message = self._message
        if message is None:
            message = Message(b"", b"", [], old=False, keep_alive=False)
            self.messages.append(message)
        message.refusal = refusal
        message.keep_alive = False
        message.complete = True
        message.pieces.clear()
        self._message = None
        self._begun = False
        self.done = True

    # httptools' callbacks

    def on_message_begin(self) -> None:
        self._begun = True
        self._target = b""
        self._headers = []

    def on_url(self, part: bytes) -> None:
        self._target += part
        if len(self._target) > self._limits.max_target_bytes:
            limit = self._limits.max_target_bytes
            raise _Refused(Refusal(414, "target_bytes", f"the request's target exceeds {limit} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._message is not None:
            # Trailers are not merged into the head: nothing behind the gateway expects them.
            self._trailers += 1
            if self._trailers > self._limits.max_headers:
                raise _Refused(Refusal(431, "trailer_count", "too many trailer fields"))
            return
        self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self._unproductive = 0
        parser = self._parser
        if parser.should_upgrade() and parser.get_method() != b"CONNECT":
            self._upgrading = True
            return
        message = self._checked_head()
        self._message = message
        self._trailers = 0
        self.messages.append(message)

    def on_body(self, piece: bytes) -> None:
        message = self._message
        assert message is not None
        self._unproductive = 0
        message.received += len(piece)
        limit = self._body_limit(message)
        if message.received > limit:
            raise _body_too_large(limit)
        message.pieces.append(piece)

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        message = self._message
        assert message is not None
        message.complete = True
        self.done = not message.keep_alive
        self._message = None
        self._begun = False
        self._unproductive = 0

    # what llhttp lets through

    def _checked_head(self) -> Message:
        parser, limits = self._parser, self._limits
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise _bad("version", "only HTTP/1.1 and HTTP/1.0 are spoken here")
        method, target = parser.get_method(), self._target
        if target[:1] != b"/" and (method, target) != (b"OPTIONS", b"*"):
            raise _bad("target_form", "the request's target must be a path")
        message = Message(method, target, self._headers, old=version == "1.0", keep_alive=parser.should_keep_alive())
        self._check_fields(message)
        message.control = (message.method, message.path) not in self._data_routes
        if message.length is not None and message.length > (limit := self._body_limit(message)):
            raise _body_too_large(limit)
        if len(self._headers) > limits.max_headers:
            raise _Refused(Refusal(431, "header_count", f"more than {limits.max_headers} header fields"))
        return message

    def _check_fields(self, message: Message) -> None:
        size = len(message.target)
        hosts = 0
        for name, value in message.headers.pairs:
            size += len(name) + len(value)
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                message.length = int(value)
            elif name == b"transfer-encoding":
                if message.old or value.lower() != b"chunked":
                    raise _bad("transfer_encoding", "the only transfer coding spoken here is chunked, in HTTP/1.1")
                message.chunked = True
            elif name == b"expect":
                if value.lower() != b"100-continue":
                    raise _Refused(Refusal(417, "expect", "the only expectation met here is 100-continue"))
                message.expects_continue = not message.old
        if size > self._limits.max_head_bytes:
            raise self._overlong()
        if hosts > 1 or (hosts == 0 and not message.old):
            raise _bad("host", "exactly one Host field is needed")

    def _body_limit(self, message: Message) -> int:
        return self._limits.max_control_body_bytes if message.control else self._limits.max_body_bytes


def _body_too_large(limit: int) -> _Refused:
    return _Refused(Refusal(413, "body_bytes", f"the request's body exceeds {limit} bytes", Outcome.TOO_LARGE))


def canonical_head(message: Message, *, closing: bool) -> bytes:
    """``message``'s head written anew for the parser behind this one, which then cannot read it otherwise."""
    keep_alive = message.keep_alive and not closing
    lines = [b"%b: %b\r\n" % pair for pair in forwardable(message.headers)]
    if (host := message.headers.get(b"host")) is not None:
        lines.append(b"host: %b\r\n" % host)
    if message.expects_continue:
        lines.append(b"expect: 100-continue\r\n")
    if message.chunked:
        lines.append(b"transfer-encoding: chunked\r\n")
    elif message.length is not None:
        lines.append(b"content-length: %d\r\n" % message.length)
    if keep_alive == message.old:
        lines.append(b"connection: keep-alive\r\n" if keep_alive else b"connection: close\r\n")
    version = b"HTTP/1.0" if message.old else b"HTTP/1.1"
    return b"".join((message.method, b" ", message.target, b" ", version, b"\r\n", *lines, b"\r\n"))
