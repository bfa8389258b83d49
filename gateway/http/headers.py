"""Header fields as pairs of bytes, and which of them may travel on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Pair = tuple[bytes, bytes]

# RFC 9110, 7.6.1: these speak of one connection only.
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# Framing and expectations are settled on each side anew.
_SETTLED_PER_SIDE = HOP_BY_HOP | {b"host", b"content-length", b"expect"}


class Headers:
    """An ordered multimap with lower-case names; small enough that a scan beats a dictionary."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[Pair]) -> None:
        self.pairs = pairs

    def get(self, name: bytes) -> bytes | None:
        """The first value of ``name`` (lower case)."""
        for candidate, value in self.pairs:
            if candidate == name:
                return value
        return None

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __repr__(self) -> str:
        return f"Headers({self.pairs!r})"


def connection_options(headers: Iterable[Pair]) -> frozenset[bytes]:
    """The lower-case tokens of every Connection field."""
    return frozenset(
        token
        for name, value in headers
        if name == b"connection"
        for part in value.lower().split(b",")
        if (token := part.strip())
    )


def forwardable(headers: Iterable[Pair], drop: frozenset[bytes] = frozenset()) -> list[Pair]:
    """The fields that a proxy may pass on: not hop-by-hop (listed in Connection too), not framing, not in ``drop``."""
    options = connection_options(headers)
    return [
        pair for pair in headers if pair[0] not in _SETTLED_PER_SIDE and pair[0] not in drop and pair[0] not in options
    ]
