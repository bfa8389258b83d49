"""Structs as they lie on disk: arrays in the order of their fields, without names, and digests as their 32 bytes.

A field is only ever added at the end of a struct, with a default: trailing defaults are not written, and what an
older release wrote still reads. A text of 64 lower-case hex digits is written as bytes; a text field that holds bytes
is one.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

_HEX_LENGTH = 64
_UNCHANGED = frozenset({int, bool, float, bytes, type(None)})

Change = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """How values of one type are written: to what MessagePack has, and back."""

    pack: Change
    unpack: Change


def form_of(kind: Any, tags: Mapping[type, int | str]) -> Form | None:
    """The form of values of ``kind``; None where they are written as they are.

    ``tags`` are the first elements of what is written for structs that stand in a union; a struct that is not among
    them is tagged with its name. Raises TypeError for a type that has no form.
    """
    origin = typing.get_origin(kind)
    if kind in _UNCHANGED:
        return None
    if kind is str:
        return Form(_pack_text, _unpack_text)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _struct(kind, tags)
    if origin in (types.UnionType, typing.Union):
        return _union(typing.get_args(kind), tags)
    if origin is tuple and typing.get_args(kind)[1:] == (...,):
        return _sequence(typing.get_args(kind)[0], tags)
    if origin is dict:
        return _mapping(typing.get_args(kind)[1], tags)
    return Form(msgspec.to_builtins, lambda value: msgspec.convert(value, kind))


def _pack_text(text: str) -> str | bytes:
    if len(text) == _HEX_LENGTH:
        try:
            raw = bytes.fromhex(text)
        except ValueError:
            return text
        return raw if raw.hex() == text else text
    return text


def _unpack_text(raw: str | bytes) -> str:
    return raw.hex() if isinstance(raw, bytes) else raw


def _struct(kind: type[msgspec.Struct], tags: Mapping[type, int | str]) -> Form:
    fields = msgspec.structs.fields(kind)
    required = sum(1 for field in fields if field.required)
    texts = [place for place, field in enumerate(fields) if field.type is str]
    forms = {
        place: form
        for place, field in enumerate(fields)
        if field.type is not str and (form := form_of(field.type, tags)) is not None
    }
    unpacks = [(place, form.unpack) for place, form in forms.items()]
    pack_all = _packer(fields, {place: form.pack for place, form in forms.items()})
    defaults = [_default(field) for field in fields]
    for place in range(required, len(fields)):
        if place in forms:
            defaults[place] = forms[place].pack(defaults[place])

    def pack(record: msgspec.Struct) -> list[Any]:
        values = pack_all(record)
        count = len(values)
        while count > required and values[count - 1] == defaults[count - 1]:
            count -= 1
        del values[count:]
        return values

    def unpack(values: list[Any]) -> msgspec.Struct:
        count = len(values)
        for place in texts:
            if place < count and type(values[place]) is bytes:
                values[place] = values[place].hex()
        for place, unpack_field in unpacks:
            if place < count:
                values[place] = unpack_field(values[place])
        return kind(*values)

    return Form(pack_all if required == len(fields) else pack, unpack)


def _packer(fields: Sequence[msgspec.structs.FieldInfo], packs: Mapping[int, Change]) -> Callable[[Any], list[Any]]:
    """What makes a list of a record's fields, each as it is packed.

    It is written out and compiled, field by field, as dataclasses are: an import packs five records a policy, and a
    loop over their fields would be the larger part of the time that this takes.
    """
    known: dict[str, Any] = {"pack_text": _pack_text}
    items = []
    for place, field in enumerate(fields):
        value = f"record.{field.name}"
        if field.type is str:
            items.append(f"pack_text({value}) if len({value}) == {_HEX_LENGTH} else {value}")
        elif place in packs:
            known[f"pack_{place}"] = packs[place]
            items.append(f"pack_{place}({value})")
        else:
            items.append(value)
    # made of the names of our own structs' fields alone
    packer: Callable[[Any], list[Any]] = eval(f"lambda record: [{', '.join(items)}]", known)  # noqa: S307
    return packer


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _union(kinds: tuple[Any, ...], tags: Mapping[type, int | str]) -> Form | None:
    """Structs with a tag in front, or one type that may be None."""
    some = [kind for kind in kinds if kind is not type(None)]
    if len(some) == 1:
        form = form_of(some[0], tags)
        if form is None:
            return None
        pack_one, unpack_one = form.pack, form.unpack
        return Form(
            lambda value: None if value is None else pack_one(value),
            lambda value: None if value is None else unpack_one(value),
        )
    if not all(isinstance(kind, type) and issubclass(kind, msgspec.Struct) for kind in kinds):
        if all(kind in _UNCHANGED for kind in kinds):
            return None
        raise TypeError(f"a union of {kinds} has no form on disk")
    packs = {kind: (tags.get(kind, kind.__name__), _struct(kind, tags).pack) for kind in kinds}
    unpacks = {tags.get(kind, kind.__name__): _struct(kind, tags).unpack for kind in kinds}
    # a struct that was written before it had a number
    unpacks |= {kind.__name__: unpacks[tags.get(kind, kind.__name__)] for kind in kinds}

    def pack(value: msgspec.Struct) -> list[Any]:
        tag, pack_body = packs[type(value)]
        return [tag, *pack_body(value)]

    return Form(pack, lambda values: unpacks[values[0]](values[1:]))


def _sequence(kind: Any, tags: Mapping[type, int | str]) -> Form:
    if kind is str:
        return Form(
            lambda texts: [_pack_text(text) for text in texts] if _HEX_LENGTH in map(len, texts) else list(texts),
            lambda raws: tuple([_unpack_text(raw) for raw in raws]),
        )
    form = form_of(kind, tags)
    if form is None:
        return Form(list, tuple)
    pack, unpack = form.pack, form.unpack
    return Form(
        lambda values: [pack(value) for value in values],
        lambda values: tuple([unpack(value) for value in values]),
    )


def _mapping(kind: Any, tags: Mapping[type, int | str]) -> Form | None:
    form = form_of(kind, tags)
    if form is None:
        return None
    pack, unpack = form.pack, form.unpack
    return Form(
        lambda values: {key: pack(value) for key, value in values.items()},
        lambda values: {key: unpack(value) for key, value in values.items()},
    )
