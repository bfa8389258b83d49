"""What the decisions on policies have in common: looking one up, and the refusals that many commands share."""

from __future__ import annotations

from wire.outcomes import NotFound, Retired, VersionConflict

from ..names import check_policy
from ..records import PolicyRecord, RevisionRecord
from ..snapshot import Snapshot


def live_policy(name: str, view: Snapshot, expected_version: int | None) -> PolicyRecord:
    """The policy of this name, present or former, at the version that the command was made for.

    Raises NotFound, Retired and VersionConflict.
    """
    known = any_policy(name, view)
    must_live(known)
    expect_version(known.policy, known, expected_version)
    return known


def any_policy(name: str, view: Snapshot) -> PolicyRecord:
    """The same, also one that is retired."""
    check_policy(name)
    known = view.followed(name)
    if known is None:
        raise no_policy(name)
    return known


def expect_version(name: str, known: PolicyRecord | None, expected: int | None) -> None:
    """A policy that does not exist has version 0."""
    version = known.version if known else 0
    if expected is not None and expected != version:
        raise VersionConflict(f"{name} is at version {version}, not {expected}", field="expected_version")


def must_live(known: PolicyRecord) -> None:
    if known.retired:
        raise Retired(f"policy {known.policy} is retired", field="policy")


def must_be_over(known: PolicyRecord, base: str, field: str) -> None:
    if known.base != base:
        raise VersionConflict(f"policy {known.policy} is over base {known.base}, not {base}", field=field)


def must_write(known: PolicyRecord, writer: str) -> None:
    """A policy that no run has claimed is anybody's."""
    if known.writer not in ("", writer):
        raise VersionConflict(f"{known.policy} is written by {known.writer} since: {writer} can't", field="writer")


def known_revision(known: PolicyRecord, number: int, view: Snapshot, field: str) -> RevisionRecord:
    """A revision of the policy, retired or not. Raises NotFound."""
    # revisions are numbered from 1 without gaps
    record = view.revision(known.policy, number) if 1 <= number <= known.latest else None
    if record is None:
        raise NotFound(f"{known.policy} has no revision {number}", field=field)
    return record


def live_revision(known: PolicyRecord, number: int, view: Snapshot, field: str) -> RevisionRecord:
    """A revision that may be named. Raises NotFound and Retired."""
    record = known_revision(known, number, view, field)
    if record.retired_ms:
        raise Retired(f"{known.policy}@{number} is retired", field=field)
    return record


def known_base(name: str, view: Snapshot, field: str) -> None:
    if view.base(name) is None:
        raise NotFound(f"there is no base {name}: add it first", field=field)


def held_by(known: PolicyRecord) -> dict[int, str]:
    """The revisions that channels point to, each with the first such channel."""
    held = {split.revision: name for name, target in reversed(known.channels.items()) for split in target}
    return held | {known.latest: "latest"}


def no_policy(name: str) -> NotFound:
    return NotFound(f"there is no policy {name}", field="policy")
