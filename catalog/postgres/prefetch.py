"""What deciding on a command will read, asked for at once: a thousand revisions are not looked up one by one.

Each kind of command declares its questions; those whose answers lead to others are asked in the next round. It is a
hint only: what is asked for and never read costs a little, and what is missing here is fetched when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, TypeVar

from wire.registrar import (
    CondemnArtifacts,
    ImportRevisions,
    PruneNext,
    PruneRevisions,
    RemoveArtifacts,
    RenamePolicy,
    RetainRecord,
    RetireRevision,
    Rollback,
)

from ..checks import WriteCommand
from ..inputs import MAX_STEP
from ..layout import numbered_prefix, text_key
from ..names import LATEST
from ..records import PolicyRecord
from ..snapshot import Snapshot
from .rows import KnownRows, UnknownRow

R = TypeVar("R")

# artifacts that one clean-up looks at
_STEP = 1000
# revisions that a rollback looks at first, and then twice as many
_BACK = 64


class Prefetch:
    """Asks ``view``, whose rows are ``known``, for what commands will read."""

    def __init__(self, view: Snapshot, known: KnownRows) -> None:
        self._view = view
        self._known = known

    def ask(self, command: WriteCommand) -> None:
        """Note what is wanted and not known. Raises nothing, whatever the command says: that is for its decision."""
        match command:
            case ImportRevisions():
                self._import(command)
            case PruneNext():
                self._prune_next(command)
            case CondemnArtifacts() | RemoveArtifacts():
                self._unnamed(command)
            case _:
                self._one_policy(command)

    def _one_policy(self, command: Any) -> None:
        self._base(getattr(command, "base", "") or getattr(command, "create_over", ""))
        facts = getattr(command, "artifact", None)
        if facts is not None:
            self._try(self._view.artifact, facts.digest)
        policy = self._policy(getattr(command, "policy", ""))
        if policy is None:
            return
        numbers = [split.revision for split in getattr(command, "target", ())]
        numbers.append(getattr(command, "revision", 0))
        self._revisions(policy.policy, numbers)
        match command:
            case PruneRevisions():
                self._revisions_to_prune(policy)
            case RenamePolicy():
                self._policy(command.to)
                self._under(policy.policy, "revisions", "retained")
            case Rollback():
                self._revisions(policy.policy, (command.to,))
                self._back(command, policy)
            case RetainRecord() | RetireRevision():
                self._under(policy.policy, "retained")

    def _import(self, command: ImportRevisions) -> None:
        for base in {imported.base for imported in command.revisions}:
            self._base(base)
        for digest in {imported.artifact.digest for imported in command.revisions}:
            self._try(self._view.artifact, digest)
        policies = {name: self._policy(name) for name in {imported.policy for imported in command.revisions}}
        for imported in command.revisions:
            policy = policies[imported.policy]
            if policy is not None and imported.revision <= policy.latest:
                self._revisions(policy.policy, (imported.revision,))

    def _prune_next(self, command: PruneNext) -> None:
        limit = min(max(command.limit, 0), MAX_STEP)
        self._page("retaining", command.after, limit)
        for name in self._listed(self._view.names_with_retention, command.after, limit):
            policy = self._policy(name)
            if policy is not None:
                self._revisions_to_prune(policy)

    def _unnamed(self, command: CondemnArtifacts | RemoveArtifacts) -> None:
        self._page("unnamed", command.after, _STEP)
        for digest in self._listed(self._view.unnamed, command.after, _STEP):
            self._try(self._view.artifact, digest)

    def _policy(self, name: str) -> PolicyRecord | None:
        """The policy of this name, and what every change of it writes anew: the route with all its arms."""
        found = self._try(self._view.policy, name)
        forward = self._try(self._view.forward, name)
        if found is None and forward is not None:
            found = self._try(self._view.policy, forward)
        if found is not None:
            self._base(found.base)
            splits = (split.revision for target in found.channels.values() for split in target)
            self._revisions(found.policy, (found.latest, *splits))
        return found

    def _back(self, command: Rollback, policy: PolicyRecord) -> None:
        """The revisions before the present one, until one that is not retired."""
        target = () if command.channel == LATEST else policy.channels.get(command.channel)
        if command.to or target is None or len(target) > 1:
            return
        number = (target[0].revision if target else policy.latest) - 1
        count = _BACK
        while number > 0 and self._known.complete:
            records = [self._revision(policy.policy, one) for one in range(number, max(number - count, 0), -1)]
            if any(record is not None and not record.retired_ms for record in records):
                return
            number, count = number - count, count * 2

    def _revisions_to_prune(self, policy: PolicyRecord) -> None:
        if policy.retention is not None:
            self._under(policy.policy, "revisions", "retained")

    def _base(self, name: str) -> None:
        if name:
            self._try(self._view.base, name)

    def _revisions(self, policy: str, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number > 0:
                self._revision(policy, number)

    def _revision(self, policy: str, number: int) -> Any:
        return self._try(lambda text: self._view.revision(text, number), policy)

    def _under(self, policy: str, *kinds: str) -> None:
        for kind in kinds:
            self._known.want_prefix(kind, numbered_prefix(policy))

    def _page(self, kind: str, after: str, limit: int) -> None:
        self._known.want_page(kind, text_key(after) + b"\0" if after else b"", limit)

    def _listed(self, names: Callable[..., Iterable[str]], after: str, limit: int) -> list[str]:
        try:
            return list(islice(names(after=after), limit))
        except UnknownRow:
            return []

    def _try(self, look: Callable[[str], R | None], text: str) -> R | None:
        try:
            return look(text)
        except UnknownRow:
            return None
