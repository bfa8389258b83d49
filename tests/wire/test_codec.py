"""Every message survives the wire, and no bytes do worse than being called malformed."""

import pickle
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.strategies import instances
from wire.codec import Codec, MalformedMessage
from wire.drops import Drop
from wire.events import AnyEvent, Event
from wire.node import Acquire, AnswerOfNode, AskOfNode, ReportOfNode
from wire.outcomes import InvalidRequest, TooLarge
from wire.registrar import AnyAnswer, AnyCommand
from wire.transfer import AnswerOfTransfer, AskOfTransfer, OfferOfTrainer

UNIONS = [
    AskOfNode, AnswerOfNode, ReportOfNode, AnyCommand, AnyAnswer, Event, AnyEvent,
    OfferOfTrainer, AskOfTransfer, AnswerOfTransfer,
]  # fmt: skip
MESSAGES = [(union, kind) for union in UNIONS for kind in typing.get_args(union) or (union,)]


@pytest.mark.parametrize(("union", "kind"), MESSAGES, ids=lambda value: getattr(value, "__name__", "in"))
@given(data=st.data())
def test_every_message_round_trips(union: Any, kind: Any, data: st.DataObject) -> None:
    codec: Codec[Any] = Codec(union)
    message = data.draw(instances(kind))
    again = codec.decode(codec.encode(message))
    assert type(again) is kind
    assert again == message


@pytest.mark.parametrize("union", UNIONS)
@given(noise=st.binary(max_size=200))
def test_random_bytes_are_malformed_and_nothing_worse(union: Any, noise: bytes) -> None:
    codec: Codec[Any] = Codec(union)
    try:
        message = codec.decode(noise)
    except MalformedMessage as error:
        assert error.reason in Drop
    else:
        assert codec.decode(codec.encode(message)) == message


@given(data=st.data())
def test_mutated_messages_are_decoded_or_malformed(data: st.DataObject) -> None:
    codec: Codec[Any] = Codec(data.draw(st.sampled_from(UNIONS)))
    message = data.draw(st.sampled_from([kind for _, kind in MESSAGES]).flatmap(instances))
    encoded = bytearray(codec.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(encoded)))
    try:
        codec.decode(bytes(encoded[:cut]))
    except MalformedMessage as error:
        assert error.reason in Drop


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", Drop.UNDECODABLE),
        (b"\xc1", Drop.UNDECODABLE),
        (msgspec.msgpack.encode({"t": "Acquire", "gateway": "g", "lease": 1, "base": "b"})[:-1], Drop.UNDECODABLE),
        (msgspec.msgpack.encode({"t": "Explode"}), Drop.UNKNOWN),
        (msgspec.msgpack.encode({"t": "Granted", "lease": 1}), Drop.UNKNOWN),
        (msgspec.msgpack.encode({"gateway": "g"}), Drop.INVALID),
        (msgspec.msgpack.encode([1, 2]), Drop.INVALID),
        (msgspec.msgpack.encode({"t": "Acquire", "gateway": "g", "lease": "1", "base": "b"}), Drop.INVALID),
        (msgspec.msgpack.encode({"t": "Acquire", "gateway": "g", "base": "b"}), Drop.INVALID),
        (b"\x81\xa1x" + b"\x91" * 1_000_000, Drop.UNDECODABLE),
        (b"\x82\xa1t\xa7Release\xa6leases\xdd\xff\xff\xff\xff", Drop.UNDECODABLE),
    ],
    ids=[
        "empty", "reserved byte", "cut short", "unknown type", "another socket's type", "no type", "not a map",
        "wrong field type", "missing field", "nested a million deep", "claims four billion items",
    ],
)  # fmt: skip
def test_what_is_wrong_has_a_name(data: bytes, reason: Drop) -> None:
    with pytest.raises(MalformedMessage) as caught:
        Codec(AskOfNode).decode(data)
    assert caught.value.reason is reason


@pytest.mark.parametrize("number", [1 << 64, -(1 << 63) - 1])
def test_a_number_of_over_64_bits_is_refused(number: int) -> None:
    with pytest.raises(InvalidRequest, match="64 bits"):
        Codec(AskOfNode).encode(Acquire(gateway="g", instance="i", lease=number, base="b"))


def test_size_is_bounded_both_ways() -> None:
    small: Codec[Any] = Codec(AskOfNode, max_bytes=100)
    long = Acquire(gateway="g" * 100, instance="i", lease=1, base="b")
    with pytest.raises(TooLarge, match=r"Acquire of .* over the wire's bound of 100"):
        small.encode(long)
    with pytest.raises(MalformedMessage) as caught:
        small.decode(Codec(AskOfNode).encode(long))
    assert caught.value.reason is Drop.OVERSIZED


def test_fields_that_are_not_known_yet_are_ignored() -> None:
    newer = msgspec.msgpack.encode(
        {"t": "Acquire", "gateway": "g", "instance": "i", "lease": 1, "base": "b", "shine": [1]}
    )
    assert Codec(AskOfNode).decode(newer) == Acquire(gateway="g", instance="i", lease=1, base="b")


def test_malformed_messages_pickle_like_every_error() -> None:
    error = pickle.loads(pickle.dumps(MalformedMessage("no", reason=Drop.UNKNOWN)))
    assert isinstance(error, InvalidRequest)
    assert (error.message, error.reason) == ("no", Drop.UNKNOWN)
