"""Ranks that die: policies come back bit for bit, and operations run again or fail with a clear error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from backends.megatron_train.control import MegatronTrainer
from backends.trainer import TrainerLost
from tests.backends.megatron.bases import mixed_batch, resident, settings_for, sft_batch
from tests.backends.megatron.test_policies import ADAM, ONE, TWO, Policy, train_alone
from tests.backends.megatron.trainers import LocalRanks, exported, local_trainer
from wire.node import Health
from wire.outcomes import ArtifactUnavailable, EngineFailed, Unfit
from wire.trainer import CreatePolicy, ExportLayers, ForwardBackward, LoadState, OptimStep, PolicySpec, SaveState


def ranks_of(trainer: MegatronTrainer) -> LocalRanks:
    ranks = trainer._ranks
    assert isinstance(ranks, LocalRanks)
    return ranks


@pytest.mark.parametrize("settings", [{}, {"snapshot_after_s": 0.0}, {"snapshot_after_bytes": 3000}])
async def test_a_rank_that_dies_at_any_operation_changes_nothing(
    settings: dict[str, Any], bases: dict[str, Path], tmp_path: Path
) -> None:
    seen, revision = await train_alone(bases["qwen3"], ONE, 10, tmp_path / "alone")
    async with local_trainer(bases["qwen3"], tmp_path / "trainer", **settings) as trainer:
        ranks = ranks_of(trainer)
        await trainer.create_policy(ONE)
        await trainer.create_policy(TWO)
        policy = Policy(trainer, "one")
        for step in range(3):
            ranks.die_before.append(ForwardBackward)
            await policy.learn(mixed_batch(10 + step))
            ranks.alive = False
            await policy.learn(sft_batch(10 + step))
            ranks.die_before.append(OptimStep)
            await policy.step()
        assert policy.seen == seen
        ranks.die_before.append(ExportLayers)
        assert await policy.bytes(tmp_path) == revision
        assert ranks.starts == 11
        assert (await trainer.forward("two", sft_batch())).loss > 0


async def test_a_loaded_state_survives_its_source_and_its_ranks(bases: dict[str, Path], tmp_path: Path) -> None:
    async with local_trainer(bases["qwen3"], tmp_path / "trainer") as trainer:
        ranks = ranks_of(trainer)
        await trainer.create_policy(ONE)
        policy = Policy(trainer, "one")
        await policy.learn(sft_batch())
        await policy.step()
        ranks.die_before.append(SaveState)
        await trainer.save_state("one", tmp_path / "saved", with_optimizer=True)
        saved = await policy.bytes(tmp_path)
        await policy.step()
        # dies when it has loaded, before that is safe
        ranks.die_before += [LoadState, SaveState]
        with pytest.raises(TrainerLost):
            await trainer.load_state("one", tmp_path / "saved", with_optimizer=True, number=4)
        ranks.die_before.append(SaveState)
        await trainer.load_state("one", tmp_path / "saved", with_optimizer=True, number=4)
        (tmp_path / "saved" / "checkpoint.json").unlink()
        ranks.alive = False
        assert await policy.bytes(tmp_path) == saved
        await trainer.load_state("one", tmp_path / "saved", with_optimizer=True, number=4)
        assert (await trainer.optim_step("one", ADAM, number=5)).step == 2


async def test_an_operation_whose_ranks_die_each_time_fails_and_can_be_asked_for_again(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    async with local_trainer(bases["qwen3"], tmp_path / "trainer") as trainer:
        ranks = ranks_of(trainer)
        await trainer.create_policy(ONE)
        ranks.die_before += [ForwardBackward, ForwardBackward]
        with pytest.raises(TrainerLost, match="lost its ranks 2 times"):
            await trainer.forward_backward("one", sft_batch(), number=1)
        again = await trainer.forward_backward("one", sft_batch(), number=1)
        assert again.loss > 0


async def test_a_new_control_goes_on_from_the_last_snapshot(bases: dict[str, Path], tmp_path: Path) -> None:
    seen, revision = await train_alone(bases["qwen3"], ONE, 10, tmp_path / "alone")
    home = tmp_path / "trainer"
    async with local_trainer(bases["qwen3"], home) as trainer:
        await trainer.create_policy(ONE)
        policy = Policy(trainer, "one")
        await policy.learn(mixed_batch(10))
        last = await policy.learn(sft_batch(10))
    async with local_trainer(bases["qwen3"], home) as trainer:
        status = await trainer.create_policy(ONE)
        assert (status.number, status.step) == (2, 0)
        # an answer that was on its way when the control ended
        assert await trainer.forward_backward("one", sft_batch(10), number=2) == last
        later = Policy(trainer, "one")
        later.number, later.seen = 2, policy.seen
        await later.step()
        for step in (1, 2):
            await later.learn(mixed_batch(10 + step))
            await later.learn(sft_batch(10 + step))
            await later.step()
        assert later.seen == seen
        assert await later.bytes(tmp_path) == revision


async def test_what_a_killed_control_did_not_keep_is_made_again(bases: dict[str, Path], tmp_path: Path) -> None:
    home = tmp_path / "trainer"
    with resident(bases["qwen3"], home / "scratch") as rank:
        trainer = MegatronTrainer(
            settings_for(bases["qwen3"]), state_dir=home, log_dir=home, ranks=LocalRanks(rank.answer)
        )
        await trainer.start()
        await trainer.create_policy(ONE)
        first = await trainer.forward_backward("one", sft_batch(), number=1)
        # nothing is stopped: the control is gone, and its ranks with it
        trainer._supervisor.cancel()  # type: ignore[union-attr]
    async with local_trainer(bases["qwen3"], home) as trainer:
        assert (await trainer.create_policy(ONE)).number == 0
        again = await trainer.forward_backward("one", sft_batch(), number=1)
        assert again.data == first.data


async def test_a_snapshot_that_was_tampered_with_is_not_restored(bases: dict[str, Path], tmp_path: Path) -> None:
    home = tmp_path / "trainer"
    async with local_trainer(bases["qwen3"], home) as trainer:
        await trainer.create_policy(ONE)
        await trainer.forward_backward("one", sft_batch(), number=1)
    file = home / "snapshots" / "one" / "1" / "rank-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    async with local_trainer(bases["qwen3"], home) as trainer:
        with pytest.raises(ArtifactUnavailable, match="digest differs"):
            await trainer.create_policy(ONE)


async def test_what_was_trained_over_another_base_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    home, saved = tmp_path / "trainer", tmp_path / "saved"
    async with local_trainer(bases["qwen3"], home, fingerprint="a" * 64) as trainer:
        await trainer.create_policy(ONE)
        await trainer.forward_backward("one", sft_batch(), number=1)
        await trainer.optim_step("one", ADAM, number=2)
        await trainer.save_state("one", saved, with_optimizer=True)
    async with local_trainer(bases["qwen3"], home, fingerprint="b" * 64) as trainer:
        with pytest.raises(Unfit, match=r"a{64}, and b{64} is trained here") as refused:
            await trainer.create_policy(ONE)
        assert refused.value.field == "base"
        await trainer.create_policy(TWO)
        with pytest.raises(Unfit, match=r"the base with fingerprint a{64}"):
            await trainer.load_state("two", saved, with_optimizer=True, number=1)
        assert (await trainer.forward_backward("two", sft_batch(), number=1)).loss > 0
    async with local_trainer(bases["qwen3"], home, fingerprint="a" * 64) as trainer:
        assert (await trainer.create_policy(ONE)).number == 2


async def test_a_caller_is_told_what_is_on_disk(bases: dict[str, Path], tmp_path: Path) -> None:
    home = tmp_path / "trainer"
    async with local_trainer(bases["qwen3"], home, snapshot_after_bytes=5000) as trainer:
        await trainer.create_policy(ONE)
        policy = Policy(trainer, "one")
        assert trainer.durable("one") == 0
        seen = []
        for step in range(8):
            await policy.learn(sft_batch(step))
            await policy.step()
            seen.append(trainer.durable("one"))
            assert trainer._snapshots.folder("one", seen[-1]).exists() or not seen[-1]
        assert 0 < seen[-1] <= policy.number
        assert seen == sorted(seen)
        await trainer.save_state("one", tmp_path / "saved", with_optimizer=True)
        await trainer.load_state("one", tmp_path / "saved", with_optimizer=True, number=policy.number + 1)
        assert trainer.durable("one") == policy.number + 1
    async with local_trainer(bases["qwen3"], home) as trainer:
        assert trainer.durable("one") == 0
        assert (await trainer.create_policy(ONE)).number == trainer.durable("one") == policy.number + 1


async def test_snapshots_bound_the_replay(bases: dict[str, Path], tmp_path: Path) -> None:
    home = tmp_path / "trainer"
    async with local_trainer(bases["qwen3"], home, snapshot_after_bytes=5000) as trainer:
        ranks = ranks_of(trainer)
        await trainer.create_policy(ONE)
        policy = Policy(trainer, "one")
        for step in range(8):
            await policy.learn(sft_batch(step))
            await policy.step()
        asked: list[type] = []
        answer = ranks._answer
        ranks._answer = lambda ask: asked.append(type(ask)) or answer(ask)
        ranks.alive = False
        await exported(trainer, "one", tmp_path / "revision")
        assert asked[0] is CreatePolicy
        assert asked.count(ForwardBackward) <= 2
        assert len(list((home / "snapshots" / "one").iterdir())) == 1
        await trainer.remove_policy("one")
        assert not (home / "snapshots" / "one").exists()


async def test_a_trainer_that_cannot_start_says_why(bases: dict[str, Path], tmp_path: Path) -> None:
    class Dead(LocalRanks):
        async def start(self) -> None:
            raise EngineFailed("the base does not fit")

    trainer = MegatronTrainer(
        settings_for(bases["qwen3"]), state_dir=tmp_path, log_dir=tmp_path, ranks=Dead(lambda ask: None)
    )
    with pytest.raises(EngineFailed, match="does not run"):
        await trainer.limits()
    for _ in range(2):
        await trainer.start()
        assert await trainer.health() is Health.STARTING
        with pytest.raises(EngineFailed, match="does not run"):
            await trainer.limits()
    with pytest.raises(EngineFailed, match="does not run"):
        await trainer.create_policy(PolicySpec(policy="one", rank=4))
    assert await trainer.health() is Health.DEAD
    assert trainer.detail == "the base does not fit"
    await trainer.stop()


async def test_operations_of_many_callers_queue(bases: dict[str, Path], tmp_path: Path) -> None:
    async with local_trainer(bases["qwen3"], tmp_path / "trainer") as trainer:
        await asyncio.gather(trainer.create_policy(ONE), trainer.create_policy(TWO), trainer.create_policy(ONE))
        outputs = await asyncio.gather(
            trainer.forward_backward("one", sft_batch(), number=1),
            trainer.forward_backward("two", sft_batch(), number=1),
            trainer.optim_step("one", ADAM, number=2),
            trainer.optim_step("two", ADAM, number=2),
        )
        assert outputs[2].step == outputs[3].step == 1
