"""The revision that answers is the revision that was asked for, however much moves meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.crowd import PROMPTS, SLOTS, World, ask_at_once
from tests.e2e.mesh import BASE, ENGINES, Mesh, ask

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> World:
    return World(tmp_path_factory.mktemp("world"), tiny_base)


@pytest.fixture(scope="module", params=ENGINES)
def mesh(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_base: Path, world: World
) -> Iterator[Mesh]:
    mesh = Mesh(
        tmp_path_factory.mktemp("mesh"),
        tiny_base,
        engine={"backend": request.param, "slots": SLOTS, "max_rank": 8, "max_num_seqs": 64},
        sidecar={"loads_in_flight": 2, "loads_queued": 64},
    )
    mesh.up()
    try:
        world.publish_first(mesh)
        yield mesh
    finally:
        mesh.down()


def test_references_tell_policies_apart(world: World) -> None:
    """Were two policies to answer alike, a mix-up would not be seen."""
    for prompt in PROMPTS:
        answers = Counter(answer for (_, asked), answer in world.expected.items() if asked == prompt)
        assert answers.most_common(1)[0][1] == 1


async def test_five_hundred_at_once_while_revisions_move(mesh: Mesh, world: World) -> None:
    await ask_at_once(mesh, world)


async def test_a_rollback_is_seen_by_the_next_request(mesh: Mesh, world: World) -> None:
    policy, prompt = "acme/p0", PROMPTS[0]
    async with aiohttp.ClientSession() as session:
        await asyncio.to_thread(mesh.roost, "policy", "rollback", policy, "--to", "2")
        assert (await ask(session, mesh.url, policy, prompt)).text == world.expected[f"{policy}@2", prompt]
        await asyncio.to_thread(mesh.roost, "policy", "rollback", policy, "--to", "1")
        assert (await ask(session, mesh.url, policy, prompt)).text == world.expected[f"{policy}@1", prompt]


async def test_the_base_answers_as_itself(mesh: Mesh, world: World) -> None:
    """Also where its prefix cache holds what was computed in the crowd above."""
    async with aiohttp.ClientSession() as session:
        for prompt in PROMPTS:
            assert (await ask(session, mesh.url, BASE, prompt)).text == world.expected[BASE, prompt]
