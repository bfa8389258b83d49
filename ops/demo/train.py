"""Trains the demo's adapters at its mesh: ``python -m ops.demo.train CACHE URL NAME...``, the key in ROOST_API_KEY.

A few steps are enough for a model of this size. All that are named are trained at once, by the supervised recipe, and
published when done.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.console import Console

from recipes.config import Sft
from recipes.course import Course
from recipes.data import Example
from recipes.display import Bar, bars
from recipes.service import connect, text_of
from recipes.sft import Supervised

from .paths import DemoPaths
from .styles import BASE, FACTS, RANK, STYLES, TENANT

STEPS = 10
BATCH = 8
LEARNING_RATE = 1e-3


def configured(cache: DemoPaths, name: str) -> Sft:
    """What the recipe is told for a style; its items are written."""
    folder = cache.mesh / "recipes" / name
    folder.mkdir(parents=True, exist_ok=True)
    items = [Example(fact.question, STYLES[name].answer(fact)) for fact in FACTS]
    (folder / "items.jsonl").write_bytes(b"".join(msgspec.json.encode(item) + b"\n" for item in items))
    return Sft(
        base=BASE, policy=f"{TENANT}/{STYLES[name].policy}", train=str(folder / "items.jsonl"), out=str(folder),
        tokenizer=str(cache.base), chat=True, rank=RANK, learning_rate=LEARNING_RATE, steps=STEPS, batch=BATCH,
    )  # fmt: skip


async def train(cache: DemoPaths, url: str, key: str, names: Iterable[str]) -> None:
    """All of ``names`` at once."""
    service = connect(url, key)
    with bars(Console(stderr=True)) as progress:
        async with asyncio.TaskGroup() as group:
            for name in names:
                config = configured(cache, name)
                recipe = Supervised(config, await text_of(service, config))
                group.create_task(Course(recipe, config, service, Bar(progress, config)).run())
    await service.close("success")


if __name__ == "__main__":
    asyncio.run(train(DemoPaths(Path(sys.argv[1])), sys.argv[2], os.environ["ROOST_API_KEY"], sys.argv[3:]))
