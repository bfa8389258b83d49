"""Deciding on a bulk import: many revisions, each seeing those before it, without a look at the view between them."""

from __future__ import annotations

from wire.events import AnyEvent, PolicyCreated, RevisionPublished
from wire.outcomes import InvalidRequest, RoostError, VersionConflict, error_for
from wire.registrar import ImportedRevision, ImportRevisions

from .. import inputs
from ..names import check_base, check_policy
from .common import known_base, must_be_over, must_live
from .decision import Context, Decision
from .revisions import check_artifact, check_known_facts


def import_revisions(command: ImportRevisions, context: Context) -> Decision:
    """Raises what is wrong with the first revision that is refused, which the message names."""
    count = len(command.revisions)
    if not 0 < count <= inputs.MAX_IMPORTED:
        raise InvalidRequest(
            f"{count} revisions, at most {inputs.MAX_IMPORTED} are imported at once", field="revisions"
        )
    importing = _Importing(context, external=command.external)
    for imported in command.revisions:
        try:
            importing.add(imported)
        except RoostError as error:
            message = f"{imported.policy}: {error.message}"
            raise error_for(error.outcome, message, field=error.field, retry_after_s=error.retry_after_s) from None
    return Decision(tuple(importing.events), count=importing.published)


class _Policy:
    """A policy as it will be after the events so far."""

    __slots__ = ("base", "digests", "latest", "name")

    def __init__(self, name: str, base: str, latest: int) -> None:
        self.name = name
        self.base = base
        self.latest = latest
        self.digests: dict[int, str] = {}


class _Importing:
    def __init__(self, context: Context, *, external: bool) -> None:
        self.events: list[AnyEvent] = []
        self.published = 0
        self._context = context
        self._external = external
        self._policies: dict[str, _Policy] = {}
        self._bases: set[str] = set()

    def add(self, imported: ImportedRevision) -> None:
        facts = imported.artifact
        inputs.check_facts(facts)
        inputs.check_provenance(imported.provenance)
        policy = self._policies.get(imported.policy) or self._policy(imported)
        if policy.base != imported.base:
            raise VersionConflict(f"is over base {policy.base}, not {imported.base}", field="base")
        number = imported.revision or policy.latest
        if 0 < number <= policy.latest:
            digest = self._digest(policy, number)
            if digest == facts.digest:
                return
            if imported.revision:
                raise VersionConflict(f"revision {number} has digest {digest}, not {facts.digest}", field="revision")
        number = imported.revision or policy.latest + 1
        if number != policy.latest + 1:
            raise VersionConflict(
                f"revision {number} can't follow revision {policy.latest}: they are numbered without gaps",
                field="revision",
            )
        if self._external:
            check_known_facts(facts, self._context)
        else:
            check_artifact(facts, self._context)
        self.events.append(RevisionPublished(policy.name, number, facts, imported.provenance))
        self.published += 1
        policy.latest = number
        policy.digests[number] = facts.digest

    def _policy(self, imported: ImportedRevision) -> _Policy:
        check_policy(imported.policy)
        view = self._context.view
        known = view.followed(imported.policy)
        if known is not None:
            must_live(known)
            must_be_over(known, imported.base, "base")
            policy = _Policy(known.policy, known.base, known.latest)
        else:
            if imported.base not in self._bases:
                check_base(imported.base)
                known_base(imported.base, view, "base")
                self._bases.add(imported.base)
            self.events.append(PolicyCreated(imported.policy, imported.base))
            policy = _Policy(imported.policy, imported.base, 0)
        # a former name and the present one are the same policy
        policy = self._policies.setdefault(policy.name, policy)
        self._policies[imported.policy] = policy
        return policy

    def _digest(self, policy: _Policy, number: int) -> str:
        digest = policy.digests.get(number)
        if digest is None:
            record = self._context.view.revision(policy.name, number)
            digest = record.artifact.digest if record else ""
        return digest
