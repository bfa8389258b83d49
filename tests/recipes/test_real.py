"""Each recipe by the stock SDK on the real trainer and a real engine, and one that is killed in the middle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("tinker")

from recipes.config import Config, Dpo, Grpo, Sft
from recipes.folder import read_metrics
from tests.models import make_tiny_base
from tests.ops.training_mesh import Client, engine_of, trained

from .command import RUN_S, start, told
from .items import config, items, write

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Client]:
    base = make_tiny_base(tmp_path / "tiny")
    async with trained(tmp_path, base, node={"engines": [engine_of(base)]}) as client:
        yield client


def toml(given: Config | dict[str, Any]) -> str:
    import tomli_w

    return tomli_w.dumps(msgspec.to_builtins(given))


def given(kind: type[Config], folder: Path, policy: str, **more: Any) -> Config:
    """For the tiny base, whose end token no adapter can make likely: one token is an answer."""
    folder.mkdir(exist_ok=True)
    fields = {"tokenizer": str(folder.parent / "tiny"), "policy": policy, "learning_rate": 0.02, "save_every": 3}
    if kind is not Dpo:
        fields["max_tokens"] = 1
    made: Config = config(kind, folder, **fields | more)
    return made


def losses(given: Config) -> list[float]:
    return [line["loss"] for line in read_metrics(Path(given.out) / "metrics.jsonl")]


def reached(given: Config, step: int) -> None:
    """Wait until its metrics tell of ``step``."""
    until = time.monotonic() + RUN_S
    while len(losses(given)) < step:
        assert time.monotonic() < until, f"step {step} did not come"
        time.sleep(0.02)


async def test_a_killed_run_goes_on_to_the_same_figures(mesh: Client, tmp_path: Path) -> None:
    whole = given(Sft, tmp_path / "whole", "whole", labels=("e", "o"))
    expected = await told(await start(mesh, "sft", toml(whole), tmp_path / "whole"))
    assert expected["after"]["label_accuracy"] > expected["before"]["label_accuracy"] - 0.05
    assert expected["after"]["accuracy"] >= expected["before"]["accuracy"] + 0.2
    assert expected["after"]["loss"] < expected["before"]["loss"]

    killed = given(Sft, tmp_path / "killed", "killed", labels=("e", "o"))
    process = await start(mesh, "sft", toml(killed), tmp_path / "killed")
    await asyncio.to_thread(reached, killed, 5)
    process.kill()
    await process.wait()
    assert len(losses(killed)) < killed.steps
    again = await told(await start(mesh, "sft", toml(killed), tmp_path / "killed"))
    assert losses(killed) == losses(whole)
    assert (again["before"], again["after"]) == (expected["before"], expected["after"])
    assert (Path(killed.out) / "metrics.svg").exists()
    assert again["published"].endswith("/sampler_weights/final")
    # both are the same bytes, which no further revision was made for
    revisions = [(await mesh.show(f"default/{name}"))["revisions"] for name in ("whole", "killed")]
    assert revisions[0][-1]["digest"] == revisions[1][-1]["digest"]


async def test_preferences_rewards_and_a_search_at_once(mesh: Client, tmp_path: Path) -> None:
    preferring = given(Dpo, tmp_path / "dpo", "preferring", beta=0.5, steps=8)
    rewarded = given(
        Grpo, tmp_path / "grpo", "rewarded", steps=8, evaluation_samples=4, reward="tests.recipes.items:early"
    )
    supervised = given(Sft, tmp_path / "search", "found", held_out_items=8)
    search = {
        "sft": msgspec.to_builtins(supervised), "space": {"learning_rate": [1e-6, 0.02, 1e-5]}, "rounds": [2, 6],
        "metric": "loss", "test": write(tmp_path / "search" / "test.jsonl", items(400, 16)),
    }  # fmt: skip
    processes = [
        await start(mesh, name, toml(told), tmp_path / name)
        for name, told in {"dpo": preferring, "grpo": rewarded, "search": search}.items()
    ]
    of_dpo, of_grpo, found = await asyncio.gather(*map(told, processes))
    assert abs(of_dpo["before"]["margin"]) < 0.01 < 0.1 < of_dpo["after"]["margin"]
    assert of_grpo["after"]["reward"] > of_grpo["before"]["reward"] + 0.1
    assert all(abs(line["kl"]) < 1e-3 for line in read_metrics(Path(rewarded.out) / "metrics.jsonl"))
    assert found["winner"] == "found-1"
    assert found["winner_figures"]["loss"] < found["median_figures"]["loss"]
    for policy in ("preferring", "rewarded", "found-1"):
        assert (await mesh.show(f"default/{policy}"))["latest"] >= 1
