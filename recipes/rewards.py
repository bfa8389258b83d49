"""Verifiable rewards: what an answer is worth, from 0 to 1, told by a function and no model."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import partial

from wire.outcomes import InvalidRequest

from .data import Example

Reward = Callable[[Example, str], float]

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def exact(example: Example, said: str) -> float:
    """1 for the very answer, whatever white space is around it."""
    return float(said.strip() == example.answer.strip())


def contains(example: Example, said: str) -> float:
    """1 for what has the answer somewhere in it."""
    return float(example.answer.strip() in said)


def number(example: Example, said: str) -> float:
    """1 where the last number that is said is the answer's."""
    found = _NUMBER.findall(said)
    return float(bool(found) and _value(found[-1]) == _value(example.answer.strip()))


KNOWN: dict[str, Reward] = {"exact": exact, "contains": contains, "number": number}


def named(name: str) -> Reward:
    """One of ours, or ``package.module:function`` of the user's own. Raises InvalidRequest."""
    if name in KNOWN:
        return KNOWN[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise InvalidRequest(
            f"reward: there is no {name!r}; known are {', '.join(KNOWN)}, and package.module:function", field="reward"
        )
    try:
        found: Reward = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InvalidRequest(f"reward: {name}: {error}", field="reward") from None
    if not callable(found):
        raise InvalidRequest(f"reward: {name} is not a function", field="reward")
    return partial(_checked, name, found)


def _checked(name: str, reward: Reward, example: Example, said: str) -> float:
    """What a user's own function gives. Raises InvalidRequest for what is no number from 0 to 1."""
    told = f"reward: {name}, asked about {example.prompt[:80]!r} and {said[:80]!r},"
    try:
        worth = float(reward(example, said))
    except Exception as error:
        raise InvalidRequest(f"{told} failed: {type(error).__name__}: {error}", field="reward") from error
    if not 0 <= worth <= 1:
        raise InvalidRequest(f"{told} gave {worth:g}: expected a number from 0 to 1", field="reward")
    return worth


def _value(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
