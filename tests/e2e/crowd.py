"""Many policies asked at once while their revisions move, and what each of them must say."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import aiohttp

from tests.e2e.mesh import BASE, Mesh, Reply, ask
from tests.models import make_adapter, reference_answer

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

    def publish_first(self, mesh: Mesh) -> None:
        """Every policy's first revision."""
        for number in range(POLICIES):
            mesh.publish(f"acme/p{number}", self.adapters[f"acme/p{number}@1"])


async def ask_at_once(mesh: Mesh, world: World) -> list[Reply]:
    """REQUESTS replies, each checked: the revision that was asked for, and what it must say."""
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
    return replies


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
