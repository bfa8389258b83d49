"""Samples as the training service asks for them, the same on every engine: token ids in and out, and their scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gateway.training.work import Sample, Sampled
from tests.backends.support import Caller
from tests.models import reference_scores

from .stage import BASE, Contract

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

PROMPT = tuple(range(40, 60))
END = 257


def ids(sampled: Sampled) -> list[list[int]]:
    return [np.frombuffer(one.tokens, "<i4").tolist() for one in sampled.sequences]


def scores(raw: bytes) -> Any:
    return np.frombuffer(raw, "<f4")


async def test_greedy_tokens_and_their_scores_are_those_of_peft(stage: Contract, caller: Caller) -> None:
    adapter = await stage.install(1)
    for model, folder in ((BASE, None), (adapter, stage.folder(1))):
        sampled = await caller.sample(model, Sample(prompt=PROMPT, max_tokens=12, temperature=0.0))
        (tokens,) = ids(sampled)
        expected = reference_scores(stage.base, folder, (*PROMPT, *tokens))
        assert tokens == [row.argmax() for row in expected[len(PROMPT) - 1 : -1]]
        told = [row[token] for row, token in zip(expected[len(PROMPT) - 1 :], tokens, strict=False)]
        assert scores(sampled.sequences[0].logprobs) == pytest.approx(told, abs=2e-3)
        assert not sampled.sequences[0].stopped


async def test_scores_are_the_models_own_at_any_temperature(stage: Contract, caller: Caller) -> None:
    adapter = await stage.install(1)
    sampled = await caller.sample(adapter, Sample(prompt=PROMPT, max_tokens=8, temperature=0.5, seed=3))
    (tokens,) = ids(sampled)
    expected = reference_scores(stage.base, stage.folder(1), (*PROMPT, *tokens))
    told = [row[token] for row, token in zip(expected[len(PROMPT) - 1 :], tokens, strict=False)]
    assert scores(sampled.sequences[0].logprobs) == pytest.approx(told, abs=2e-3)


async def test_the_prompts_scores_and_alternatives(stage: Contract, caller: Caller) -> None:
    adapter = await stage.install(1)
    ask = Sample(prompt=PROMPT, max_tokens=3, temperature=0.0, prompt_logprobs=True, topk_prompt=3, topk_sample=2)
    sampled = await caller.sample(adapter, ask)
    expected = reference_scores(stage.base, stage.folder(1), (*PROMPT, *ids(sampled)[0]))
    told = scores(sampled.prompt_logprobs)
    assert np.isnan(told[0])
    assert told[1:] == pytest.approx([row[token] for row, token in zip(expected, PROMPT[1:], strict=False)], abs=2e-3)
    assert sampled.topk_prompt is not None
    alternatives = np.frombuffer(sampled.topk_prompt.tokens, "<i4").reshape(len(PROMPT), 3)
    assert alternatives[1:].tolist() == [np.argsort(-row)[:3].tolist() for row in expected[: len(PROMPT) - 1]]
    topk = sampled.sequences[0].topk
    assert topk is not None
    likely = np.frombuffer(topk.tokens, "<i4").reshape(3, 2)
    assert likely.tolist() == [np.argsort(-row)[:2].tolist() for row in expected[len(PROMPT) - 1 : -1]]


async def test_a_seed_decides_the_tokens_of_each_sequence(stage: Contract, caller: Caller) -> None:
    adapter = await stage.install(1)

    async def drawn(seed: int | None, **about: Any) -> list[list[int]]:
        return ids(await caller.sample(adapter, Sample(prompt=PROMPT, count=3, max_tokens=16, seed=seed, **about)))

    first = await drawn(5)
    assert len({tuple(tokens) for tokens in first}) == 3, "each sequence is drawn for itself"
    assert await drawn(5) == first
    assert await drawn(6) != first
    assert await drawn(None) != await drawn(None)
    narrow = {"temperature": 1.5, "top_k": 8, "top_p": 0.9}
    assert await drawn(7, **narrow) == await drawn(7, **narrow)
    assert len(await drawn(1 << 62)) == 3


async def test_a_sequence_stops_where_it_is_told_to(stage: Contract, caller: Caller) -> None:
    adapter = await stage.install(1)
    greedy = Sample(prompt=PROMPT, max_tokens=12, temperature=0.0)
    (tokens,) = ids(await caller.sample(adapter, greedy))
    stop = next(token for token in tokens[3:] if token not in tokens[:3])
    place = tokens.index(stop)
    by_id = await caller.sample(adapter, Sample(prompt=PROMPT, max_tokens=12, temperature=0.0, stop=(stop,)))
    assert (ids(by_id), by_id.sequences[0].stopped) == ([tokens[: place + 1]], True)
    assert len(scores(by_id.sequences[0].logprobs)) == place + 1
    text = stage.text([stop])
    by_text = await caller.sample(adapter, Sample(prompt=PROMPT, max_tokens=12, temperature=0.0, stop=(text,)))
    assert (ids(by_text), by_text.sequences[0].stopped) == ([tokens[: place + 1]], True)
    without = await caller.sample(adapter, Sample(prompt=PROMPT, max_tokens=12, temperature=0.0, stop=()))
    assert ids(without) == [tokens]


async def test_without_a_bound_the_context_is_one(stage: Contract, caller: Caller) -> None:
    adapter = await stage.install(1)
    sampled = await caller.sample(adapter, Sample(prompt=PROMPT, temperature=0.0, stop=()))
    longest = stage.settings.max_model_len - len(PROMPT)
    assert longest - 2 <= len(ids(sampled)[0]) <= longest
    assert not sampled.sequences[0].stopped


async def test_a_request_that_is_wrong_is_refused_and_harms_nobody(stage: Contract, caller: Caller) -> None:
    adapter = await stage.install(1)
    for wrong in (
        {"prompt": list(range(300)) * 2}, {"prompt": [10**6]}, {"prompt": [-1]}, {"temperature": -1}, {"top_p": 7},
        {"top_k": -7}, {"max_tokens": -1}, {"seed": "x"}, {"seed": 1 << 70}, {"stop_token_ids": ["x"]},
        {"logprobs": "x"},
    ):  # fmt: skip
        status, text = await caller.asked(adapter, Sample(prompt=PROMPT, max_tokens=4), **wrong)
        assert status in {400, 422}, (wrong, text)
    huge = await caller.sample(adapter, Sample(prompt=PROMPT, max_tokens=4, seed=(1 << 63) - 1))
    assert len(ids(huge)[0]) == 4
    await stage.check(caller)
