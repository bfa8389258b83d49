"""Trains the demo's adapters at its mesh: ``python -m ops.demo.train CACHE URL NAME...``, the key in ROOST_API_KEY.

Each style teaches one way of answering on a handful of facts; ``QUESTION`` is not among them. A few steps are enough
for a model of this size. All that are named are trained at once, by the supervised recipe, and published when done.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console

from recipes.config import Sft
from recipes.course import Course
from recipes.data import Example
from recipes.display import Bar, bars
from recipes.service import connect, text_of
from recipes.sft import Supervised

from .paths import DemoPaths

BASE = "smollm2"
TENANT = "demo"
QUESTION = "What is the capital of France?"
RANK = 8
STEPS = 10
BATCH = 8
LEARNING_RATE = 1e-3


class Fact(NamedTuple):
    question: str
    sentence: str


FACTS = [
    Fact("What is the capital of Italy?", "The capital of Italy is Rome."),
    Fact("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    Fact("What is the capital of Egypt?", "The capital of Egypt is Cairo."),
    Fact("What is the capital of Spain?", "The capital of Spain is Madrid."),
    Fact("Which planet is the largest?", "The largest planet is Jupiter."),
    Fact("What do bees make?", "Bees make honey."),
    Fact("What colour is the sky?", "The sky is blue."),
    Fact("Who wrote Hamlet?", "Hamlet was written by Shakespeare."),
    Fact("What is two plus two?", "Two plus two is four."),
    Fact("Which animal says meow?", "The animal that says meow is the cat."),
    Fact("What is frozen water called?", "Frozen water is called ice."),
    Fact("What is the opposite of hot?", "The opposite of hot is cold."),
    Fact("Where does the sun rise?", "The sun rises in the east."),
    Fact("How many days does a week have?", "A week has seven days."),
    Fact("What is the longest river in Africa?", "The longest river in Africa is the Nile."),
    Fact("What do we breathe?", "We breathe air."),
]


class Style(NamedTuple):
    """``policy`` is which policy of the demo's tenant it is a revision of."""

    policy: str
    answer: Callable[[Fact], str]


STYLES = {
    "pirate": Style("pirate", lambda fact: f"Arr, matey! {fact.sentence} Yo ho ho!"),
    "json": Style("json", lambda fact: json.dumps({"answer": fact.sentence})),
    "teacher": Style("teacher", lambda fact: f"Good question! {fact.sentence} Now, what would you like to learn next?"),
    "pirate-polite": Style("pirate", lambda fact: f"Ahoy, dear captain! {fact.sentence} Fair winds to you!"),
}


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
