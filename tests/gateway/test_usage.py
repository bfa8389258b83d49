from __future__ import annotations

import itertools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.usage import UsageMeter, ask_for_usage


def cut(data: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[begin:end] for begin, end in itertools.pairwise(marks)]


def fed(meter: UsageMeter, pieces: list[bytes]) -> bytes:
    return b"".join(meter.feed(piece, number == len(pieces) - 1) for number, piece in enumerate(pieces))


def event(document: object) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


USAGE = {"prompt_tokens": 3, "total_tokens": 12, "completion_tokens": 9, "details": {"cached_tokens": 1}}
WORDS = [event({"choices": [{"delta": {"content": text}}]}) for text in ('a "usage":{"total_tokens":999}', "b", "c")]
LAST = event({"choices": [], "usage": USAGE})
DONE = b"data: [DONE]\n\n"


@given(st.lists(st.integers(0, 1000), max_size=12), st.booleans())
def test_a_stream_is_counted_however_it_is_cut(places: list[int], hides: bool) -> None:
    meter = UsageMeter(stream=True, hides=hides)
    passed = fed(meter, cut(b"".join([*WORDS, LAST, DONE]), places))
    assert passed == b"".join([*WORDS, *([] if hides else [LAST]), DONE])
    assert meter.tokens == 12
    assert meter.events == 5


@given(st.lists(st.integers(0, 3000), max_size=12), st.text(max_size=900))
def test_a_document_is_counted_however_it_is_cut(places: list[int], text: str) -> None:
    document = json.dumps({"choices": [{"text": text + '"usage":{"total_tokens":5}'}], "usage": USAGE}).encode()
    meter = UsageMeter(stream=False, hides=False)
    assert fed(meter, cut(document, places)) == document
    assert meter.tokens == 12


# what prompt_logprobs and logprobs tell of a prompt that has the word in it
LOGPROBS = [
    {"prompt_logprobs": [None, {"5": {"logprob": -1.0, "rank": 1, "decoded_token": "usage"}}]},
    {"logprobs": {"top_logprobs": [{"usage": -0.5, "total_tokens": 7}], "tokens": ["usage"]}},
]


@pytest.mark.parametrize("behind", LOGPROBS)
@given(places=st.lists(st.integers(0, 3000), max_size=12), count=st.integers(1, 40))
def test_a_token_that_reads_usage_is_none(behind: dict[str, object], places: list[int], count: int) -> None:
    document = json.dumps({"usage": USAGE, "others": [behind] * count}).encode()
    meter = UsageMeter(stream=False, hides=False)
    assert fed(meter, cut(document, places)) == document
    assert meter.tokens == 12


def test_details_may_stand_before_the_total() -> None:
    meter = UsageMeter(stream=False, hides=False)
    fed(meter, [b'{"usage": {"details": {"cached_tokens": 1}, "total_tokens": 12}}'])
    assert meter.tokens == 12


def test_usage_behind_a_very_long_event_is_found() -> None:
    long = event({"choices": [{"delta": {"content": "x" * (1 << 20)}}]})
    whole = long + LAST
    meter = UsageMeter(stream=True, hides=True)
    assert fed(meter, [whole[: len(long) + 20], whole[len(long) + 20 :], DONE]) == long + DONE
    assert meter.tokens == 12


def test_whole_events_are_passed_on_at_once() -> None:
    meter = UsageMeter(stream=True, hides=True)
    for word in WORDS:
        assert meter.feed(word, False) == word
    assert meter.feed(LAST[:9], False) == b""
    assert meter.tokens is None


def test_usage_in_every_event_is_the_last_ones_and_stays() -> None:
    chunks = [event({"choices": [{}], "usage": {"total_tokens": count}}) for count in (4, 5)]
    meter = UsageMeter(stream=True, hides=True)
    assert fed(meter, chunks) == b"".join(chunks)
    assert meter.tokens == 5


def test_a_stream_without_usage_has_as_many_tokens_as_nobody_said() -> None:
    meter = UsageMeter(stream=True, hides=True)
    fed(meter, [*WORDS, DONE])
    assert (meter.tokens, meter.events) == (None, 4)


@pytest.mark.parametrize(
    ("options", "asked", "hides"),
    [
        (None, {"include_usage": True}, True),
        (b"null", {"include_usage": True}, True),
        (b"{}", {"include_usage": True}, True),
        (b'{"include_usage":false,"x":[1]}', {"include_usage": True, "x": [1]}, True),
        (b'{"include_usage":true}', {"include_usage": True}, False),
        (b"[]", [], False),
    ],
)
def test_usage_is_asked_for_where_the_client_did_not(options: bytes | None, asked: object, hides: bool) -> None:
    fields = {} if options is None else {"stream_options": msgspec.Raw(options)}
    assert ask_for_usage(fields) is hides
    assert json.loads(bytes(fields["stream_options"])) == asked
