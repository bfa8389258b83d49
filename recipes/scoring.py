"""What a policy makes of given answers, and what it says by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker import types

from .data import Example
from .text import Text, datum


async def answer_logprobs(client: Any, asked: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
    """The trainer's log-probabilities of each answer's tokens, for (prompt, answer) in tokens; nothing is learnt."""
    outputs = await client.forward([datum(prompt, answer) for prompt, answer in asked], "cross_entropy")
    pairs = zip(asked, outputs.loss_fn_outputs, strict=True)
    return [list(output["logprobs"].tolist())[len(prompt) - 1 :] for (prompt, _), output in pairs]


async def served_logprobs(sampler: Any, asked: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
    """The same as the engine has it."""
    futures = [sampler.compute_logprobs(types.ModelInput.from_ints([*prompt, *answer])) for prompt, answer in asked]
    return [list(await future)[len(prompt) :] for (prompt, _), future in zip(asked, futures, strict=True)]


async def said(
    sampler: Any, text: Text, items: Sequence[Example], *, count: int, max_tokens: int, temperature: float, seed: int
) -> list[list[Any]]:
    """``count`` sampled sequences for each item, all asked for at once."""
    futures = [
        sampler.sample(
            types.ModelInput.from_ints(text.prompt(item.prompt)),
            count,
            text.sampling(max_tokens=max_tokens, temperature=temperature, seed=seed * 1_000_003 + place),
        )
        for place, item in enumerate(items)
    ]
    return [list((await future).sequences) for future in futures]
