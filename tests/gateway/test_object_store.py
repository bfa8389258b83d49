"""Publishing through a gateway whose artifacts lie in an object store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from catalog.artifacts import StoreLocation, registrar_store
from catalog.ledger import Ledger
from catalog.objects.upload import PART_BYTES
from tests.object_storage import REGION, FaultyProxy, ObjectServer, answer, corrupt

from .mesh import BASE, Mesh, Told, until
from .revisions import digest_of, revision_bytes

ADMIN = "/roost/v1"
CONTENT = revision_bytes()
DIGEST = digest_of(CONTENT)

pytestmark = pytest.mark.usefixtures("s3_keys")


@pytest.fixture
def bucket(s3: ObjectServer) -> str:
    return s3.new_bucket()


@pytest.fixture
async def mesh(tmp_path: Path, bucket: str, proxy: FaultyProxy) -> AsyncIterator[Mesh]:
    location = StoreLocation(f"s3://{bucket}/p", endpoint=proxy.endpoint, region=REGION)
    mesh = Mesh(tmp_path, store=location)
    mesh.registrar_store = registrar_store(tmp_path, location)
    mesh.catalog.ledger = Ledger(mesh.catalog.environment, mesh.registrar_store)
    async with mesh:
        yield mesh


async def upload(mesh: Mesh, content: bytes, digest: str = "") -> Told:
    return await mesh.ask("PUT", f"{ADMIN}/artifacts/{digest or digest_of(content)}", data=content)


async def publish(mesh: Mesh) -> Told:
    body = {"digest": DIGEST, "create_over": BASE}
    return await mesh.ask("POST", f"{ADMIN}/policies/acme/bot/revisions", json=body)


async def test_what_is_uploaded_is_published(mesh: Mesh, s3: ObjectServer, bucket: str) -> None:
    assert (await publish(mesh)).status == 400
    assert (await mesh.ask("HEAD", f"{ADMIN}/artifacts/{DIGEST}")).status == 404
    assert [(await upload(mesh, CONTENT)).status for _ in range(2)] == [201, 200]
    assert (await mesh.ask("HEAD", f"{ADMIN}/artifacts/{DIGEST}")).status == 200
    done = await publish(mesh)
    assert (done.json["revision"], done.json["digest"]) == (1, DIGEST)
    assert s3.keys(bucket) == {f"p/blobs/{DIGEST[:2]}/{DIGEST}": len(CONTENT)}


async def test_bytes_of_another_digest_leave_nothing(mesh: Mesh, s3: ObjectServer, bucket: str) -> None:
    told = await upload(mesh, CONTENT, "0" * 64)
    assert (told.status, told.error["param"]) == (400, "digest")
    assert s3.keys(bucket) == {}


async def test_a_client_that_goes_away_leaves_nothing(
    mesh: Mesh, s3: ObjectServer, bucket: str, proxy: FaultyProxy
) -> None:
    async def half() -> AsyncIterator[bytes]:
        for _ in range(3 * PART_BYTES >> 20):
            yield bytes(1 << 20)
        await asyncio.Event().wait()

    async def send() -> None:
        async with aiohttp.ClientSession() as http:
            await http.put(f"{mesh.url}{ADMIN}/artifacts/{'0' * 64}", data=half())

    sending = asyncio.create_task(send())
    await until(lambda: proxy.count("PUT", "partNumber=1") > 0)
    sending.cancel()
    await until(lambda: proxy.count("DELETE", "uploadId") > 0)
    await until(lambda: s3.unfinished(bucket) == [])
    assert s3.keys(bucket) == {}


async def test_bytes_that_come_back_wrong_are_not_published(mesh: Mesh, proxy: FaultyProxy) -> None:
    await upload(mesh, CONTENT)
    proxy.inject(corrupt(), method="GET")
    told = await publish(mesh)
    assert (told.status, told.error["type"]) == (502, "artifact_unavailable")
    assert "corrupt" in told.error["message"]
    proxy.heal()
    assert (await publish(mesh)).json["revision"] == 1


async def test_a_store_that_is_too_busy_is_told_with_a_time(mesh: Mesh, proxy: FaultyProxy) -> None:
    proxy.inject(answer(503, "SlowDown"))
    told = await upload(mesh, CONTENT)
    assert (told.status, told.error["type"]) == (502, "artifact_unavailable")
    assert int(told.headers["retry-after"]) > 0
    proxy.heal()
    proxy.inject(answer(507, "InsufficientStorage"), method="PUT")
    assert (await upload(mesh, CONTENT)).error["type"] == "storage_full"
