"""Hypothesis strategies for any message, made from its type."""

import enum
import types
import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

INTEGERS = st.integers(-(2**63), 2**64 - 1)


def instances(kind: Any) -> st.SearchStrategy[Any]:
    """Values of ``kind``: a struct, a union of them, or what their fields are made of."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([instances(argument) for argument in arguments])
    if origin is tuple:
        return st.lists(instances(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(instances(arguments[0]), instances(arguments[1]), max_size=3)
    if issubclass(kind, msgspec.Struct):
        return _structs(kind)
    if issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    return _LEAVES[kind]


def _structs(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field.name: instances(hints[field.name]) for field in msgspec.structs.fields(kind)})


_LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    int: INTEGERS,
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    bytes: st.binary(max_size=20),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    type(None): st.none(),
}
