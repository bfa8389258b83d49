"""What the admin API takes to change a policy. ``expected_version``: act only if the policy has that version."""

from __future__ import annotations

from typing import Annotated

import msgspec

from catalog.inputs import MAX_NUMBER, MAX_SEED
from catalog.names import STABLE
from wire.events import RecordKind, Retention

_Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Whole = Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUMBER)]


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all bodies."""


class Versioned(Body, frozen=True, kw_only=True):
    """Of all that change a policy."""

    expected_version: Whole | None = None


class NewPolicy(Body, frozen=True, kw_only=True):
    policy: str
    base: str


class Arm(Body, frozen=True, kw_only=True):
    revision: _Positive
    weight: _Positive = 1


class Target(Versioned, frozen=True, kw_only=True):
    """Where a channel shall point; an empty ``target`` follows ``latest``.

    A split keeps its ``seed`` unless one is given; another seed deals users and sessions to the arms anew.
    """

    target: tuple[Arm, ...]
    seed: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)] | None = None


class Promotion(Versioned, frozen=True, kw_only=True):
    """``channel`` gets ``revision``, or the one that channel ``source`` has now."""

    channel: str = STABLE
    source: str = ""
    revision: Whole = 0


class RollbackBody(Versioned, frozen=True, kw_only=True):
    """``to`` 0 means what ``channel`` served before, which may be a split; again, what it served before that.

    A channel remembers 8 targets. Those with retired revisions are passed over; where none is left, as for a channel
    that only ever followed ``latest``, the next lower revision is meant.
    """

    channel: str = STABLE
    to: Whole = 0


class NewName(Versioned, frozen=True, kw_only=True):
    """A name within the same tenant."""

    to: str


class Labels(Versioned, frozen=True, kw_only=True):
    """Labels to set, and keys of labels to remove; all others stay."""

    labels: dict[str, str] = {}
    remove: tuple[str, ...] = ()


class RetentionBody(Versioned, frozen=True, kw_only=True):
    """Which revisions are kept; without a ``retention`` all of them."""

    retention: Retention | None = None


class NewTrainingRecord(Versioned, frozen=True, kw_only=True):
    """``uri`` is where the bytes are; ``revision`` what the checkpoint became, or what made the rollout."""

    kind: RecordKind
    uri: str
    digest: str = ""
    step: Whole = 0
    revision: Whole = 0


class NoFields(Body, frozen=True, kw_only=True):
    """Nothing to say: the path says it all."""


class DrainBody(Body, frozen=True, kw_only=True):
    """The answer waits up to ``wait_s`` seconds for the last request to leave the node."""

    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0


class Garbage(Body, frozen=True, kw_only=True):
    """What was condemned this many seconds ago goes, and files that nothing names and are older than that.

    With ``ignore_silent`` nodes that are not heard are taken to hold nothing.
    """

    grace_s: float = 86_400.0
    ignore_silent: bool = False


class Orphans(Body, frozen=True, kw_only=True):
    """Only what is older than this many seconds goes: younger files may be about to be named."""

    older_than_s: float = 3600.0
