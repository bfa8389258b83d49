"""Headers round-trip, and anything else is refused by name."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.codec import MalformedMessage
from wire.drops import Drop
from wire.frames import (
    LONGEST_DEADLINE_S,
    LONGEST_HEADER,
    Kind,
    Verdict,
    pack_answer,
    pack_ask,
    pack_feed,
    unpack_answer,
    unpack_ask,
    unpack_feed,
)

NUMBERS = st.integers(0, 2**64 - 1)


@given(NUMBERS, st.floats(0, LONGEST_DEADLINE_S), st.binary())
def test_asks_round_trip(number: int, remaining_s: float, body: bytes) -> None:
    assert unpack_ask(pack_ask(number, remaining_s, body)) == (number, remaining_s, body)


@given(NUMBERS, st.sampled_from(Verdict), st.binary())
def test_answers_round_trip(number: int, verdict: Verdict, body: bytes) -> None:
    assert unpack_answer(pack_answer(number, verdict, body)) == (number, verdict, body)


@given(NUMBERS, NUMBERS, st.sampled_from(Kind), st.binary())
def test_feed_frames_round_trip(epoch: int, number: int, kind: Kind, body: bytes) -> None:
    assert unpack_feed(pack_feed(epoch, number, kind, body)) == (epoch, number, kind, body)


@given(st.binary(max_size=2 * LONGEST_HEADER))
def test_noise_is_a_bad_frame_or_a_header(noise: bytes) -> None:
    for unpack in (unpack_ask, unpack_answer, unpack_feed):
        try:
            unpack(noise)
        except MalformedMessage as error:
            assert error.reason is Drop.BAD_FRAME


@pytest.mark.parametrize("remaining_s", [math.nan, math.inf, -math.inf, -1.0])
def test_a_deadline_is_a_length_of_time(remaining_s: float) -> None:
    with pytest.raises(MalformedMessage, match="s left"):
        unpack_ask(pack_ask(1, remaining_s, b""))


def test_no_deadline_is_further_than_the_bound() -> None:
    assert unpack_ask(pack_ask(1, 1e300, b""))[1] == LONGEST_DEADLINE_S


def test_another_version_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="version 2"):
        unpack_ask(struct.pack(">BQd", 2, 1, 1.0))
    with pytest.raises(MalformedMessage, match="version 2"):
        unpack_answer(struct.pack(">BQB", 2, 1, 0))
    with pytest.raises(MalformedMessage, match="version 2"):
        unpack_feed(struct.pack(">BQQB", 2, 1, 1, 0))


def test_verdicts_and_kinds_that_are_not_known_are_refused() -> None:
    with pytest.raises(MalformedMessage, match="verdict 9"):
        unpack_answer(struct.pack(">BQB", 1, 1, 9))
    with pytest.raises(MalformedMessage, match="kind 9"):
        unpack_feed(struct.pack(">BQQB", 1, 1, 1, 9))
