"""Ranks in every arrangement compute what one rank computes, export the same revision, and read its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from backends.megatron_train.control import MegatronTrainer
from packer.revision import RevisionFile
from tests.backends.megatron.bases import mixed_batch, sft_batch
from tests.backends.megatron.test_parity import STEPS, train
from tests.backends.megatron.trainers import exported, local_trainer, real_trainer
from wire.trainer import Adam, PolicySpec

TENSOR = {"tensor": 2}
SEQUENCE = {"tensor": 2, "sequence_parallel": True}
TOPOLOGIES: list[tuple[str, str, dict[str, Any]]] = [
    ("tp2", "qwen3", TENSOR),
    ("tp2-sp", "qwen3", SEQUENCE),
    ("tp2-tied", "llama", SEQUENCE),
    ("pp2", "qwen3", {"pipeline": 2}),
    ("pp2-tied", "llama", {"pipeline": 2}),
    ("dp2", "qwen3", {"data": 2}),
    ("tp2-pp2-sp", "qwen3", {**SEQUENCE, "pipeline": 2}),
    ("ep2", "qwen3-moe", {"data": 2, "expert": 2}),
    ("dp2-moe", "qwen3-moe", {"data": 2}),
    ("tp2-ep2-sp", "qwen3-moe", {**SEQUENCE, "expert": 2}),
    ("tp2-ep4-dp2-sp", "qwen3-moe", {**SEQUENCE, "expert": 4, "data": 2}),
    ("pp2-ep2", "qwen3-moe", {"pipeline": 2, "data": 2, "expert": 2}),
]
SPEC = PolicySpec(policy="acme", rank=4, alpha=12, seed=7)
TOLERANCE = 3e-5


class Seen:
    """What a trainer made of one policy: its first revision, what training said, its last revision and outputs."""

    def __init__(self, first: bytes, trained: Any, last: bytes, logprobs: list[np.ndarray]) -> None:
        self.first, self.trained, self.last, self.logprobs = first, trained, last, logprobs


async def see(trainer: MegatronTrainer, folder: Path, checkpoint: Path) -> Seen:
    folder.mkdir()  # noqa: ASYNC240
    await trainer.create_policy(SPEC)
    first = await exported(trainer, "acme", folder / "first")
    trained = await train(trainer, "acme")
    last = await exported(trainer, "acme", folder / "last")
    outputs = await trainer.forward("acme", mixed_batch(9))
    logprobs = [np.frombuffer(outputs.data[place].logprobs, "<f4") for place in range(len(outputs.data))]
    await trainer.save_state("acme", checkpoint, with_optimizer=True)
    return Seen(bytes(first.buffer), trained, bytes(last.buffer), logprobs)


_SEEN: dict[str, tuple[Seen, Path]] = {}


async def seen_alone(kind: str, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, Path]:
    """What one rank makes of it, and its checkpoint."""
    if kind not in _SEEN:
        folder = tmp_path_factory.mktemp(f"alone-{kind}")
        async with local_trainer(bases[kind], folder / "trainer") as trainer:
            _SEEN[kind] = await see(trainer, folder / "seen", folder / "checkpoint"), folder / "checkpoint"
    return _SEEN[kind]


@pytest.mark.engine
@pytest.mark.parametrize(("name", "kind", "topology"), TOPOLOGIES, ids=[name for name, _, _ in TOPOLOGIES])
async def test_a_topology_computes_what_one_rank_computes(
    name: str,
    kind: str,
    topology: dict[str, Any],
    bases: dict[str, Path],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    alone, checkpoint = await seen_alone(kind, bases, tmp_path_factory)
    async with real_trainer(bases[kind], tmp_path / "trainer", **topology) as trainer:
        here = await see(trainer, tmp_path / "seen", tmp_path / "checkpoint")
        # the state of one rank goes on here as it does there
        await trainer.load_state("acme", checkpoint, with_optimizer=True, number=len(_changes()) + 1)
        moved = await exported(trainer, "acme", tmp_path / "moved")
        outputs = await trainer.forward("acme", mixed_batch(9))
    assert here.first == alone.first
    for (losses, norm), (expected, expected_norm) in zip(here.trained, alone.trained, strict=True):
        assert losses == pytest.approx(expected, rel=TOLERANCE)
        assert norm == pytest.approx(expected_norm, rel=TOLERANCE)
    for mine, theirs in zip(here.logprobs, alone.logprobs, strict=True):
        assert np.abs(mine - theirs).max() < TOLERANCE
    _assert_near(here.last, alone.last)
    assert bytes(moved.buffer) == alone.last
    for place, theirs in enumerate(alone.logprobs):
        assert np.abs(np.frombuffer(outputs.data[place].logprobs, "<f4") - theirs).max() < TOLERANCE

    # and the other way
    async with local_trainer(bases[kind], tmp_path / "back") as trainer:
        await trainer.create_policy(SPEC)
        await trainer.load_state("acme", tmp_path / "checkpoint", with_optimizer=True, number=1)
        back = await exported(trainer, "acme", tmp_path / "back.roost")
        assert bytes(back.buffer) == here.last
        stepped = await trainer.forward_backward("acme", sft_batch(5), number=2)
        assert np.isfinite(stepped.loss)
        assert (await trainer.optim_step("acme", Adam(), number=3)).step == len(STEPS) + 1


def _changes() -> list[int]:
    return list(range(sum(len(batches) + 1 for batches, _ in STEPS)))


def _assert_near(one: bytes, other: bytes) -> None:
    assert RevisionFile(one).content.header() == RevisionFile(other).content.header()
    mine, theirs = load(one), load(other)
    assert max(np.abs(mine[name] - theirs[name]).max() for name in mine) < TOLERANCE
