"""A revision that the trainer exported, served by vLLM in fp32, gives the trainer's own log-probabilities."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import numpy as np
import pytest

from backends.vllm.driver import VllmBackend
from tests.backends.megatron.bases import floats
from tests.backends.megatron.trainers import exported, local_trainer
from tests.backends.support import from_bytes, tiny_settings, until_ready
from tests.models import VOCABULARY, make_tiny_base
from wire.trainer import Adam, Batch, Datum, Loss, PolicySpec

LENGTHS = (5, 17, 40)
TOLERANCE = 1e-3


def sequences() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCABULARY, length + 1).astype("<i8") for length in LENGTHS]


def batch_of(ids: list[np.ndarray]) -> Batch:
    data = tuple(
        Datum(tokens=each[:-1].tobytes(), targets=each[1:].tobytes(), weights=floats([1.0] * (len(each) - 1)))
        for each in ids
    )
    return Batch(data, (Loss("cross_entropy"),))


@pytest.mark.engine
async def test_vllm_serves_what_was_trained(tmp_path: Path) -> None:
    base = make_tiny_base(tmp_path / "base")
    batch = batch_of(sequences())
    async with local_trainer(base, tmp_path / "trainer") as trainer:
        await trainer.create_policy(PolicySpec(policy="acme", rank=8, alpha=16))
        before = await trainer.forward("acme", batch)
        for number in range(1, 17, 2):
            await trainer.forward_backward("acme", batch, number=number)
            await trainer.optim_step("acme", Adam(learning_rate=1e-2), number=number + 1)
        trained = await trainer.forward("acme", batch)
        file = await exported(trainer, "acme", tmp_path / "revision")
    assert trained.loss < 0.8 * before.loss

    backend = VllmBackend(tiny_settings(base), run_dir=tmp_path / "run", log_dir=tmp_path / "log")
    await backend.start()
    try:
        await until_ready(backend)
        adapter = from_bytes(bytes(file.buffer), file.digest(), 8)
        await backend.install(adapter, 30)
        for place, ids in enumerate(sequences()):
            served = await prompt_logprobs(backend, adapter.adapter, ids)
            ours = np.frombuffer(trained.data[place].logprobs, "<f4")
            assert np.abs(ours - served).max() < TOLERANCE
    finally:
        await backend.stop()


async def prompt_logprobs(backend: VllmBackend, adapter: str, ids: np.ndarray) -> np.ndarray:
    """What the engine gives each token of a prompt after its first."""
    host, port = backend.address()
    body = {
        "model": adapter, "prompt": ids.tolist(), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0,
    }  # fmt: skip
    headers = {"Authorization": f"Bearer {backend.token()}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"http://{host}:{port}/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        positions = (await answer.json())["choices"][0]["prompt_logprobs"]
    return np.asarray([entry[str(token)]["logprob"] for entry, token in zip(positions[1:], ids[1:], strict=True)])
