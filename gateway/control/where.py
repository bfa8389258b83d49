"""Where a policy is: its base's deployments, its checkpoint, the revisions in use, and the bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from catalog.names import adapter_name
from catalog.records import PolicyRecord, RevisionRecord
from catalog.view import CatalogView
from gateway.deployments import Kind
from gateway.nodes import Node, NodeTable
from wire.events import RecordKind, Split

from .described import AFTER, LIMIT, Description, described
from .documents import BaseWhere, Deployment, OnNode, RevisionWhere, TrainingDocument, Used, WhereDocument
from .policies import revisions_page
from .requests import POLICY, answer, own_policy
from .services import services

routes = web.RouteTableDef()


@routes.get(POLICY + "/where")
@described(Description(WhereDocument, query=(AFTER._replace(numeric=True), LIMIT)))
async def where(request: web.Request) -> web.Response:
    """Which deployments can run a policy, what a trainer restores, which revisions are in use, where the bytes are."""
    record = own_policy(request)
    shared = services(request)
    revisions, after = await revisions_page(request, record.policy)
    sizes = await asyncio.gather(
        *(shared.lookups.run(shared.store.size, revision.artifact.digest) for revision in revisions)
    )
    checkpoints, rollouts = await shared.scans.run(_training, shared.view, record.policy)
    document = WhereDocument(
        policy=record.policy,
        base=_base(shared.view, shared.nodes, record, revisions),
        checkpoint=max(checkpoints, key=lambda told: (told.step, told.retained_ms), default=None),
        channels=_channels(shared.view, record),
        rollouts=rollouts,
        revisions=[
            _whereabouts(shared.nodes, record, revision, size is not None)
            for revision, size in zip(revisions, sizes, strict=True)
        ],
        has_more=bool(after),
        after=after,
    )
    return answer(document)


def _training(view: CatalogView, policy: str) -> tuple[list[TrainingDocument], list[TrainingDocument]]:
    """Checkpoints and rollouts that are kept."""
    told = [TrainingDocument.told(retained) for retained in view.retained(policy)]
    checkpoints = [record for record in told if record.kind is RecordKind.CHECKPOINT]
    return checkpoints, [record for record in told if record.kind is RecordKind.ROLLOUT]


def _base(view: CatalogView, nodes: NodeTable, record: PolicyRecord, revisions: Sequence[RevisionRecord]) -> BaseWhere:
    base = view.base(record.base)
    fingerprint = base.fingerprint if base else ""
    deployments = [
        Deployment(
            node.name, engine.engine, engine.backend, engine.health, engine.max_rank,
            [one.revision for one in revisions if not Kind.of(engine).takes(one.artifact.rank, one.artifact.targets)],
        )
        for node in nodes
        for engine in node.engines.values()
        if (engine.base, engine.fingerprint) == (record.base, fingerprint)
    ]  # fmt: skip
    return BaseWhere(record.base, fingerprint, base.group if base else "", deployments)


def _channels(view: CatalogView, record: PolicyRecord) -> dict[str, list[Used]]:
    latest = (Split(record.latest),) if record.latest else ()
    return {
        name: [
            Used(split.revision, revision.artifact.digest, split.weight)
            for split in target or latest
            if (revision := view.revision(record.policy, split.revision)) is not None
        ]
        for name, target in {**record.channels, "latest": latest}.items()
    }


def _whereabouts(nodes: NodeTable, policy: PolicyRecord, record: RevisionRecord, in_store: bool) -> RevisionWhere:
    facts = record.artifact
    adapter = adapter_name(policy.policy.partition("/")[0], facts.digest)
    on_nodes = [
        OnNode(node.name, node.resident.get(facts.digest, "absent"), _engines_with(node, adapter))
        for node in nodes
        if facts.digest in node.resident or _engines_with(node, adapter)
    ]
    return RevisionWhere(record.revision, facts.digest, facts.size, in_store, on_nodes)


def _engines_with(node: Node, adapter: str) -> list[str]:
    return [engine.engine for engine in node.engines.values() if adapter in engine.serving]
