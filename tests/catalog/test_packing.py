from __future__ import annotations

from typing import Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog.layout import TAGS
from catalog.packing import form_of
from catalog.records import ArtifactRecord, KeyRecord, PolicyRecord, RevisionRecord
from wire.events import (
    AnyEvent,
    ArtifactFacts,
    ChannelMoved,
    Event,
    PolicyCreated,
    Provenance,
    RevisionPublished,
    Split,
)

HEX = "0123456789abcdef"
TEXTS = st.text(max_size=70) | st.text(HEX, min_size=64, max_size=64) | st.text("0aA\u0664", min_size=64, max_size=64)


NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)
LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXTS,
    int: NUMBERS,
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    bytes: st.binary(max_size=70),
    type(None): st.none(),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type, with every text a digest or almost one now and then."""
    arguments = get_args(kind)
    if kind in LEAVES:
        return LEAVES[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.builds(kind, *(values_of(field.type) for field in msgspec.structs.fields(kind)))
    if get_origin(kind) is tuple:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if get_origin(kind) is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if arguments:
        return st.one_of(*(values_of(argument) for argument in arguments))
    return st.sampled_from(list(kind))


@pytest.mark.parametrize("kind", [*get_args(AnyEvent), ArtifactRecord, KeyRecord, PolicyRecord, RevisionRecord])
def test_everything_comes_back_as_it_was(kind: type[msgspec.Struct]) -> None:
    form = form_of(kind, TAGS)
    assert form is not None

    @settings(max_examples=30, deadline=None)
    @given(values_of(kind))
    def round_trip(record: msgspec.Struct) -> None:
        raw = msgspec.msgpack.encode(form.pack(record))
        assert form.unpack(msgspec.msgpack.decode(raw)) == record

    round_trip()


def test_every_event_says_what_it_is() -> None:
    form = form_of(Event, TAGS)
    assert form is not None
    event = Event(7, 1000, "k1", PolicyCreated("acme/a", "tiny"))
    assert form.pack(event) == [7, 1000, "k1", [1, "acme/a", "tiny"]]
    assert form.unpack([7, 1000, "k1", ["PolicyCreated", "acme/a", "tiny"]]) == event


def test_digests_are_bytes_and_trailing_defaults_are_left_out() -> None:
    facts = ArtifactFacts("ab" * 32, 10, 8, ("q",), "bf16", 2, 4)
    form = form_of(RevisionPublished, TAGS)
    assert form is not None
    packed = [b"\xab" * 32, 10, 8, ["q"], "bf16", 2, 4]
    assert form.pack(RevisionPublished("acme/a", 1, facts)) == ["acme/a", 1, packed]
    assert form.pack(RevisionPublished("acme/a", 1, facts, Provenance(run="r"))) == ["acme/a", 1, packed, ["", "", "r"]]


def test_what_an_older_release_wrote_has_the_defaults_of_the_fields_that_came_since() -> None:
    form = form_of(PolicyRecord, TAGS)
    assert form is not None
    assert form.unpack(["acme/a", "tiny", 1, 2, {"stable": []}, False, 1000]) == PolicyRecord(
        "acme/a", "tiny", 1, 2, {"stable": ()}, False, 1000
    )


def test_a_move_that_an_older_release_noted_replaces_nothing_that_a_rollback_knows() -> None:
    form = form_of(ChannelMoved, TAGS)
    assert form is not None
    assert form.unpack(["acme/a", "stable", [[1, 1]], 7]) == ChannelMoved("acme/a", "stable", (Split(1),), 7, (), 0)
    assert form.pack(ChannelMoved("acme/a", "stable", (Split(1),), 7)) == ["acme/a", "stable", [[1]], 7]


def test_a_type_without_a_form_is_a_mistake_of_ours() -> None:
    with pytest.raises(TypeError, match="no form on disk"):
        form_of(int | str, TAGS)
