"""A vLLM node and an SGLang node of one base behind one gateway: nobody who asks can tell which of them answered."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from tests.e2e.crowd import PROMPTS, SLOTS, TOKENS, World, ask_at_once
from tests.e2e.mesh import BASE, Mesh, ask
from tests.e2e.second_node import NAME, SecondNode
from tests.models import make_adapter, reference_answer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

HERE, THERE = "here", NAME
RECOVERY_S = 20.0


class Fleet(NamedTuple):
    mesh: Mesh
    second: SecondNode
    world: World


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("mixed")
    second = SecondNode(root / "there", {"backend": "sglang"})
    told = {"slots": SLOTS, "max_rank": 8, "max_num_seqs": 64}
    loads = {"loads_in_flight": 2, "loads_queued": 64}
    mesh = Mesh(root / "mesh", tiny_base, engine=told, sidecar=loads, others=[second.address])
    mesh.up()
    try:
        second.up(mesh)
        fleet = Fleet(mesh, second, World(root / "world", tiny_base))
        fleet.world.publish_first(mesh)
        yield fleet
    finally:
        second.down()
        mesh.down()


@pytest.fixture(autouse=True)
def both_in_service(fleet: Fleet) -> Iterator[None]:
    yield
    for node in (HERE, THERE):
        fleet.mesh.roost("node", "uncordon", node)


def _only(mesh: Mesh, node: str) -> None:
    """Send requests to ``node`` alone."""
    mesh.roost("node", "uncordon", node)
    mesh.roost("node", "cordon", THERE if node == HERE else HERE)


async def test_five_hundred_at_once_while_revisions_move(fleet: Fleet) -> None:
    replies = await ask_at_once(fleet.mesh, fleet.world)
    assert {reply.headers["x-roost-node"] for reply in replies} == {HERE, THERE}


async def test_a_policy_moves_between_the_engines(fleet: Fleet) -> None:
    mesh, world = fleet.mesh, fleet.world
    async with aiohttp.ClientSession() as session:
        for node in (HERE, THERE, HERE):
            await asyncio.to_thread(_only, mesh, node)
            for model, revision in (("acme/p7", "acme/p7@1"), ("acme/p8@1", "acme/p8@1"), (BASE, BASE)):
                for prompt in PROMPTS:
                    reply = await ask(session, mesh.url, model, prompt, max_tokens=TOKENS)
                    assert (reply.model, reply.text) == (revision, world.expected[revision, prompt])
                    assert reply.headers["x-roost-node"] == node


async def test_first_requests_at_once_are_one_fetch_and_one_install_a_node(fleet: Fleet, tiny_base: Path) -> None:
    mesh = fleet.mesh
    adapter = make_adapter(mesh.root / "single", tiny_base, seed=811)
    expected = reference_answer(tiny_base, adapter, "hello", 4)
    await asyncio.to_thread(mesh.publish, "acme/single", adapter)
    before = await asyncio.to_thread(mesh.nodes)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        asks = (ask(session, mesh.url, "acme/single", "hello", max_tokens=4) for _ in range(300))
        replies = await asyncio.gather(*asks)
    assert Counter((reply.status, reply.text) for reply in replies) == {(200, expected): 300}
    after = await asyncio.to_thread(mesh.nodes)
    asked = {reply.headers["x-roost-node"] for reply in replies}
    for node in (HERE, THERE):
        for count in ("fetches", "installs"):
            assert after[node][count] - before[node][count] <= 1, (node, count)
    assert sum(after[node]["installs"] - before[node]["installs"] for node in asked) >= 1


async def _by_ids(session: aiohttp.ClientSession, url: str, **changes: Any) -> dict[str, Any]:
    """One sample as the training service asks for it."""
    body = {
        "model": "acme/p3@1", "prompt": [1, 2, 3, 4, 5, 6], "n": 1, "max_tokens": 12, "temperature": 0, "logprobs": 2,
        "prompt_logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
    }  # fmt: skip
    async with session.post(f"{url}/v1/completions", json=body | changes) as answer:
        found: dict[str, Any] = await answer.json()
        assert answer.status == 200, found
        return found


async def test_tokens_and_their_probabilities_are_the_same_on_both(fleet: Fleet) -> None:
    answers = {}
    async with aiohttp.ClientSession() as session:
        for node in (HERE, THERE):
            await asyncio.to_thread(_only, fleet.mesh, node)
            answers[node] = (await _by_ids(session, fleet.mesh.url))["choices"][0]
    here, there = answers[HERE], answers[THERE]
    assert here["token_ids"] == there["token_ids"]
    assert len(here["token_ids"]) == 12
    assert here["logprobs"]["token_logprobs"] == pytest.approx(there["logprobs"]["token_logprobs"], abs=1e-3)
    for one, other in zip(here["logprobs"]["top_logprobs"], there["logprobs"]["top_logprobs"], strict=True):
        assert one == pytest.approx(other, abs=1e-3)
    assert there["prompt_logprobs"][0] is here["prompt_logprobs"][0] is None
    for one, other in zip(here["prompt_logprobs"][1:], there["prompt_logprobs"][1:], strict=True):
        scores = [{token: found["logprob"] for token, found in row.items()} for row in (one, other)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)


async def test_a_killed_engine_costs_nobody_an_answer_and_comes_back(fleet: Fleet) -> None:
    mesh, world = fleet.mesh, fleet.world
    wrong: list[str] = []
    statuses: Counter[int] = Counter()
    stop = asyncio.Event()

    async def ask_on(worker: int) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            number = worker
            while not stop.is_set():
                policy = f"acme/p{10 + number % 8}"
                reply = await ask(session, mesh.url, policy, PROMPTS[number % 3], max_tokens=TOKENS)
                statuses[reply.status] += 1
                if reply.status == 200 and reply.text != world.expected[f"{policy}@1", PROMPTS[number % 3]]:
                    wrong.append(policy)
                number += 3

    workers = [asyncio.create_task(ask_on(worker)) for worker in range(3)]
    await asyncio.sleep(3)
    pid = fleet.second.engine_pid()
    os.kill(pid, signal.SIGKILL)
    try:
        await asyncio.sleep(RECOVERY_S)
        statuses.clear()
        await asyncio.sleep(3)
        assert set(statuses) == {200}, "the other node serves all of them"
    finally:
        # the next test finds it well, and nobody asks any more
        await asyncio.to_thread(mesh.wait, "the killed engine is back", 300, lambda: _ready_again(fleet, pid))
        stop.set()
        await asyncio.gather(*workers)
    assert wrong == []
    await asyncio.to_thread(_only, mesh, THERE)
    async with aiohttp.ClientSession() as session:
        reply = await ask(session, mesh.url, "acme/p7", PROMPTS[0], max_tokens=TOKENS)
    assert (reply.text, reply.headers["x-roost-node"]) == (world.expected["acme/p7@1", PROMPTS[0]], THERE)


def _ready_again(fleet: Fleet, pid: int) -> bool:
    (engine,) = fleet.mesh.nodes()[THERE]["engines"]
    return engine["health"] == "ready" and engine["pid"] not in (0, pid)
