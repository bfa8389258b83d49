"""What the trainer computes is what transformers and PEFT compute, on one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load

from backends.megatron_train.control import MegatronTrainer
from tests.backends.megatron.bases import KINDS, mixed_batch, sft_batch
from tests.backends.megatron.reference import MergedReference, PeftReference, Reference
from tests.backends.megatron.trainers import exported, local_trainer
from wire.trainer import Adam, Batch, PolicySpec

STEPS: list[tuple[list[Batch], Adam]] = [
    ([sft_batch(1)], Adam(learning_rate=3e-3, eps=1e-3)),
    ([mixed_batch(2), sft_batch(3)], Adam(learning_rate=3e-3, eps=1e-3)),
    ([mixed_batch(4)], Adam(learning_rate=3e-3, eps=1e-3, grad_clip_norm=0.5)),
    ([mixed_batch(5)], Adam(learning_rate=3e-3, eps=1e-3)),
]
SPEC = PolicySpec(policy="acme", rank=4, alpha=12, seed=7)


async def train(trainer: MegatronTrainer, policy: str) -> list[tuple[list[float], float]]:
    """(losses of the batches, gradient norm) of each step."""
    seen = []
    number = 0
    for batches, adam in STEPS:
        losses = []
        for batch in batches:
            number += 1
            losses.append((await trainer.forward_backward(policy, batch, number=number)).loss)
        number += 1
        seen.append((losses, (await trainer.optim_step(policy, adam, number=number)).grad_norm))
    return seen


async def test_a_bf16_base_trains_fp32_adapters(bases: dict[str, Path], tmp_path: Path) -> None:
    seen = {}
    for dtype in ("float32", "bfloat16"):
        async with local_trainer(bases["qwen3-moe"], tmp_path / dtype, dtype=dtype) as trainer:
            assert (await trainer.limits()).dtype == dtype
            await trainer.create_policy(SPEC)
            trained = await train(trainer, "acme")
            file = await exported(trainer, "acme", tmp_path / f"{dtype}.roost")
            seen[dtype] = trained, load(bytes(file.buffer))
    exact, rounded = seen["float32"], seen["bfloat16"]
    for (losses, norm), (expected, expected_norm) in zip(rounded[0], exact[0], strict=True):
        assert losses == pytest.approx(expected, rel=0.02)
        assert norm == pytest.approx(expected_norm, rel=0.1)
    # the factors are not rounded to the base's dtype
    assert any((value != value.bfloat16().float()).any() for value in rounded[1].values())


def reference_for(kind: str, base: Path, file: object, folder: Path) -> Reference:
    return MergedReference(base, file) if kind == "qwen3-moe" else PeftReference(base, file, folder)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [True, False])
async def test_training_and_export_equal_peft(
    kind: str, recompute: bool, bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases[kind]
    async with local_trainer(base, tmp_path / "trainer", recompute=recompute) as trainer:
        await trainer.create_policy(SPEC)
        first = await exported(trainer, "acme", tmp_path / "first.roost")
        ours = await train(trainer, "acme")
        last = await exported(trainer, "acme", tmp_path / "last.roost")
        batch = sft_batch(9)
        outputs = await trainer.forward("acme", batch)

    theirs = reference_for(kind, base, first, tmp_path / "peft-first").train(STEPS)
    for (losses, norm), (expected, expected_norm) in zip(ours, theirs, strict=True):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert norm == pytest.approx(expected_norm, rel=1e-4)

    reference = reference_for(kind, base, last, tmp_path / "peft-last")
    for place, datum in enumerate(batch.data):
        tokens, targets = (np.frombuffer(raw, "<i8") for raw in (datum.tokens, datum.targets))
        with torch.no_grad():
            expected = reference.logprobs(tokens, targets).numpy()
        assert np.abs(np.frombuffer(outputs.data[place].logprobs, "<f4") - expected).max() < 1e-5
