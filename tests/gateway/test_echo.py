from __future__ import annotations

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from gateway.echo import ModelEcho

ADAPTER = "acme@" + "0123456789abcdef" * 4
SHOWN = "acme/bot@7"


def through(body: bytes, cuts: list[int]) -> list[bytes]:
    echo = ModelEcho(ADAPTER, SHOWN)
    edges = [0, *sorted(cuts), len(body)]
    pieces = [echo.feed(body[start:end]) for start, end in itertools.pairwise(edges)]
    return [*pieces, echo.rest()]


CONTENT = st.sampled_from(['"', '"model":"', ADAPTER, "hello", f'"model":"{ADAPTER}"', "\\", "{", "é", "\n"])


@given(contents=st.lists(CONTENT, max_size=6), data=st.data(), spaced=st.booleans())
def test_the_model_is_renamed_wherever_the_stream_is_cut(
    contents: list[str], data: st.DataObject, spaced: bool
) -> None:
    separators = (", ", ": ") if spaced else (",", ":")
    events = [{"id": str(i), "model": ADAPTER, "content": text} for i, text in enumerate(contents)]
    body = b"".join(b"data: " + json.dumps(event, separators=separators).encode() + b"\n\n" for event in events)
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=8))
    out = b"".join(through(body, cuts))
    told = [json.loads(line.removeprefix(b"data: ")) for line in out.split(b"\n\n") if line]
    assert told == [event | {"model": SHOWN} for event in events]


@given(body=st.binary(max_size=300), data=st.data())
def test_other_bytes_pass_unchanged(body: bytes, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=8))
    assert b"".join(through(body, cuts)) == body


def test_a_whole_event_is_never_held_back() -> None:
    echo = ModelEcho(ADAPTER, SHOWN)
    event = f'data: {{"model":"{ADAPTER}","content":"x"}}\n\n'.encode()
    assert echo.feed(event) == f'data: {{"model":"{SHOWN}","content":"x"}}\n\n'.encode()
    assert echo.rest() == b""


def test_only_the_beginning_of_a_match_is_held_back() -> None:
    echo = ModelEcho(ADAPTER, SHOWN)
    assert echo.feed(b'{"content":"some text","model":"acme@0') == b'{"content":"some text",'
    assert echo.feed(b'12"}') == b'"model":"acme@012"}'
