"""Items to train on and to be judged by: JSON lines."""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from wire.outcomes import InvalidRequest


class Example(msgspec.Struct, frozen=True):
    """A prompt with the right answer."""

    prompt: str
    answer: str


class Preference(msgspec.Struct, frozen=True):
    """A prompt with two answers, of which the first is the better one."""

    prompt: str
    chosen: str
    rejected: str


T = TypeVar("T", Example, Preference)


def read(file: str, kind: type[T], field: str, misfit: Callable[[T], str] | None = None) -> list[T]:
    """All items of a file. ``misfit`` says of one why it can't be taken, and nothing where it can.

    Raises InvalidRequest that names ``field``, the line and what is wrong with it.
    """
    decoder = msgspec.json.Decoder(kind)
    items = []
    try:
        content = Path(file).read_bytes().removeprefix(codecs.BOM_UTF8)
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                try:
                    item = decoder.decode(line)
                except msgspec.DecodeError as error:
                    raise InvalidRequest(f"{field}: {file}, line {number}: {error}", field=field) from None
                if misfit is not None and (why := misfit(item)):
                    raise InvalidRequest(f"{field}: {file}, line {number}: {why}", field=field)
                items.append(item)
    except OSError as error:
        raise InvalidRequest(f"{field}: {file}: {error.strerror}", field=field) from None
    if not items:
        raise InvalidRequest(f"{field}: {file} has no items", field=field)
    return items


def batch(items: Sequence[T], step: int, size: int, seed: int) -> list[T]:
    """The items of ``step`` (from 1 on): every epoch goes through all of them in an order of its own.

    It depends on nothing but the arguments, so a run that is resumed sees what it would have seen.
    """
    found: list[T] = []
    for place in range((step - 1) * size, step * size):
        epoch, within = divmod(place, len(items))
        if within == 0 or not found:
            order = list(range(len(items)))
            random.Random(f"{seed}/{epoch}").shuffle(order)  # noqa: S311 - no secret
        found.append(items[order[within]])
    return found
