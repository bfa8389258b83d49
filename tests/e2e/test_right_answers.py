"""The revision that answers is the revision that was asked for, however much moves meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.mesh import BASE, Mesh, Reply, ask
from tests.models import make_adapter, reference_answer

pytestmark = pytest.mark.engine

POLICIES, SLOTS, REQUESTS, MOVED = 20, 6, 500, 5
# longer than a block of the engine's prefix cache
LONG_PROMPT = (
    "When the mesh was new, each policy had one engine to itself; by now 20 of them (and their base!) share 6 slots,"
    " and are told apart by what they say: vexing, judging, quizzing"
)
PROMPTS = ("the quick brown fox", "Roost serves", "0123456789", LONG_PROMPT)
TOKENS = 8


class World:
    """Every revision that may answer, and what it must say: computed by transformers and PEFT, not by an engine."""

    def __init__(self, root: Path, base: Path) -> None:
        self.adapters: dict[str, Path] = {}
        self.expected: dict[tuple[str, str], str] = {}
        for number in range(POLICIES):
            self._add(f"acme/p{number}@1", root, base, seed=100 + number)
        for number in range(MOVED):
            self._add(f"acme/p{number}@2", root, base, seed=500 + number)
        for prompt in PROMPTS:
            self.expected[BASE, prompt] = reference_answer(base, None, prompt, TOKENS)

    def _add(self, revision: str, root: Path, base: Path, seed: int) -> None:
        folder = make_adapter(root / revision.replace("/", "-"), base, rank=1 + seed % 8, seed=seed)
        self.adapters[revision] = folder
        for prompt in PROMPTS:
            self.expected[revision, prompt] = reference_answer(base, folder, prompt, TOKENS)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> World:
    return World(tmp_path_factory.mktemp("world"), tiny_base)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path, world: World) -> Iterator[Mesh]:
    mesh = Mesh(
        tmp_path_factory.mktemp("mesh"),
        tiny_base,
        engine={"slots": SLOTS, "max_rank": 8, "max_num_seqs": 64},
        sidecar={"loads_in_flight": 2, "loads_queued": 64},
    )
    mesh.up()
    try:
        for number in range(POLICIES):
            mesh.publish(f"acme/p{number}", world.adapters[f"acme/p{number}@1"])
        yield mesh
    finally:
        mesh.down()


def test_references_tell_policies_apart(world: World) -> None:
    """Were two policies to answer alike, a mix-up would not be seen."""
    for prompt in PROMPTS:
        answers = Counter(answer for (_, asked), answer in world.expected.items() if asked == prompt)
        assert answers.most_common(1)[0][1] == 1


async def test_five_hundred_at_once_while_revisions_move(mesh: Mesh, world: World) -> None:
    chance = random.Random(7)
    asked = [(_choose(chance), chance.choice(PROMPTS)) for _ in range(REQUESTS)]
    moving = asyncio.create_task(asyncio.to_thread(_publish_and_roll_back, mesh, world))
    limits = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limits, timeout=aiohttp.ClientTimeout(total=280)) as session:
        replies = await asyncio.gather(*(ask(session, mesh.url, m, p, max_tokens=TOKENS) for m, p in asked))
    await moving
    assert Counter(reply.status for reply in replies) == {200: REQUESTS}, _first_error(replies)
    wrong = [(q, r) for q, r in zip(asked, replies, strict=True) if not _right(world, q[0], q[1], r)]
    assert wrong == []


def _choose(chance: random.Random) -> str:
    """One in eight asks the base; one in four names a revision: an old one is wanted while a new one is served."""
    if chance.random() < 0.125:
        return BASE
    policy = f"acme/p{chance.randrange(POLICIES)}"
    return f"{policy}@1" if chance.random() < 0.25 else policy


def _publish_and_roll_back(mesh: Mesh, world: World) -> None:
    for number in range(MOVED):
        policy = f"acme/p{number}"
        assert mesh.publish(policy, world.adapters[f"{policy}@2"])["revision"] == 2
        mesh.roost("policy", "rollback", policy)


def _right(world: World, asked: str, prompt: str, reply: Reply) -> bool:
    named_as_asked = reply.model == asked or ("@" not in asked and reply.model.startswith(f"{asked}@"))
    return named_as_asked and reply.text == world.expected[reply.model, prompt]


def _first_error(replies: list[Reply]) -> str:
    return next((reply.error for reply in replies if reply.status != 200), "")


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
