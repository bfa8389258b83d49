"""Real ranks that are killed: the trainer replaces them, and its policies are as if nothing had been."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.megatron_train.agent import CONTROL_VARIABLE
from backends.megatron_train.control import MegatronTrainer
from backends.megatron_train.launcher import RankProcesses
from backends.trainer import TrainerSettings
from tests.backends.megatron.bases import mixed_batch, sft_batch
from tests.backends.megatron.test_policies import ADAM, ONE, TWO, Policy
from tests.backends.megatron.trainers import real_trainer
from wire.node import Health
from wire.outcomes import InvalidRequest, Unfit

pytestmark = pytest.mark.engine
STEPS = 3


def rank_pids(trainer: MegatronTrainer) -> list[int]:
    """The processes of the ranks: children of the trainer's agent."""
    ranks = trainer._ranks
    assert isinstance(ranks, RankProcesses)
    assert ranks._process is not None
    return children(ranks._process.pid)


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def train(trainer: MegatronTrainer, steps: int, before_each: Callable[[], None]) -> list[object]:
    seen: list[object] = []
    policies = [Policy(trainer, spec.policy) for spec in (ONE, TWO)]
    for step in range(steps):
        for policy in policies:
            before_each()
            await policy.learn(mixed_batch(step))
            before_each()
            await policy.step()
    for policy in policies:
        seen += policy.seen
    return seen


async def test_killed_ranks_are_replaced_and_nothing_is_lost_or_done_twice(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    topology = {"tensor": 2, "sequence_parallel": True}
    async with real_trainer(bases["qwen3"], tmp_path / "calm", **topology) as trainer:
        for spec in (ONE, TWO):
            await trainer.create_policy(spec)
        expected = await train(trainer, STEPS, lambda: None)
        revision = await Policy(trainer, "one").bytes(tmp_path)

    dice = random.Random(0)
    async with real_trainer(bases["qwen3"], tmp_path / "storm", **topology) as trainer:
        for spec in (ONE, TWO):
            await trainer.create_policy(spec)
        killed: list[int] = []

        operations = iter(range(STEPS * 4))

        def maybe_kill() -> None:
            if next(operations) in (2, 5, 9):
                # in the middle of an operation, or just before the next one
                victim = dice.choice(rank_pids(trainer))
                asyncio.get_running_loop().call_later(dice.random() * 0.1, kill, victim)

        def kill(victim: int) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)

        assert await train(trainer, STEPS, maybe_kill) == expected
        assert await Policy(trainer, "one").bytes(tmp_path) == revision
        assert len(killed) == 3


async def test_no_process_outlives_its_trainer(bases: dict[str, Path], tmp_path: Path) -> None:
    async with real_trainer(bases["qwen3"], tmp_path / "trainer", data=2) as trainer:
        assert (await trainer.limits()).world_size == 2
        assert await trainer.health() is Health.READY
        pids = rank_pids(trainer)
        assert len(pids) == 2
        # the agent dies without a word: so do its ranks, and others take their place
        ranks = trainer._ranks
        assert isinstance(ranks, RankProcesses)
        assert ranks._process is not None
        ranks._process.kill()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        await trainer.create_policy(ONE)
        outputs = await trainer.forward_backward("one", sft_batch(), number=1)
        assert len(outputs.data) == 5
        later = rank_pids(trainer)
        assert await trainer.optim_step("one", ADAM, number=2)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in later))


def test_settings_that_the_base_cannot_have_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    def make(kind: str, **changes: object) -> None:
        settings = TrainerSettings(name="t", model_path=str(bases[kind]), **changes)  # type: ignore[arg-type]
        MegatronTrainer(settings, state_dir=tmp_path, log_dir=tmp_path)

    for kind, changes, error, field in (
        ("qwen3", {"tensor": 4}, Unfit, "tensor"),
        ("qwen3", {"pipeline": 3}, Unfit, "pipeline"),
        ("qwen3", {"data": 0}, InvalidRequest, "data"),
        ("qwen3", {"data": 2, "expert": 2}, Unfit, "expert"),
        ("qwen3-moe", {"expert_tensor": 2}, InvalidRequest, "expert_tensor"),
        ("qwen3-moe", {"expert": 2}, InvalidRequest, "expert"),
        ("qwen3-moe", {"tensor": 2}, InvalidRequest, "sequence_parallel"),
        ("qwen3", {"max_context": 1000}, Unfit, "max_context"),
        ("qwen3", {"dtype": "float8"}, InvalidRequest, "dtype"),
        ("qwen3", {"dtype": "half"}, Unfit, "dtype"),
    ):
        with pytest.raises(error) as refused:
            make(kind, **changes)  # type: ignore[arg-type]
        assert refused.value.field == field


def test_ranks_whose_control_ended_before_they_began_do_not_stay(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    argv = [sys.executable, "-m", "backends.megatron_train.agent", "1", str(tmp_path / "settings.json")]
    agent = subprocess.run(argv, env={**os.environ, CONTROL_VARIABLE: str(gone.pid)}, timeout=60, check=False)
    assert agent.returncode == -signal.SIGKILL
