"""JSON from outside: duplicate keys, depth, NaN and monstrous numbers are refused rather than guessed about."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from catalog.names import shown
from wire.outcomes import InvalidRequest


def parse_object(raw: bytes, what: str) -> dict[str, Any]:
    """The JSON object that ``raw`` holds. Raises InvalidRequest that names ``what`` and the reason."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidRequest(f"{what} has the key {shown(twice)} twice", field=what)
        return found

    def no_constants(text: str) -> NoReturn:
        raise InvalidRequest(f"{what} holds {text}, which is not JSON", field=what)

    try:
        value = json.loads(raw.decode(), object_pairs_hook=no_duplicates, parse_constant=no_constants)
        if b"\\ud" in raw or b"\\uD" in raw:
            # half of a surrogate pair is a string that nobody can write down again
            json.dumps(value, ensure_ascii=False).encode()
    except InvalidRequest:
        raise
    except RecursionError:
        raise InvalidRequest(f"{what} is nested too deeply", field=what) from None
    except ValueError as error:
        raise InvalidRequest(f"{what} is not JSON: {shown(str(error))}", field=what) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what} is not a JSON object", field=what)
    return value


def brief(value: Any) -> str:
    """A JSON value as it may stand in an error message."""
    if isinstance(value, dict):
        return f"a map of {len(value)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return shown(value) if isinstance(value, str) else json.dumps(value)[:80]
