from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backends.vllm.arena.pinned import parts


@given(
    origin=st.integers(0, 1 << 40),
    start=st.integers(0, 1 << 20),
    size=st.integers(0, 1 << 16),
    chunk=st.integers(256, 9999),
)
def test_parts_are_the_bytes_in_order_and_none_spans_two_chunks(origin: int, start: int, size: int, chunk: int) -> None:
    found = list(parts(origin, origin + start, size, chunk))
    at = origin + start
    for address, length in found:
        assert address == at and length > 0
        assert (address - origin) // chunk == (address + length - 1 - origin) // chunk
        at += length
    assert at == origin + start + size
    assert len(found) <= size // chunk + 2
