"""The request parser: what it reads, what it refuses, and that slicing never changes either."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.limits import HttpLimits
from gateway.http.reader import Message, RequestReader, canonical_head

ROUTES = frozenset({(b"POST", b"/data")})
HEAD = b"POST /data HTTP/1.1\r\nHost: x\r\n"


def read(raw: bytes, **limits: int) -> list[Message]:
    reader = RequestReader(ROUTES, HttpLimits(**limits))
    reader.feed(raw)
    return list(reader.messages)


def refusal(raw: bytes, **limits: int) -> tuple[int, str]:
    last = read(raw, **limits)[-1]
    assert last.refusal is not None, "was not refused"
    return last.refusal.status, last.refusal.reason


def test_reads_a_request() -> None:
    (message,) = read(b"POST /data?a=1 HTTP/1.1\r\nHost: x\r\nX-Y: \t z \r\nContent-Length: 3\r\n\r\nabc")
    assert (message.method, message.path, message.target) == (b"POST", b"/data", b"/data?a=1")
    assert message.headers.pairs == [(b"host", b"x"), (b"x-y", b"z"), (b"content-length", b"3")]
    assert message.take() == b"abc"
    assert message.complete
    assert message.keep_alive
    assert not message.control


def test_reads_pipelined_requests_in_order() -> None:
    raw = HEAD + b"Content-Length: 1\r\n\r\naGET /b HTTP/1.1\r\nHost: x\r\n\r\n" + HEAD + b"Content-Length: 1\r\n\r\nc"
    assert [(m.method, m.take(), m.control) for m in read(raw)] == [
        (b"POST", b"a", False),
        (b"GET", b"", True),
        (b"POST", b"c", False),
    ]


def test_joins_chunks_and_drops_trailers_and_extensions() -> None:
    (message,) = read(
        HEAD + b"Transfer-Encoding: Chunked\r\n\r\n3;ext=1\r\nabc\r\n2\r\nde\r\n0\r\nX-Trailer: y\r\n\r\n"
    )
    assert message.take() == b"abcde"
    assert message.headers.get(b"x-trailer") is None


def test_bytes_behind_the_last_request_are_ignored() -> None:
    (message,) = read(HEAD + b"Connection: close\r\nContent-Length: 1\r\n\r\nagarbage")
    assert message.take() == b"a"
    assert message.refusal is None


SMUGGLING = {
    "both lengths": b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths, other order": b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "same length twice": b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "conflicting lengths": b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "list of lengths": b"Content-Length: 3, 3\r\n\r\nabc",
    "plus": b"Content-Length: +3\r\n\r\nabc",
    "minus": b"Content-Length: -3\r\n\r\nabc",
    "space in length": b"Content-Length: 3 3\r\n\r\nabc",
    "hex length": b"Content-Length: 0x3\r\n\r\nabc",
    "empty length": b"Content-Length: \r\n\r\n",
    "length overflow": b"Content-Length: 99999999999999999999999\r\n\r\n",
    "other coding": b"Transfer-Encoding: gzip\r\n\r\n",
    "coding before chunked": b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "identity": b"Transfer-Encoding: identity\r\n\r\n",
    "nearly chunked": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "quoted chunked": b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked then identity": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "vertical tab before chunked": b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "chunk size not hex": b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    "chunk size 0x": b"Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
    "chunk size negative": b"Transfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n",
    "chunk size overflow": b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nabc\r\n0\r\n\r\n",
    "space after chunk size": b"Transfer-Encoding: chunked\r\n\r\n3 \r\nabc\r\n0\r\n\r\n",
    "bare LF after chunk size": b"Transfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n",
    "bare LF in chunk extension": b"Transfer-Encoding: chunked\r\n\r\n3;a\nb\r\nabc\r\n0\r\n\r\n",
    "chunk longer than said": b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcX0\r\n\r\n",
    "length as trailer": b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 4\r\n\r\n",
    "folded line": b"X: a\r\n b\r\nContent-Length: 0\r\n\r\n",
    "folded coding": b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "space before colon": b"Content-Length : 3\r\n\r\nabc",
    "bare LF": b"X: a\nContent-Length: 3\r\n\r\nabc",
    "bare CR": b"X: a\rContent-Length: 3\r\n\r\nabc",
    "bare LF at the end": b"Content-Length: 0\r\n\n",
    "NUL in value": b"X: a\0b\r\n\r\n",
    "control character in value": b"X: a\x01b\r\n\r\n",
    "DEL in value": b"X: a\x7fb\r\n\r\n",
    "control character in name": b"X\x01: a\r\n\r\n",
    "high byte in name": b"X\xff: a\r\n\r\n",
    "no name": b": a\r\n\r\n",
    "no colon": b"abc\r\n\r\n",
    "two hosts": b"Host: y\r\n\r\n",
}


@pytest.mark.parametrize("shape", SMUGGLING)
def test_refuses_smuggling_shapes(shape: str) -> None:
    status, _ = refusal(HEAD + SMUGGLING[shape])
    assert status == 400


WRONG_LINES = {
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/2.0": b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nHost: x\r\n\r\n",
    "absolute form": b"GET http://x/a HTTP/1.1\r\nHost: x\r\n\r\n",
    "CONNECT": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "asterisk with GET": b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "unknown method": b"FOO / HTTP/1.1\r\nHost: x\r\n\r\n",
    "lower-case method": b"get / HTTP/1.1\r\nHost: x\r\n\r\n",
    "space before the first field": b"GET / HTTP/1.1\r\n Host: x\r\n\r\n",
    "high byte in target": b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "NUL in target": b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n",
    "tab in target": b"GET /a\tb HTTP/1.1\r\nHost: x\r\n\r\n",
    "bare LF": b"GET / HTTP/1.1\nHost: x\n\n",
    "TLS": b"\x16\x03\x01\x02\x00",
    "chunked in HTTP/1.0": b"POST /data HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("shape", WRONG_LINES)
def test_refuses_wrong_request_lines(shape: str) -> None:
    assert refusal(WRONG_LINES[shape])[0] == 400


def test_refuses_other_expectations() -> None:
    assert refusal(HEAD + b"Expect: magic\r\nContent-Length: 1\r\n\r\n") == (417, "expect")


def test_bounds_the_target() -> None:
    raw = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"
    assert read(raw % (b"a" * 99), max_target_bytes=100)[0].refusal is None
    assert refusal(raw % (b"a" * 100), max_target_bytes=100) == (414, "target_bytes")
    assert refusal(b"GET /" + b"a" * 101, max_target_bytes=100) == (414, "target_bytes")


def test_bounds_the_number_of_fields() -> None:
    raw = b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n"
    assert read(raw % (b"A: b\r\n" * 9), max_headers=10)[0].refusal is None
    assert refusal(raw % (b"A: b\r\n" * 10), max_headers=10) == (431, "header_count")


def test_bounds_the_head() -> None:
    raw = b"GET / HTTP/1.1\r\nHost: x\r\nA: %b\r\n\r\n"
    assert read(raw % (b"a" * 900), max_head_bytes=1000)[0].refusal is None
    assert refusal(raw % (b"a" * 1000), max_head_bytes=1000) == (431, "head_bytes")


def test_bounds_a_field_that_never_ends() -> None:
    reader = RequestReader(ROUTES, HttpLimits(max_head_bytes=1000))
    reader.feed(b"GET / HTTP/1.1\r\nHost: x\r\nA: ")
    fed = 0
    while not reader.done:
        reader.feed(b"a" * 100)
        fed += 100
    assert fed <= 1000
    assert reader.messages[0].refusal is not None
    assert reader.messages[0].refusal.status == 431


def test_bounds_the_body_by_its_length_before_any_of_it_came() -> None:
    assert refusal(HEAD + b"Content-Length: 101\r\n\r\n", max_body_bytes=100) == (413, "body_bytes")
    assert read(HEAD + b"Content-Length: 100\r\n\r\n", max_body_bytes=100)[0].refusal is None


def test_bounds_a_chunked_body() -> None:
    raw = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"33\r\n" + b"a" * 51 + b"\r\n"
    assert read(raw, max_body_bytes=100)[0].refusal is None
    assert refusal(raw + b"33\r\n" + b"a" * 51, max_body_bytes=100) == (413, "body_bytes")


def test_control_routes_have_their_own_body_bound() -> None:
    raw = b"PUT /other HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\n\r\n"
    assert read(raw, max_body_bytes=100)[0].refusal is None
    assert refusal(raw, max_control_body_bytes=100) == (413, "body_bytes")


@pytest.mark.parametrize("filler", [b"x" * 100, b"X-Trailer: y\r\n" * 7])
def test_bounds_chunk_framing_that_carries_nothing(filler: bytes) -> None:
    reader = RequestReader(ROUTES, HttpLimits(max_head_bytes=1000, max_headers=50))
    start = b"1;a=" if filler.startswith(b"x") else b"0\r\n"
    reader.feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + start)
    for _ in range(20):
        reader.feed(filler)
    assert reader.messages[0].refusal is not None


@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"Content-Length: 3\r\n", b"abc"),
        (b"Transfer-Encoding: chunked\r\n", b"3\r\nabc\r\n0\r\n\r\n"),
    ],
)
def test_an_offered_upgrade_is_declined_and_its_body_is_no_second_request(framing: bytes, body: bytes) -> None:
    raw = HEAD + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n" + framing + b"\r\n"
    first, second = read(raw + body + b"GET /b HTTP/1.1\r\nHost: x\r\n\r\n")
    assert first.take() == b"abc"
    assert first.headers.get(b"upgrade") is None
    assert first.headers.get(b"connection") == b"http2-settings"
    assert second.target == b"/b"


def test_time_out_refuses_what_is_half_read() -> None:
    for raw, reason in ((b"POST /da", "slow_head"), (HEAD + b"Content-Length: 3\r\n\r\na", "slow_body")):
        reader = RequestReader(ROUTES, HttpLimits())
        reader.feed(raw)
        reader.time_out()
        assert reader.messages[0].refusal is not None
        assert (reader.messages[0].refusal.status, reader.messages[0].refusal.reason) == (408, reason)


def test_canonical_head_drops_what_belongs_to_the_connection() -> None:
    (message,) = read(
        b"PUT /x?q HTTP/1.1\r\nHost: h\r\nConnection: close, X-Mine\r\nX-Mine: 1\r\nX-Other: 2\r\nTE: trailers\r\n"
        b"Keep-Alive: 5\r\nContent-Length: 0\r\n\r\n"
    )
    lines = canonical_head(message, closing=False).split(b"\r\n")
    assert lines[0] == b"PUT /x?q HTTP/1.1"
    assert sorted(lines[1:-2]) == [b"connection: close", b"content-length: 0", b"host: h", b"x-other: 2"]


def summary(message: Message) -> tuple[object, ...]:
    reason = message.refusal.reason if message.refusal else None
    return (
        message.method,
        message.target,
        tuple(message.headers.pairs),
        b"".join(message.pieces),
        message.complete,
        reason,
    )


REQUESTS = st.sampled_from(
    [
        HEAD + b"Content-Length: 5\r\n\r\nabcde",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n1\r\nd\r\n0\r\nT: t\r\n\r\n",
        b"GET /status?x=1 HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n",
        b"\r\nGET /old HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nhi",
        HEAD + b"Connection: close\r\nContent-Length: 1\r\n\r\nz",
        HEAD + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\nz",
        b"GET /status HTTP/1.1\r\n\r\n",
    ]
)


@given(st.lists(REQUESTS, min_size=1, max_size=4), st.lists(st.integers(1, 40), max_size=30))
def test_slicing_changes_nothing(requests: list[bytes], cuts: list[int]) -> None:
    raw = b"".join(requests)
    whole = RequestReader(ROUTES, HttpLimits())
    whole.feed(raw)
    sliced = RequestReader(ROUTES, HttpLimits())
    start = 0
    for size in [*cuts, len(raw)]:
        sliced.feed(memoryview(raw)[start : start + size])
        start += size
    assert [summary(m) for m in sliced.messages] == [summary(m) for m in whole.messages]
    assert sliced.done == whole.done


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_raise(raw: bytes) -> None:
    reader = RequestReader(ROUTES, HttpLimits())
    reader.feed(raw)
    reader.feed(HEAD + raw)
    assert all(message.complete or message.refusal is None for message in reader.messages)
