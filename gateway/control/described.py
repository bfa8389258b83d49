"""What a route takes and answers, said beside its handler; the OpenAPI document is made of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from wire.events import Scope

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
H = TypeVar("H", bound=Handler)


class Query(NamedTuple):
    """A parameter of the query: text, or where it is ``numeric`` a whole number."""

    name: str
    meaning: str
    numeric: bool = False
    repeated: bool = False


AFTER = Query("after", "Go on after this: what the page before said.")
LIMIT = Query("limit", "How many to list, from 1 to 1000.", numeric=True)


class Description(msgspec.Struct, frozen=True):
    """``scope`` None: a key of any scope; ``public``: no key. ``body`` and ``answer`` are structs, or a media type.

    ``tenant``: what is asked for belongs to a tenant, which the key must reach. ``fleet``: the key must be one of all
    tenants.
    """

    answer: Any
    body: Any = None
    scope: Scope | None = None
    query: tuple[Query, ...] = ()
    status: int = 200
    fleet: bool = False
    public: bool = False


_DESCRIPTIONS: dict[Handler, Description] = {}


def described(description: Description) -> Callable[[H], H]:
    """Say what a handler's route takes and answers."""

    def add(handler: H) -> H:
        _DESCRIPTIONS[handler] = description
        return handler

    return add


def description_of(handler: Any) -> Description | None:
    return _DESCRIPTIONS.get(handler)
