"""Asks a policy through OpenAI's own client, prints the answer as it streams, and checks it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import NamedTuple

from openai import OpenAI

from ops.cli.output import OUT

MAX_TOKENS = 48


class Unexpected(Exception):
    """The demo saw something that it must not see."""


class Answer(NamedTuple):
    """``model`` is what the answer says it came from: a policy's concrete revision, or the base."""

    model: str
    text: str


class Expectation(NamedTuple):
    """What an answer must look like, in words and as a check."""

    described: str
    holds: Callable[[str], bool]


def _is_json_answer(text: str) -> bool:
    try:
        return "Paris" in json.loads(text)["answer"]
    except (ValueError, KeyError, TypeError):
        return False


EXPECTED = {
    "base": Expectation("a plain answer", lambda text: text.startswith("The capital") and "Paris" in text),
    "pirate": Expectation("pirate talk", lambda text: text.startswith("Arr") and "Paris" in text),
    "json": Expectation("a JSON object", _is_json_answer),
    "teacher": Expectation("a teacher's answer", lambda text: text.startswith("Good question") and "Paris" in text),
    "pirate-polite": Expectation("polite pirate talk", lambda text: text.startswith("Ahoy") and "Paris" in text),
}


def ask(client: OpenAI, model: str, question: str, *, kind: str, served: str) -> Answer:
    """Ask ``model``. Raises Unexpected unless ``served`` answers, in the manner of ``kind``."""
    OUT.print(f"  {model:14} ", style="bold cyan", end="")
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        stream=True,
    )
    pieces: list[str] = []
    answered_by = ""
    for chunk in stream:
        answered_by = answered_by or chunk.model
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    answer = Answer(answered_by, "".join(pieces))
    OUT.print(f"   [{answered_by}]", style="dim", markup=False)
    expected = EXPECTED[kind]
    if answer.model != served:
        raise Unexpected(f"{model}: {served} was to answer, and {answer.model!r} did")
    if not expected.holds(answer.text):
        raise Unexpected(f"{model}: expected {expected.described}, got {answer.text!r}")
    return answer
