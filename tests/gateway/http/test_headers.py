"""Which header fields travel on."""

from __future__ import annotations

from gateway.http import Headers, forwardable


def test_get_is_the_first_value() -> None:
    headers = Headers([(b"a", b"1"), (b"b", b"2"), (b"a", b"3")])
    assert (headers.get(b"a"), headers.get(b"c")) == (b"1", None)
    assert list(headers) == [(b"a", b"1"), (b"b", b"2"), (b"a", b"3")]
    assert len(headers) == 3


def test_only_end_to_end_fields_are_forwardable() -> None:
    pairs = [
        (b"host", b"h"),
        (b"connection", b"keep-alive, X-One"),
        (b"connection", b"x-two"),
        (b"x-one", b"1"),
        (b"x-two", b"2"),
        (b"keep-alive", b"5"),
        (b"proxy-connection", b"x"),
        (b"proxy-authorization", b"x"),
        (b"te", b"trailers"),
        (b"trailer", b"x"),
        (b"transfer-encoding", b"chunked"),
        (b"upgrade", b"h2c"),
        (b"content-length", b"3"),
        (b"expect", b"100-continue"),
        (b"authorization", b"secret"),
        (b"x-three", b"3"),
        (b"x-three", b"4"),
    ]
    assert forwardable(pairs, drop=frozenset((b"authorization",))) == [(b"x-three", b"3"), (b"x-three", b"4")]
