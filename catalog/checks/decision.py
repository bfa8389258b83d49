"""What deciding comes to, and what it looks at."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from wire.events import AnyEvent

from ..snapshot import Snapshot


class ArtifactSizes(Protocol):
    """What deciding needs of the store."""

    def size(self, digest: str) -> int | None:
        """Bytes of a complete artifact; None where the store hasn't got it."""

    def removing(self, digest: str) -> bool:
        """Whether a sweep is removing it at this moment: no event may name it."""


class Context(NamedTuple):
    """The world as a decision sees it: the catalog, the store, and the time (Unix, in milliseconds)."""

    view: Snapshot
    store: ArtifactSizes
    now_ms: int


class Decision(msgspec.Struct, frozen=True):
    """What a command comes to. No events: its effect is there already. The rest says what is then named.

    ``count`` is the number of revisions or artifacts that a clean-up concerned.
    """

    events: tuple[AnyEvent, ...] = ()
    policy: str = ""
    revision: int = 0
    digest: str = ""
    count: int = 0
