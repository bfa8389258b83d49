"""Which revisions are kept, which artifacts go, and what a policy keeps hold of outside the catalog."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from catalog.checks import WriteCommand
from catalog.inputs import check_retention
from gateway.auth import ALL_TENANTS
from gateway.holdings import held_digests
from gateway.nodes import NodeTable
from wire.events import RecordKind, Scope, TrainingRecord
from wire.outcomes import InvalidRequest, NoHealthyNode
from wire.registrar import (
    CollectOrphans,
    CondemnArtifacts,
    PruneRevisions,
    ReleaseRecord,
    RemoveArtifacts,
    RestoreRevision,
    RetainRecord,
    RetireRevision,
    SetRetention,
)

from .bodies import Garbage, NewTrainingRecord, Orphans, RetentionBody, Versioned
from .described import Description, Query, described
from .documents import CollectedDocument, CommittedDocument, SweptDocument, TrainingDocument, TrainingList
from .requests import (
    EXPECTED_VERSION,
    POLICY,
    answer,
    commit,
    expected_version,
    own_policy,
    publisher_of,
    read_body,
    require,
)
from .services import services

routes = web.RouteTableDef()

_COLLECT_TIMEOUT_S = 600.0


@routes.put(POLICY + "/retention")
@described(Description(CommittedDocument, body=RetentionBody, scope=Scope.PUBLISH))
async def set_retention(request: web.Request) -> web.Response:
    """Say which revisions are kept; the others are retired in the background."""
    policy, asker = publisher_of(request)
    body = await read_body(request, RetentionBody)
    if body.retention is not None:
        check_retention(body.retention)
    command = SetRetention(
        actor=asker.key_id, policy=policy, retention=body.retention, expected_version=body.expected_version
    )
    return await commit(request, command)


@routes.post(POLICY + "/prune")
@described(Description(CommittedDocument, body=Versioned, scope=Scope.PUBLISH))
async def prune(request: web.Request) -> web.Response:
    """Retire now what the policy's retention does not keep, and no node holds."""
    policy, asker = publisher_of(request)
    body = await read_body(request, Versioned)
    shared = services(request)
    _all_must_be_heard(shared.nodes)
    held = await held_digests(shared.nodes, shared.scans)
    command = PruneRevisions(actor=asker.key_id, policy=policy, in_use=held, expected_version=body.expected_version)
    return await commit(request, command)


@routes.post(POLICY + "/revisions/{revision}/retire")
@described(Description(CommittedDocument, body=Versioned, scope=Scope.PUBLISH))
async def retire_revision(request: web.Request) -> web.Response:
    """Retire one revision, which no channel may point to."""
    policy, asker = publisher_of(request)
    number = _revision(request)
    body = await read_body(request, Versioned)
    command = RetireRevision(actor=asker.key_id, policy=policy, revision=number, expected_version=body.expected_version)
    return await commit(request, command)


@routes.post(POLICY + "/revisions/{revision}/restore")
@described(Description(CommittedDocument, body=Versioned, scope=Scope.PUBLISH))
async def restore_revision(request: web.Request) -> web.Response:
    """Let a retired revision be named again, as long as the store has its bytes."""
    policy, asker = publisher_of(request)
    number = _revision(request)
    body = await read_body(request, Versioned)
    command = RestoreRevision(
        actor=asker.key_id, policy=policy, revision=number, expected_version=body.expected_version
    )
    return await commit(request, command)


@routes.get(POLICY + "/training")
@described(Description(TrainingList))
async def list_training(request: web.Request) -> web.Response:
    """The training checkpoints and rollouts that a policy keeps hold of."""
    record = own_policy(request)
    shared = services(request)
    retained = await shared.scans.run(shared.view.retained, record.policy)
    return answer(TrainingList([TrainingDocument.told(row) for row in retained]))


@routes.post(POLICY + "/training")
@described(Description(CommittedDocument, body=NewTrainingRecord, scope=Scope.PUBLISH))
async def retain(request: web.Request) -> web.Response:
    """Keep hold of a training checkpoint or a rollout until it is released."""
    policy, asker = publisher_of(request)
    body = await read_body(request, NewTrainingRecord)
    record = TrainingRecord(body.kind, body.uri, body.digest, body.step, body.revision)
    command = RetainRecord(actor=asker.key_id, policy=policy, record=record, expected_version=body.expected_version)
    return await commit(request, command)


@routes.delete(POLICY + "/training/{kind}")
@described(
    Description(
        CommittedDocument, scope=Scope.PUBLISH, query=(Query("uri", "Which one, as it was given."), EXPECTED_VERSION)
    )
)
async def release(request: web.Request) -> web.Response:
    """Release a training checkpoint or a rollout."""
    policy, asker = publisher_of(request)
    kind = request.match_info["kind"]
    if kind not in set(RecordKind):
        raise InvalidRequest(f"kind must be one of {', '.join(RecordKind)}", field="kind")
    command = ReleaseRecord(
        actor=asker.key_id,
        policy=policy,
        kind=RecordKind(kind),
        uri=request.query.get("uri", ""),
        expected_version=expected_version(request),
    )
    return await commit(request, command)


@routes.post("/roost/v1/artifacts/collect")
@described(Description(CollectedDocument, body=Garbage, scope=Scope.ADMIN, fleet=True))
async def collect_artifacts(request: web.Request) -> web.Response:
    """Condemn the artifacts that no revision names, and remove those whose grace has passed and no node holds."""
    asker = require(request, Scope.ADMIN, ALL_TENANTS)
    body = await read_body(request, Garbage)
    shared = services(request)
    if not body.ignore_silent:
        _all_must_be_heard(shared.nodes, ": ignore_silent goes on without it")

    async def in_use() -> tuple[str, ...]:
        held = await held_digests(shared.nodes, shared.scans)
        return tuple(await shared.scans.run(shared.view.unnamed, held))

    async def removal(after: str) -> WriteCommand:
        return RemoveArtifacts(actor=asker.key_id, after=after, grace_s=body.grace_s, in_use=await in_use())

    async def condemnation(after: str) -> WriteCommand:
        return CondemnArtifacts(actor=asker.key_id, after=after, in_use=await in_use())

    forgotten = await _step_by_step(request, removal)
    condemned = await _step_by_step(request, condemnation)
    sweep = CollectOrphans(actor=asker.key_id, older_than_s=body.grace_s)
    swept = await shared.registrar.run(sweep, timeout_s=_COLLECT_TIMEOUT_S)
    return answer(CollectedDocument(condemned, forgotten, swept.removed, swept.bytes))


@routes.post("/roost/v1/orphans/collect")
@described(Description(SweptDocument, body=Orphans, scope=Scope.ADMIN, fleet=True))
async def collect_orphans(request: web.Request) -> web.Response:
    """Remove files and partial uploads that no event ever named."""
    asker = require(request, Scope.ADMIN, ALL_TENANTS)
    body = await read_body(request, Orphans)
    command = CollectOrphans(actor=asker.key_id, older_than_s=body.older_than_s)
    collected = await services(request).registrar.run(command, timeout_s=_COLLECT_TIMEOUT_S)
    return answer(SweptDocument(collected.removed, collected.bytes))


def _all_must_be_heard(nodes: NodeTable, way_out: str = "") -> None:
    silent = [node.name for node in nodes if not node.heard]
    if silent:
        raise NoHealthyNode(
            f"node {silent[0]} is not heard, and what it holds is not known{way_out}",
            retry_after_s=10.0,
        )


async def _step_by_step(request: web.Request, command: Callable[[str], Awaitable[WriteCommand]]) -> int:
    """Run a clean-up until it has seen everything; how many artifacts it concerned."""
    count, after = 0, ""
    while True:
        done = await services(request).registrar.run(await command(after))
        count += done.count
        after = done.digest
        if not after:
            return count


def _revision(request: web.Request) -> int:
    text = request.match_info["revision"]
    if not (text.isascii() and text.isdigit()) or len(text) > 16:
        raise InvalidRequest(f"{text[:20]!a} is no revision number", field="revision")
    return int(text)
