"""Publishing in two phases: the bytes go into the store, then a revision that names them into the catalog."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import msgspec
from aiohttp import web

from catalog.artifacts import ArtifactStore, ArtifactWriter
from catalog.blobs import Stored, check_digest
from catalog.inputs import check_provenance
from catalog.names import STABLE, check_base
from catalog.view import CatalogView
from gateway.deployments import why_none_takes
from packer.revision import RevisionFile, check_fit
from packer.shape import BaseShape
from wire.events import ArtifactFacts, Provenance, Scope
from wire.outcomes import ArtifactUnavailable, InvalidRequest, NotFound, Retired, TooLarge
from wire.registrar import PublishRevision

from .bodies import Whole
from .described import Description, described
from .documents import PublishedDocument, StoredDocument
from .requests import POLICY, answer, committed, publisher_of, read_body, require
from .services import Services, services
from .threads import in_thread

routes = web.RouteTableDef()

# bytes gathered before a thread is asked to write them
_WRITE_BYTES = 1 << 20


class NewRevision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``digest`` names a file that was uploaded. With ``create_over`` the policy is made over that base if need be."""

    digest: str
    create_over: str = ""
    expected_version: Whole | None = None
    provenance: Provenance = Provenance()


@routes.head("/roost/v1/artifacts/{digest}")
@described(Description(None, scope=Scope.PUBLISH))
async def has_artifact(request: web.Request) -> web.Response:
    """200 where the store has the file, else 404: a client need not upload what is there."""
    require(request, Scope.PUBLISH)
    digest = check_digest(request.match_info["digest"])
    size = await asyncio.to_thread(services(request).store.size, digest)
    if size is None:
        raise NotFound("the artifact is not in the store", field="digest")
    return web.Response(headers={"x-roost-size": str(size)})


@routes.put("/roost/v1/artifacts/{digest}")
@described(Description(StoredDocument, body="application/octet-stream", scope=Scope.PUBLISH, status=201))
async def put_artifact(request: web.Request) -> web.Response:
    """Stream a revision file into the store. It counts once its bytes have been found to be of ``digest``."""
    require(request, Scope.PUBLISH)
    digest = check_digest(request.match_info["digest"])
    shared = services(request)
    most = shared.max_artifact_bytes
    if (request.content_length or 0) > most:
        raise TooLarge(f"an artifact may have {most} bytes, not {request.content_length}", field="body")
    was_there = await asyncio.to_thread(shared.store.size, digest) is not None
    stored = await _receive(request, shared.store, digest, most)
    return answer(StoredDocument(stored.digest, stored.size), status=200 if was_there else 201)


@routes.post(POLICY + "/revisions")
@described(Description(PublishedDocument, body=NewRevision, scope=Scope.PUBLISH))
async def publish(request: web.Request) -> web.Response:
    """Check the uploaded file against the policy's base, and have the registrar name it."""
    policy, asker = publisher_of(request)
    new = await read_body(request, NewRevision)
    check_provenance(new.provenance)
    shared = services(request)
    digest = check_digest(new.digest)
    if await asyncio.to_thread(shared.store.size, digest) is None:
        raise InvalidRequest(f"artifact {digest} is not in the store: upload it first", field="digest")
    config = _base_config(shared.view, policy, new.create_over)
    async with shared.examinations:
        facts = await asyncio.to_thread(examine_stored, shared.store, digest, config)
    command = PublishRevision(
        actor=asker.key_id,
        policy=policy,
        artifact=facts,
        provenance=new.provenance,
        create_over=new.create_over,
        expected_version=new.expected_version,
    )
    told = PublishedDocument.of(await committed(request, command))
    warnings = tuple(_warnings(shared, told.policy, told.revision, facts))
    return answer(msgspec.structs.replace(told, warnings=warnings))


def _warnings(shared: Services, policy: str, revision: int, facts: ArtifactFacts) -> Iterator[str]:
    """What is in order and may still surprise: no engine takes it, or requests go on to another revision."""
    record = shared.view.policy(policy)
    if record is None:
        return
    running = [d for node in shared.nodes for d in node.deployments() if d.base == record.base]
    kinds = [kind for deployment in running for kind in deployment.kinds]
    if kinds and not any(kind.takes(facts.rank, facts.targets) for kind in kinds):
        yield f"{why_none_takes(record.base, kinds, facts.rank, facts.targets)}; requests get 409"
    if (stable := record.channels[STABLE]) and all(arm.revision != revision for arm in stable):
        pinned = ", ".join(str(arm.revision) for arm in stable)
        yield f"{policy}:{STABLE} stays at {pinned}, so that is what {policy} answers with"


def examine_stored(store: ArtifactStore, digest: str, config: bytes) -> ArtifactFacts:
    """``examine`` for a file in the store. Raises StorageFull too: a remote one is copied to this host's disk."""
    with store.as_file(digest) as path:
        return examine(path, digest, config)


def examine(path: Path, digest: str, config: bytes) -> ArtifactFacts:
    """What the catalog is told of a revision file, of which every byte is read.

    Raises InvalidRequest and Unfit where it can't serve on the base, ArtifactUnavailable where the store's bytes are
    not of ``digest`` any more.
    """
    file = RevisionFile.open(path)
    check_fit(file, _shape(config))
    facts = file.facts()
    if facts.digest != digest:
        raise ArtifactUnavailable(f"artifact {digest} is corrupt in the store: upload it again", field="digest")
    return facts


@lru_cache(maxsize=64)
def _shape(config: bytes) -> BaseShape:
    return BaseShape.from_config(config)


def _base_config(view: CatalogView, policy: str, create_over: str) -> bytes:
    record = view.policy(policy)
    if record is None and not create_over:
        raise NotFound(f"there is no policy {policy}: create it, or name its base in create_over", field="policy")
    if record is not None and record.retired:
        raise Retired(f"{policy} is retired", field="policy")
    name = record.base if record is not None else check_base(create_over, "create_over")
    base = view.base(name)
    if base is None:
        raise NotFound(f"there is no base {name}", field="create_over")
    return base.config


async def _receive(request: web.Request, store: ArtifactStore, digest: str, most: int) -> Stored:
    writer = await asyncio.to_thread(store.writer, digest)
    try:
        await _pass_on(request, writer, most)
        return await in_thread(_commit, writer, digest)
    finally:
        # a remote store takes a moment to drop what came of an upload that was broken off
        await in_thread(writer.abort)


async def _pass_on(request: web.Request, writer: ArtifactWriter, most: int) -> None:
    size = 0
    gathered = bytearray()
    async for chunk in request.content.iter_any():
        size += len(chunk)
        if size > most:
            raise TooLarge(f"an artifact may have {most} bytes", field="body")
        gathered += chunk
        if len(gathered) >= _WRITE_BYTES:
            await in_thread(writer.write, bytes(gathered))
            gathered.clear()
    await in_thread(writer.write, bytes(gathered))


def _commit(writer: ArtifactWriter, digest: str) -> Stored:
    try:
        return writer.commit(digest)
    except ArtifactUnavailable as error:
        if error.field == "digest":
            raise InvalidRequest(error.message, field="digest") from None
        raise
