"""Trainer, training service, gateway, sidecar and registrar are killed while policies train, publish and are sampled.

What every operation gave, and every revision, is what the same policies get when nothing is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from catalog.blobs import BlobStore
from catalog.view import CatalogView
from ops.supervise.state import Phase
from tests.backends.megatron.test_ranks import children
from tests.models import make_tiny_base
from tests.ops.test_mesh import Running
from tests.ops.training_mesh import Client, engine_of, trained
from wire.node import Residency

from .rig import datum

pytestmark = pytest.mark.engine
VICTIMS = ("trainer", "training", "gateway", "sidecar", "registrar")
NAMES = ("one", "two")
TEXT = tuple(range(60, 72))
_ALL = 1_000_000


class Learner:
    """A policy that is trained turn by turn; ``seen`` is what came of it, without names."""

    def __init__(self, client: Client, name: str, seed: int) -> None:
        self.name = name
        self.seen: list[str] = []
        self.turns = 0
        self.publishes = 0
        self._client = client
        self._seed = seed
        self._seq = itertools.count(1)

    async def begin(self) -> None:
        self._session, self._run = await self._client.begin(self.name, seed=self._seed)

    async def turn(self) -> None:
        """Train, step, save or load now and then, publish, and sample what was published."""
        number = self.turns
        self.turns += 1
        shift = (self._seed + number) % 7
        batches = [
            {"data": [datum(TEXT[shift : shift + 4], TEXT[shift + 1 : shift + 5])], "loss_fn": "cross_entropy"},
            {"data": [datum(TEXT[:-1], TEXT[1:])], "loss_fn": "cross_entropy"},
        ]
        asked = [self._ask("forward_backward", forward_backward_input=batch) for batch in batches]
        asked.append(self._ask("optim_step", adam_params={"learning_rate": 0.01}))
        if number % 3 == 1:
            asked.append(self._ask("save_weights", path="kept", overwrite=True))
        if number % 3 == 2:
            path = f"tinker://{self._run}/weights/kept"
            asked.append(self._ask("load_weights", path=path, optimizer=True))
            asked += [self._ask("forward_backward", forward_backward_input=batches[0])]
            asked.append(self._ask("optim_step", adam_params={"learning_rate": 0.02}))
        asked.append(self._ask("save_weights_for_sampler", sampling_session_seq_id=number))
        self.publishes += 1
        # later ones may come before earlier ones
        *trained, published = await asyncio.gather(*asked)
        drawn = await self._client.result(
            "asample",
            {
                "sampling_session_id": published["sampling_session_id"],
                "seq_id": 0,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": TEXT[:6]}]},
                "sampling_params": {"max_tokens": 4, "temperature": 0.0},
            },
        )
        self._see(*trained, drawn["sequences"][0]["tokens"])

    async def _ask(self, operation: str, **body: Any) -> Any:
        return await self._client.result(operation, {"model_id": self._run, "seq_id": next(self._seq), **body})

    def _see(self, *results: Any) -> None:
        names = {self._run: "RUN", self._session: "SESSION"}
        for result in results:
            told = msgspec.json.encode(result).decode()
            for name, stands_for in names.items():
                told = told.replace(name, stands_for)
            self.seen.append(told)


class Published:
    """The revisions that anybody can name, each looked at once as a whole."""

    def __init__(self, running: Running) -> None:
        self._view = CatalogView.open(running.layout.catalog)
        self._store = BlobStore(running.layout.store)
        self._whole: set[str] = set()
        self.looks = 0

    def digests(self, name: str) -> list[str]:
        revisions = self._view.revisions(f"default/{name}", limit=_ALL)
        return [each.artifact.digest for each in sorted(revisions, key=lambda each: each.revision)]

    def look(self) -> None:
        """Each has all of its bytes in the store, and they are the right ones."""
        self.looks += 1
        for policy in self._view.policies():
            for revision in self._view.revisions(policy.policy, limit=_ALL):
                if revision.artifact.digest not in self._whole:
                    assert self._store.size(revision.artifact.digest) == revision.artifact.size
                    self._store.verify(revision.artifact.digest)
                    self._whole.add(revision.artifact.digest)

    def close(self) -> None:
        self._view.close()


def victim_pids(running: Running, victim: str) -> list[int]:
    """None while it is not there. The trainer is its agent and its ranks."""
    name = "training" if victim == "trainer" else victim
    process = next(each for each in running.state.processes if each.name == name)
    if process.identity is None or process.phase is Phase.RESTARTING:
        return []
    if victim != "trainer":
        return [process.identity.pid]
    agents = children(process.identity.pid)
    return [*agents, *(rank for agent in agents for rank in children(agent))]


async def kill_one(running: Running, victim: str, chance: random.Random) -> None:
    async with asyncio.timeout(60):
        while True:
            if pids := victim_pids(running, victim):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(pids), signal.SIGKILL)
                    return
            await asyncio.sleep(0.05)


async def storm(running: Running, published: Published, learners: list[Learner], kills: int) -> Counter[str]:
    """Kill ``kills`` times while the learners go on, each time after some more of their turns or in the middle."""
    chance = random.Random(kills)
    victims = [VICTIMS[number % len(VICTIMS)] for number in range(kills)]
    chance.shuffle(victims)
    ended = asyncio.Event()

    async def learn(learner: Learner) -> None:
        await learner.begin()
        while not ended.is_set():
            await learner.turn()

    async def watch() -> None:
        while True:
            published.look()
            await asyncio.sleep(0.02)

    learning = [asyncio.ensure_future(learn(learner)) for learner in learners]
    watching = asyncio.ensure_future(watch())
    killed: Counter[str] = Counter()
    try:
        for victim in victims:
            enough = sum(learner.turns for learner in learners) + chance.randrange(3)
            await progress(lambda: sum(learner.turns for learner in learners) >= enough, learning)  # noqa: B023
            await asyncio.sleep(chance.random())
            await kill_one(running, victim, chance)
            killed[victim] += 1
        ended.set()
        await asyncio.gather(*learning)
        assert not watching.done(), watching
        return killed
    finally:
        for task in (*learning, watching):
            task.cancel()
        await asyncio.gather(*learning, watching, return_exceptions=True)


async def progress(condition: Callable[[], bool], learning: list[asyncio.Future[None]]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            for task in learning:
                if task.done():
                    task.result()
            await asyncio.sleep(0.02)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kills", [10, pytest.param(50, marks=pytest.mark.soak)])
async def test_kills_at_random_points_lose_nothing_and_do_nothing_twice(tmp_path: Path, kills: int) -> None:
    base = make_tiny_base(tmp_path / "base")
    async with trained(tmp_path, base, node={"engines": [engine_of(base)]}) as client:
        running = client.running
        published = Published(running)
        learners = [Learner(client, f"storm-{name}", seed) for seed, name in enumerate(NAMES)]
        killed = await storm(running, published, learners, kills)
        assert killed.total() == kills
        assert min(killed[victim] for victim in VICTIMS) >= kills // len(VICTIMS)

        for stormy in learners:
            calm = Learner(client, stormy.name.replace("storm", "calm"), stormy._seed)
            await calm.begin()
            for _ in range(stormy.turns):
                await calm.turn()
            assert stormy.seen == calm.seen
            digests = published.digests(stormy.name)
            assert digests == published.digests(calm.name)
            assert len(digests) == stormy.publishes
        published.look()
        published.close()
        # nor does the node keep a place for bytes that never came
        node = await running.mesh._ask_node()
        assert node.audit_findings == 0
        assert node.loads_in_flight == node.loads_queued == 0
        assert Residency.FETCHING not in node.resident.values()
        assert published.looks > kills
    # what was being written when something was killed is gone
    assert not list((running.layout.training / "exports").iterdir())
