"""Decisions on artifacts that no revision names: condemned first, forgotten after a time of grace.

In between anything that names one again rescues it. What a node holds or fetches is neither condemned nor forgotten:
once it is condemned nobody can ask for it by name, so nobody begins to use it, and the grace is there for those who
resolved a name a moment ago.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from wire.events import ArtifactsCondemned, ArtifactsRemoved
from wire.registrar import CondemnArtifacts, RemoveArtifacts

from .. import inputs
from ..records import ArtifactRecord
from .decision import Context, Decision

_STEP = 1000


def condemn(command: CondemnArtifacts, context: Context) -> Decision:
    inputs.check_digests(command.in_use)
    digests, last = _step(command.after, command.in_use, context, lambda known: not known.condemned_ms)
    events = (ArtifactsCondemned(digests),) if digests else ()
    return Decision(events, digest=last, count=len(digests))


def remove(command: RemoveArtifacts, context: Context) -> Decision:
    inputs.check_digests(command.in_use)
    inputs.check_seconds(command.grace_s, "grace_s")
    latest = context.now_ms - int(command.grace_s * 1000)
    digests, last = _step(command.after, command.in_use, context, lambda known: 0 < known.condemned_ms <= latest)
    events = (ArtifactsRemoved(digests),) if digests else ()
    return Decision(events, digest=last, count=len(digests))


def _step(
    after: str, in_use: tuple[str, ...], context: Context, wanted: Callable[[ArtifactRecord], bool]
) -> tuple[tuple[str, ...], str]:
    """Those of the next unnamed artifacts that are wanted, and the last that was looked at, if there may be more."""
    view = context.view
    looked_at = list(islice(view.unnamed(after=after), _STEP))
    kept = frozenset(in_use)
    found = tuple(
        digest
        for digest in looked_at
        if digest not in kept and (known := view.artifact(digest)) is not None and wanted(known)
    )
    return found, looked_at[-1] if len(looked_at) == _STEP else ""
