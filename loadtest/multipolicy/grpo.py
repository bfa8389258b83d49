"""Runs of the shape that GRPO has (arXiv 2402.03300): groups sampled on the newest revision, advantages within a group,
a step on them, a new revision. The reward counts tokens of even number: what is learnt is beside the point here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from loadtest.training.client import Run, TrainingClient, datum
from loadtest.training.mesh import NAME

_LEARNING_RATE = 1e-5
_LOSS = "importance_sampling"


class Shape(msgspec.Struct, frozen=True):
    """``prompts`` of ``prompt`` tokens a step, ``group`` samples of ``tokens`` tokens to each, ``steps`` of it."""

    prompts: int
    group: int
    prompt: int
    tokens: int
    steps: int
    rank: int


class Step(msgspec.Struct, frozen=True):
    """Seconds: sampling; then until the optimiser's step is done; then until the new revision can be sampled.

    ``begun_s`` is when it began, after the first of all policies.
    """

    begun_s: float
    sample_s: float
    train_s: float
    save_s: float


async def train(
    client: TrainingClient, name: str, shape: Shape, *, seed: int, vocabulary: int, start: float
) -> tuple[Run, list[Step]]:
    """A fresh policy through all of its steps; its run, which stays, and what they took. ``start`` is time's zero."""
    run = await client.begin(NAME, name, rank=shape.rank, seed=seed)
    chance = np.random.default_rng(seed)
    sampler = await run.save_for_sampler()
    steps = []
    for _ in range(shape.steps):
        begun = time.monotonic()
        prompts = chance.integers(0, vocabulary, (shape.prompts, shape.prompt)).tolist()
        groups = await asyncio.gather(*(run.sample(sampler, each, shape.group, shape.tokens) for each in prompts))
        data = [one for prompt, group in zip(prompts, groups, strict=True) for one in learnt(prompt, group)]
        sampled = time.monotonic()
        # sent one after another without waiting, as the SDKs do
        _, trained, sampler = await asyncio.gather(
            run.forward_backward(data, _LOSS), _stepped(run), run.save_for_sampler()
        )
        steps.append(Step(begun - start, sampled - begun, trained - sampled, time.monotonic() - trained))
    return run, steps


async def _stepped(run: Run) -> float:
    """When the step was done."""
    await run.optim_step(_LEARNING_RATE)
    return time.monotonic()


def learnt(prompt: Sequence[int], group: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A group as data: each sample's reward, less the group's mean and over its spread, is its tokens' advantage."""
    rewards = np.asarray([np.mean(np.asarray(one["tokens"]) % 2 == 0) for one in group])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    data = []
    for one, advantage in zip(group, advantages, strict=True):
        whole = [*prompt, *one["tokens"]]
        before = [0.0] * (len(prompt) - 1)
        data.append(
            datum(
                whole[:-1],
                whole[1:],
                logprobs=[*before, *one["logprobs"]],
                advantages=[*before, *[float(advantage)] * len(one["tokens"])],
            )
        )
    return data
