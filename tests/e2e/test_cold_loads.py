"""Cold loads on a real engine: single flight, and bounds that are said rather than waited for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.mesh import ENGINES, Mesh, ask
from tests.models import make_adapter, reference_answer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = "hello"


@pytest.fixture(scope="module", params=ENGINES)
def mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Iterator[Mesh]:
    mesh = Mesh(
        tmp_path_factory.mktemp("mesh"),
        tiny_base,
        engine={"backend": request.param, "slots": 6, "max_rank": 8, "max_num_seqs": 64},
        sidecar={"loads_in_flight": 1, "loads_queued": 1, "loads_queued_s": 0.0},
    )
    mesh.up()
    try:
        yield mesh
    finally:
        mesh.down()


def _loads(mesh: Mesh) -> tuple[int, int]:
    """(fetches, installs) of the node since it started."""
    node = mesh.node()
    return int(node["fetches"]), int(node["installs"])


async def test_a_thousand_first_requests_cost_one_fetch_and_one_install(
    mesh: Mesh, tmp_path: Path, tiny_base: Path
) -> None:
    adapter = make_adapter(tmp_path / "a", tiny_base, seed=11)
    expected = reference_answer(tiny_base, adapter, PROMPT, 4)
    await asyncio.to_thread(mesh.publish, "acme/single", adapter)
    before = await asyncio.to_thread(_loads, mesh)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=280)) as session:
        asks = (ask(session, mesh.url, "acme/single", PROMPT, max_tokens=4) for _ in range(1000))
        replies = await asyncio.gather(*asks)
    assert Counter((reply.status, reply.text) for reply in replies) == {(200, expected): 1000}
    after = await asyncio.to_thread(_loads, mesh)
    assert (after[0] - before[0], after[1] - before[1]) == (1, 1)
    if mesh.node()["engines"][0]["backend"] == "vllm":
        assert not (mesh.state / "run" / "adapters").exists(), "it reads the arena: no folder is written for it"


async def test_of_four_cold_policies_two_load_and_two_are_told_when_to_retry(
    mesh: Mesh, tmp_path: Path, tiny_base: Path
) -> None:
    names = [f"acme/cold{number}" for number in range(4)]
    for number, name in enumerate(names):
        adapter = make_adapter(tmp_path / str(number), tiny_base, seed=20 + number)
        await asyncio.to_thread(mesh.publish, name, adapter)
    async with aiohttp.ClientSession() as session:
        await ask(session, mesh.url, "tiny", PROMPT)  # the connection is there: the four leave together
        replies = await asyncio.gather(*(ask(session, mesh.url, name, PROMPT) for name in names))
        assert sorted(reply.status for reply in replies) == [200, 200, 429, 429]
        refused = [reply for reply in replies if reply.status == 429]
        assert all(int(reply.headers["Retry-After"]) >= 1 for reply in refused)
        assert all(reply.headers["x-roost-outcome"] == "cold_load_bound" for reply in refused)
        await asyncio.sleep(max(int(reply.headers["Retry-After"]) for reply in refused))
        again = [name for name, reply in zip(names, replies, strict=True) if reply.status == 429]
        retried = [await ask(session, mesh.url, name, PROMPT) for name in again]
        assert [reply.status for reply in retried] == [200, 200]
