"""An artifact store that is a small disk of its own: mounted in a namespace, which takes ``unshare``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.mesh import Mesh, ask, upload
from tests.models import make_adapter

pytestmark = pytest.mark.engine

PROMPT = "still here"
STORE_BYTES = 16 << 20


@pytest.fixture
def mesh(tmp_path: Path, tiny_base: Path) -> Iterator[Mesh]:
    mesh = Mesh(tmp_path / "mesh", tiny_base, engine={"slots": 2, "max_rank": 8}, sidecar={}, store_bytes=STORE_BYTES)
    mesh.up()
    yield mesh
    mesh.down()


async def test_a_full_disk_is_said_to_be_full_and_is_usable_once_there_is_room(
    mesh: Mesh, tiny_base: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "adapter", tiny_base, seed=77)
    for number in range((STORE_BYTES >> 20) + 1):
        status, answer = await upload(mesh, bytes([number]) * (1 << 20))
        if status == 507:
            break
    assert (status, answer["error"]["code"]) == (507, "storage_full")
    # what room is left is less than a block: nothing fits
    for number in range(1000):
        status, _ = await upload(mesh, number.to_bytes(4, "big") * 1000)
        if status == 507:
            break
    words = ("publish", "acme/late", str(adapter), "--create-over", "tiny")
    full = await asyncio.to_thread(mesh.roost, *words, check=False)
    assert full.returncode != 0
    assert "room" in full.stderr
    async with aiohttp.ClientSession() as session:
        url = f"{mesh.url}/roost/v1/orphans/collect"
        async with session.post(url, json={"older_than_s": 0}) as answered:
            assert answered.status == 200
            assert (await answered.json())["removed"] > 0
        assert (await asyncio.to_thread(mesh.roost, *words)).returncode == 0
        assert (await ask(session, mesh.url, "acme/late", PROMPT)).status == 200
