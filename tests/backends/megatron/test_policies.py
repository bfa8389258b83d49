"""Many policies on one base: each as if it were alone, wherever it lies, and whatever happened to its state."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("megatron.core")

from backends.megatron_train import engine, head
from backends.megatron_train.control import MegatronTrainer
from tests.backends.megatron.bases import VOCABULARY, datum, floats, mixed_batch, sft_batch
from tests.backends.megatron.trainers import exported, local_trainer
from wire.outcomes import ArtifactUnavailable, InvalidRequest, NotFound, RoostError, TooLarge, Unfit, VersionConflict
from wire.trainer import Adam, Batch, Datum, Loss, Outputs, PolicySpec

ADAM = Adam(learning_rate=1e-2)
ONE = PolicySpec(policy="one", rank=4, alpha=8, seed=1)
TWO = PolicySpec(policy="two", rank=7, alpha=3.5, seed=2, targets=("q", "v", "down"))
BYTES_A_PARAMETER = 16


class Policy:
    """Numbers a policy's changes, and keeps what came of them."""

    def __init__(self, trainer: MegatronTrainer, name: str) -> None:
        self.trainer, self.name = trainer, name
        self.number = 0
        self.seen: list[object] = []

    async def learn(self, batch: Batch) -> Outputs:
        self.number += 1
        outputs = await self.trainer.forward_backward(self.name, batch, number=self.number)
        self.seen.append([(outputs.data[place].logprobs, outputs.data[place].loss) for place in outputs.data])
        return outputs

    async def step(self, adam: Adam = ADAM) -> None:
        self.number += 1
        self.seen.append((await self.trainer.optim_step(self.name, adam, number=self.number)).grad_norm)

    async def bytes(self, folder: Path) -> bytes:
        return bytes((await exported(self.trainer, self.name, folder / f"{self.name}.roost")).buffer)


async def train_alone(base: Path, spec: PolicySpec, seed: int, folder: Path) -> tuple[list[object], bytes]:
    async with local_trainer(base, folder) as trainer:
        await trainer.create_policy(spec)
        policy = Policy(trainer, spec.policy)
        for step in range(3):
            await policy.learn(mixed_batch(seed + step))
            await policy.learn(sft_batch(seed + step))
            await policy.step()
        return policy.seen, await policy.bytes(folder)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
async def test_two_policies_interleaved_are_bit_equal_to_each_alone(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    alone = [
        await train_alone(bases[kind], spec, seed, tmp_path / spec.policy) for spec, seed in ((ONE, 10), (TWO, 20))
    ]
    # with room for one policy on the device: each operation also moves both
    async with local_trainer(bases[kind], tmp_path / "both", device_bytes=1) as trainer:
        both = []
        for spec in (ONE, TWO):
            await trainer.create_policy(spec)
            both.append(Policy(trainer, spec.policy))
        for step in range(3):
            for make in (mixed_batch, sft_batch):
                for policy, seed in zip(both, (10, 20), strict=True):
                    await policy.learn(make(seed + step))
                    await trainer.forward(policy.name, sft_batch(99))
            for policy in both:
                await policy.step()
        for policy, (seen, revision) in zip(both, alone, strict=True):
            assert policy.seen == seen
            assert await policy.bytes(tmp_path) == revision


async def test_a_saved_state_goes_on_bit_for_bit(bases: dict[str, Path], tmp_path: Path) -> None:
    async with local_trainer(bases["qwen3"], tmp_path / "trainer") as trainer:
        await trainer.create_policy(ONE)
        policy = Policy(trainer, "one")
        for step in range(2):
            await policy.learn(mixed_batch(step))
            await policy.step()
        await trainer.save_state("one", tmp_path / "saved", with_optimizer=True)
        await trainer.save_state("one", tmp_path / "weights", with_optimizer=False)
        at_save = await policy.bytes(tmp_path)
        await policy.learn(sft_batch(5))
        await policy.step()
        expected, revision = policy.seen[-2:], await policy.bytes(tmp_path)

        await trainer.create_policy(PolicySpec(policy="other", rank=4, alpha=8, seed=99))
        other = Policy(trainer, "other")
        await trainer.load_state("other", tmp_path / "saved", with_optimizer=True, number=1)
        other.number = 1
        assert await other.bytes(tmp_path) == at_save
        await other.learn(sft_batch(5))
        await other.step()
        assert other.seen == expected
        assert await other.bytes(tmp_path) == revision

        # without the optimiser: the same weights, a step like a first one
        await trainer.load_state("other", tmp_path / "weights", with_optimizer=False, number=4)
        assert await other.bytes(tmp_path) == at_save
        with pytest.raises(InvalidRequest, match="without its optimizer"):
            await trainer.load_state("other", tmp_path / "weights", with_optimizer=True, number=5)
        assert (await trainer.optim_step("other", ADAM, number=5)).step == 1


async def test_saving_again_replaces_and_a_damaged_state_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    async with local_trainer(bases["qwen3"], tmp_path / "trainer") as trainer:
        await trainer.create_policy(ONE)
        policy = Policy(trainer, "one")
        await trainer.save_state("one", tmp_path / "saved", with_optimizer=True)
        await policy.learn(sft_batch())
        await policy.step()
        await trainer.save_state("one", tmp_path / "saved", with_optimizer=True)
        assert sorted(os.listdir(tmp_path)) == ["saved", "trainer"]  # noqa: PTH208
        after = await policy.bytes(tmp_path)
        await trainer.load_state("one", tmp_path / "saved", with_optimizer=True, number=3)
        assert await policy.bytes(tmp_path) == after

        file = tmp_path / "saved" / "rank-0.safetensors"
        damaged = bytearray(file.read_bytes())
        damaged[-1] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(ArtifactUnavailable, match="digest differs"):
            await trainer.load_state("one", tmp_path / "saved", with_optimizer=True, number=4)
        (tmp_path / "saved" / "checkpoint.json").write_text("{}")
        with pytest.raises(InvalidRequest, match="malformed"):
            await trainer.load_state("one", tmp_path / "saved", with_optimizer=True, number=4)
        assert await policy.bytes(tmp_path) == after
        # its number is free again
        await trainer.optim_step("one", ADAM, number=4)


async def test_a_state_of_another_policy_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    async with local_trainer(bases["qwen3"], tmp_path / "trainer") as trainer:
        for spec in (ONE, TWO):
            await trainer.create_policy(spec)
        await trainer.save_state("two", tmp_path / "two", with_optimizer=True)
        with pytest.raises(Unfit, match="rank 7"):
            await trainer.load_state("one", tmp_path / "two", with_optimizer=True, number=1)
        with pytest.raises(InvalidRequest, match=r"checkpoint\.json"):
            await trainer.load_state("one", tmp_path, with_optimizer=True, number=1)


async def test_changes_are_numbered(bases: dict[str, Path], tmp_path: Path) -> None:
    async with local_trainer(bases["qwen3"], tmp_path / "trainer") as trainer:
        await trainer.create_policy(ONE)
        first = await trainer.forward_backward("one", sft_batch(), number=1)
        assert await trainer.forward_backward("one", sft_batch(), number=1) == first
        stepped = await trainer.optim_step("one", ADAM, number=2)
        assert await trainer.optim_step("one", ADAM, number=2) == stepped
        for number in (1, 4):
            with pytest.raises(VersionConflict, match="the next one is 3"):
                await trainer.optim_step("one", ADAM, number=number)
        assert (await trainer.create_policy(ONE)).number == 2
        with pytest.raises(InvalidRequest, match="another specification"):
            await trainer.create_policy(PolicySpec(policy="one", rank=5))


BAD_DATA: list[tuple[str, Datum, Loss, str]] = [
    ("no tokens", Datum(tokens=b"", targets=b""), Loss("cross_entropy"), "datum 0 has 0 tokens"),
    ("too long", datum(300, 1), Loss("cross_entropy"), "300 tokens, not 1 to 256"),
    ("odd bytes", Datum(tokens=b"123", targets=b""), Loss("cross_entropy"), "3 bytes"),
    ("an id too large", Datum(tokens=(VOCABULARY).to_bytes(8, "little"), targets=bytes(8)), Loss("cross_entropy"),
     "tokens has an id outside"),
    ("an id too small", Datum(tokens=bytes(8), targets=b"\xff" * 8), Loss("cross_entropy"), "targets has an id"),
    ("fewer targets", Datum(tokens=bytes(16), targets=bytes(8)), Loss("cross_entropy"), "1 targets for 2 tokens"),
    ("fewer weights", datum(3, 1, weights=floats([1.0])), Loss("cross_entropy"), "weights is 4 bytes"),
    ("no number", datum(1, 1, weights=floats([np.nan])), Loss("cross_entropy"), "weights has a value"),
    ("no advantages", datum(1, 1, logprobs=floats([0.0])), Loss("ppo"), "lacks advantages"),
    ("no such loss", datum(1, 1), Loss("hinge"), "no loss 'hinge'"),
    ("no such setting", datum(1, 1), Loss("cross_entropy", {"beta": 1.0}), "no setting 'beta'"),
    ("no such place", datum(1, 1, loss=1), Loss("cross_entropy"), "loss 1 of 1"),
]  # fmt: skip


async def test_what_is_refused_changes_nothing(bases: dict[str, Path], tmp_path: Path) -> None:
    async with local_trainer(bases["qwen3"], tmp_path / "trainer") as trainer:
        await trainer.create_policy(ONE)
        policy = Policy(trainer, "one")
        await policy.learn(mixed_batch(1))
        for _, bad, loss, message in BAD_DATA:
            with pytest.raises(InvalidRequest, match=message):
                await trainer.forward_backward("one", Batch((bad,), (loss,)), number=2)
        with pytest.raises(InvalidRequest, match="no data"):
            await trainer.forward_backward("one", Batch((), ()), number=2)
        # exp(lp - q) is beyond fp32
        overflowing = datum(2, 1, logprobs=floats([-1000.0] * 2), advantages=floats([1.0] * 2))
        with pytest.raises(InvalidRequest, match="not finite"):
            await trainer.forward_backward(
                "one", Batch((overflowing, datum(5, 2, loss=1)), (Loss("importance_sampling"), Loss("cross_entropy"))),
                number=2,
            )  # fmt: skip
        for adam in (
            Adam(learning_rate=-1.0),
            Adam(learning_rate=1e39),
            Adam(beta1=1.0),
            Adam(eps=0.0),
            Adam(grad_clip_norm=float("nan")),
        ):
            with pytest.raises(InvalidRequest, match="not"):
                await trainer.optim_step("one", adam, number=2)
        await policy.step()
        seen, revision = policy.seen, await policy.bytes(tmp_path)

    async with local_trainer(bases["qwen3"], tmp_path / "again") as trainer:
        await trainer.create_policy(ONE)
        clean = Policy(trainer, "one")
        await clean.learn(mixed_batch(1))
        await clean.step()
        assert (clean.seen, await clean.bytes(tmp_path)) == (seen, revision)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (PolicySpec(policy="", rank=4), "policy"),
        (PolicySpec(policy="../up", rank=4), "policy"),
        (PolicySpec(policy="..", rank=4), "policy"),
        (PolicySpec(policy="a", rank=0), "rank"),
        (PolicySpec(policy="a", rank=17), "rank"),
        (PolicySpec(policy="a", rank=4, alpha=0.0), "alpha"),
        (PolicySpec(policy="a", rank=4, alpha=float("inf")), "alpha"),
        (PolicySpec(policy="a", rank=4, targets=("q", "experts.gate")), "targets"),
    ],
)
async def test_a_policy_that_cannot_be_is_refused(
    spec: PolicySpec, field: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    async with local_trainer(bases["qwen3"], tmp_path / "trainer") as trainer:
        with pytest.raises(RoostError) as refused:
            await trainer.create_policy(spec)
        assert isinstance(refused.value, InvalidRequest | Unfit)
        assert refused.value.field == field
        for asked in (
            trainer.forward("a", sft_batch()),
            trainer.optim_step("a", ADAM, number=1),
            trainer.export_revision("a", tmp_path / "a.roost"),
        ):
            with pytest.raises(NotFound):
                await asked


async def test_fifty_policies_of_mixed_rank_take_little_more_than_their_numbers(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    async with local_trainer(bases["qwen3-moe"], tmp_path / "trainer") as trainer:
        statuses = [
            await trainer.create_policy(PolicySpec(policy=f"p{place}", rank=1 + place % 16, seed=place))
            for place in range(50)
        ]
        report = await trainer.memory()
        for status in statuses:
            exact = status.parameters * BYTES_A_PARAMETER
            assert exact <= report.policies[status.policy].device <= 1.05 * exact
        await trainer.remove_policy("p0")
        await trainer.remove_policy("p0")
        assert "p0" not in (await trainer.memory()).policies
        assert (await trainer.create_policy(PolicySpec(policy="p0", rank=3))).number == 0


async def test_cold_policies_go_to_disk_and_come_back_as_they_were(bases: dict[str, Path], tmp_path: Path) -> None:
    budget = 700_000
    async with local_trainer(bases["qwen3"], tmp_path / "trainer", device_bytes=budget) as trainer:
        revisions = {}
        for place in range(6):
            await trainer.create_policy(PolicySpec(policy=f"p{place}", rank=4, seed=place))
            policy = Policy(trainer, f"p{place}")
            await policy.learn(sft_batch(place))
            await policy.step()
            revisions[policy.name] = await policy.bytes(tmp_path)
        places = (await trainer.memory()).policies
        assert sum(memory.device for memory in places.values()) <= budget
        assert [name for name, memory in places.items() if memory.disk] == ["p0", "p1", "p2", "p3"]
        for name, revision in revisions.items():
            assert await Policy(trainer, name).bytes(tmp_path) == revision
        for name in revisions:
            await trainer.remove_policy(name)
    assert list((tmp_path / "trainer" / "scratch").iterdir()) == []


async def test_a_head_in_parts_computes_the_same(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    for head_bytes in (head.HEAD_BYTES, 4 * VOCABULARY * 7):
        monkeypatch.setattr(head, "HEAD_BYTES", head_bytes)
        async with local_trainer(bases["llama"], tmp_path / str(head_bytes)) as trainer:
            await trainer.create_policy(ONE)
            policy = Policy(trainer, "one")
            outputs = await policy.learn(mixed_batch(3))
            await policy.step()
            losses.append((outputs.loss, policy.seen[-1]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


async def test_a_revision_is_final_as_far_as_its_progress(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.megatron_train.exporting._RANGE_BYTES", 1000)
    path = tmp_path / "revision"
    early: list[tuple[int, int, bytes]] = []
    async with local_trainer(bases["qwen3-moe"], tmp_path / "trainer") as trainer:
        await trainer.create_policy(ONE)
        await trainer.export_revision(
            "one", path, progress=lambda done, total: early.append((done, total, path.read_bytes()[:done]))
        )
        await exported(trainer, "one", tmp_path / "exact")
        with pytest.raises(InvalidRequest, match="F16"):
            await trainer.export_revision("one", path, dtype="F16")
    final = path.read_bytes()
    assert len(early) == 5, "the header, and the layers one by one"
    assert all(total == len(final) and final[:done] == read for done, total, read in early)
    assert early[-1][0] == len(final)
    rounded, exact = load_file(path), load_file(tmp_path / "exact")
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)


async def test_a_caller_that_leaves_does_not_stop_its_operation(bases: dict[str, Path], tmp_path: Path) -> None:
    async with local_trainer(bases["qwen3"], tmp_path / "trainer") as trainer:
        await trainer.create_policy(ONE)
        task = asyncio.create_task(trainer.forward_backward("one", sft_batch(), number=1))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await trainer.optim_step("one", ADAM, number=2)).grad_norm > 0


def test_a_checkpoint_says_what_it_is(bases: dict[str, Path], tmp_path: Path) -> None:
    async def save() -> None:
        async with local_trainer(bases["qwen3"], tmp_path / "trainer") as trainer:
            await trainer.create_policy(TWO)
            await trainer.save_state("two", tmp_path / "saved", with_optimizer=False)

    asyncio.run(save())
    manifest = json.loads((tmp_path / "saved" / "checkpoint.json").read_text())
    assert manifest["spec"] == {"policy": "two", "rank": 7, "alpha": 3.5, "targets": ["q", "v", "down"], "seed": 2}
    assert (manifest["step"], manifest["optimizer"], list(manifest["files"])) == (0, False, ["rank-0.safetensors"])


async def test_a_batch_that_does_not_fit_is_refused(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 90 GiB")

    async with local_trainer(bases["qwen3"], tmp_path / "trainer") as trainer:
        await trainer.create_policy(ONE)
        with monkeypatch.context() as patch:
            patch.setattr(engine.Engine, "_schedule", lambda *_, **options: full(**options))
            with pytest.raises(TooLarge, match="90 GiB"):
                await trainer.forward_backward("one", sft_batch(), number=1)
        assert (await trainer.forward_backward("one", sft_batch(), number=1)).loss > 0


async def test_a_policy_that_ran_away_is_told_and_can_go_back(bases: dict[str, Path], tmp_path: Path) -> None:
    async with local_trainer(bases["qwen3"], tmp_path / "trainer") as trainer:
        await trainer.create_policy(ONE)
        policy = Policy(trainer, "one")
        before = await policy.bytes(tmp_path)
        await trainer.save_state("one", tmp_path / "before", with_optimizer=True)
        await policy.learn(sft_batch())
        for _ in range(6):
            await policy.step(Adam(learning_rate=9e5, weight_decay=9e5))
        for asked in (
            trainer.forward("one", sft_batch()),
            trainer.forward_backward("one", sft_batch(), number=policy.number + 1),
            trainer.export_revision("one", tmp_path / "revision"),
        ):
            with pytest.raises(InvalidRequest, match="not finite"):
                await asked
        await trainer.load_state("one", tmp_path / "before", with_optimizer=True, number=policy.number + 1)
        assert await policy.bytes(tmp_path) == before
