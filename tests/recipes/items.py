"""Items that a model of which token follows which can learn: whether the last digit is odd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipes.config import Config
from recipes.data import Example

LABELS = ("even", "odd")


def write(file: Path, items: list[dict[str, str]]) -> str:
    file.write_text("".join(f"{json.dumps(item)}\n" for item in items))
    return str(file)


def items(start: int, count: int) -> list[dict[str, str]]:
    return [{"prompt": f"n{n}", "answer": LABELS[n % 2][0]} for n in range(start, start + count)]


def pairs(start: int, count: int) -> list[dict[str, str]]:
    return [
        {"prompt": f"n{n}", "chosen": LABELS[n % 2][0], "rejected": LABELS[(n + 1) % 2][0]}
        for n in range(start, start + count)
    ]


def config(kind: type[Config], folder: Path, **more: Any) -> Any:
    """A configuration with its files written below ``folder``."""
    make = pairs if kind.__name__ == "Dpo" else items
    given: dict[str, Any] = {
        "base": "tiny", "policy": "taught", "train": write(folder / "train.jsonl", make(100, 40)),
        "held_out": write(folder / "held_out.jsonl", make(200, 20)), "out": str(folder / "out"), "rank": 4,
        "learning_rate": 0.1, "steps": 12, "batch": 8, "save_every": 5,
    }  # fmt: skip
    return kind(**given | more)


class Silent:
    """Nobody watches."""

    def stepped(self, step: int, figures: dict[str, float]) -> None: ...

    def evaluated(self, step: int, figures: dict[str, float]) -> None: ...


def early(_: Example, said: str) -> float:
    """A reward that about half of what a random model says has: a character in the first half of ASCII."""
    return float(said < "P")
