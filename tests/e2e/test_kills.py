"""Any process may die at any time: nothing that was acknowledged is lost, and nobody has to help."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.mesh import ENGINE, Mesh, Reply, ask
from tests.models import make_adapter, reference_answer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT, TOKENS, POLICIES = "a stitch in time", 8, 4
RECOVERY_S = 10.0


@dataclass
class World:
    mesh: Mesh
    expected: dict[str, str]
    adapters: list[Path]


# nothing but the engine differs: that an SGLang engine is killed is in every run, in the mixed fleet and its contract
@pytest.fixture(scope="module", params=["vllm", pytest.param("sglang", marks=pytest.mark.soak)])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Iterator[World]:
    root = tmp_path_factory.mktemp("kills")
    mesh = Mesh(root / "mesh", tiny_base, engine={"backend": request.param, "slots": 3, "max_rank": 8}, sidecar={})
    adapters = [make_adapter(root / f"adapter{n}", tiny_base, seed=40 + n) for n in range(POLICIES)]
    mesh.up()
    try:
        expected = {}
        for number, adapter in enumerate(adapters):
            mesh.publish(f"acme/k{number}", adapter)
            expected[f"acme/k{number}@1"] = reference_answer(tiny_base, adapter, PROMPT, TOKENS)
        yield World(mesh, expected, adapters)
    finally:
        mesh.down()


@dataclass
class Load:
    """What traffic saw: every reply, and when the last one failed."""

    replies: list[Reply] = field(default_factory=list)
    last_failure: float = 0.0
    acknowledged: list[tuple[str, int]] = field(default_factory=list)

    def wrong(self, expected: dict[str, str]) -> list[Reply]:
        return [r for r in self.replies if r.status == 200 and r.text != expected[r.model]]


@asynccontextmanager
async def load_on(world: World) -> AsyncIterator[Load]:
    """Requests to every policy, three at a time, and publishes one after another, for as long as the block runs."""
    load = Load()
    ends = asyncio.Event()

    async def requests(worker: int) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            for number in range(worker, 1_000_000):
                if ends.is_set():
                    return
                reply = await ask(session, world.mesh.url, f"acme/k{number % POLICIES}", PROMPT, max_tokens=TOKENS)
                load.replies.append(reply)
                if reply.status != 200:
                    load.last_failure = time.monotonic()
                    await asyncio.sleep(0.1)

    async def publishes() -> None:
        number = len(load.acknowledged)
        while not ends.is_set():
            policy = f"acme/fresh{number}-{int(time.monotonic() * 1000)}"
            words = ("publish", policy, str(world.adapters[number % POLICIES]), "--create-over", "tiny", "--json")
            done = await asyncio.to_thread(world.mesh.roost, *words, check=False)
            if done.returncode == 0:
                load.acknowledged.append((policy, json.loads(done.stdout)["revision"]))
            number += 1

    workers = [asyncio.create_task(requests(n)) for n in range(3)] + [asyncio.create_task(publishes())]
    try:
        yield load
    finally:
        ends.set()
        await asyncio.gather(*workers)


async def _kill_and_watch(world: World, process: str) -> Load:
    """Kill under load; all is well again within the bound, and stays so. An engine's own start-up does not count."""
    async with load_on(world) as load:
        await asyncio.sleep(2)
        before = len(load.replies)
        killed_at = time.monotonic()
        pid = await asyncio.to_thread(world.mesh.kill, process)
        own_start_s = await _engine_start(world, pid) if process == ENGINE else 0.0
        await asyncio.sleep(max(0.0, killed_at + own_start_s + RECOVERY_S - time.monotonic()))
        recovered = len(load.replies)
        await asyncio.sleep(3)
    assert before > 0
    assert load.wrong(world.expected) == []
    took_s = load.last_failure - killed_at - own_start_s
    assert took_s <= RECOVERY_S, f"{process} took {took_s:.1f} s\n{world.mesh.tails()}"
    assert len(load.replies) > recovered, f"nothing was answered after {process} came back"
    assert world.mesh.pid(process) != pid
    for policy, revision in load.acknowledged:
        shown = world.mesh.json("policy", "show", policy)
        assert shown["latest"] == revision, f"an acknowledged publish of {policy} is lost"
    return load


async def _engine_start(world: World, killed: int) -> float:
    """Seconds that the engine started in place of ``killed`` takes until it says that it is well."""
    async with aiohttp.ClientSession() as session:
        spawned_at = 0.0
        for _ in range(1800):
            record = world.mesh.engine_record()
            if not spawned_at and record is not None and record["pid"] != killed:
                spawned_at = time.monotonic()
            if spawned_at and record is not None:
                try:
                    async with session.get(f"http://127.0.0.1:{record['port']}/health") as answer:
                        if answer.status == 200:
                            return time.monotonic() - spawned_at
                except aiohttp.ClientError:
                    pass
            await asyncio.sleep(0.1)
    raise AssertionError(f"the engine did not come back\n{world.mesh.tails()}")


async def test_the_registrar_is_killed(world: World) -> None:
    load = await _kill_and_watch(world, "registrar")
    assert load.acknowledged
    # reads never needed it
    assert {reply.status for reply in load.replies} == {200}


async def test_the_sidecar_is_killed(world: World) -> None:
    engine = world.mesh.pid(ENGINE)
    await _kill_and_watch(world, "sidecar")
    assert world.mesh.pid(ENGINE) == engine, "the engine was not adopted"


async def test_the_gateway_is_killed(world: World) -> None:
    await _kill_and_watch(world, "gateway")


async def test_the_engine_is_killed(world: World) -> None:
    await _kill_and_watch(world, ENGINE)


async def test_a_stream_whose_engine_dies_ends_with_an_error(world: World) -> None:
    body = {"model": "acme/k0", "prompt": PROMPT, "max_tokens": 230, "temperature": 0, "stream": True}
    received = b""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{world.mesh.url}/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200
        try:
            async for piece in answer.content.iter_any():
                if not received:
                    pid = await asyncio.to_thread(world.mesh.kill, ENGINE)
                received += piece
        except aiohttp.ClientPayloadError:
            pass  # the stream is broken off rather than ended as if it were whole
    assert b"[DONE]" not in received
    assert b'"error"' in received

    def serves() -> bool:
        return world.mesh.roost("chat", "acme/k0", "hello", check=False).returncode == 0

    await _engine_start(world, pid)
    await asyncio.to_thread(world.mesh.wait, "the engine serves again", RECOVERY_S, serves)
