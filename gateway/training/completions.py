"""A sample in the gateway's terms: token ids in and out of its OpenAI completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from wire.outcomes import EngineFailed, InvalidRequest

from .answers import EMPTY
from .settings import TrainingSettings
from .work import Alternatives, Sample, Sampled, Sequence

_TOKEN = "token_id:"  # noqa: S105 - how the engine spells a token's id in place of its text


_NO_ROOM = "max_tokens must be at least 1"


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Answer)


def request_body(model: str, ask: Sample, most_tokens: int) -> dict[str, Any]:
    """The JSON of ``POST /v1/completions``. Each sequence of a sample without a bound may have ``most_tokens``, and
    ends with the engine's context before.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": ask.prompt,
        "n": ask.count,
        "max_tokens": most_tokens if ask.max_tokens is None else ask.max_tokens,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "top_k": ask.top_k,
        "logprobs": ask.topk_sample,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
    }
    if ask.seed is not None:
        body["seed"] = ask.seed
    if ask.stop is not None:
        numbers = [stop for stop in ask.stop if isinstance(stop, int)]
        body["ignore_eos"] = not ask.stop
        body["stop_token_ids" if numbers else "stop"] = list(ask.stop)
    if ask.prompt_logprobs or ask.topk_prompt:
        body["prompt_logprobs"] = ask.topk_prompt
    return body


def read_answer(ask: Sample, body: bytes) -> Sampled:
    """Raises EngineFailed for an answer that lacks what was asked for."""
    try:
        choices = _decoder.decode(body).choices
    except msgspec.MsgspecError as error:
        raise EngineFailed(f"the engine's answer is not a completion: {error}") from None
    if len(choices) != ask.count:
        raise EngineFailed(f"the engine gave {len(choices)} of {ask.count} sequences")
    sequences = tuple(_sequence(choice, ask.topk_sample) for choice in choices)
    if not (ask.prompt_logprobs or ask.topk_prompt):
        return Sampled(sequences=sequences)
    rows = choices[0].prompt_logprobs
    if rows is None or len(rows) != len(ask.prompt):
        raise EngineFailed("the engine's answer lacks the prompt's log-probabilities")
    scored_from = len(rows) - ask.last if ask.last else 0
    rows = [None if place < scored_from else row for place, row in enumerate(rows)]
    return Sampled(
        sequences=sequences,
        prompt_logprobs=_of_prompt(ask.prompt, rows) if ask.prompt_logprobs else b"",
        topk_prompt=_alternatives(map(_likeliest, rows), ask.topk_prompt) if ask.topk_prompt else None,
    )


def check_sample(ask: Sample, settings: TrainingSettings) -> None:
    """What is wrong with it before anybody is asked. Raises InvalidRequest that names the field."""
    if not ask.prompt:
        raise InvalidRequest("the prompt is empty", field="prompt")
    _check_within("num_samples", ask.count, 1, settings.max_choices)
    if ask.max_tokens is not None:
        _check_within("max_tokens", ask.max_tokens, 1, settings.max_generated_tokens // ask.count)
    _check_within("topk_prompt_logprobs", ask.topk_prompt, 0, settings.max_logprobs)
    _check_within("topk_sample_logprobs", ask.topk_sample, 0, settings.max_logprobs)
    if ask.last and not (ask.prompt_logprobs and 1 <= ask.last < len(ask.prompt)):
        raise InvalidRequest(
            f"prompt_logprobs_last_n is {ask.last}: it needs prompt_logprobs, and 1 to {len(ask.prompt) - 1}",
            field="prompt_logprobs_last_n",
        )


def _check_within(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequest(f"{field} is {value}: expected {least} to {most}", field=field)


def explained(ask: Sample, why: str) -> str:
    """An engine that has no room behind a prompt finds fault with a number that nobody gave."""
    if _NO_ROOM in why and (ask.max_tokens is None or ask.max_tokens > 0):
        return (
            f"the prompt's {len(ask.prompt)} tokens fill the engine's context: there is no room to sample one behind it"
        )
    return why


def _sequence(choice: _Choice, topk: int) -> Sequence:
    logprobs = choice.logprobs
    if choice.token_ids is None or logprobs is None or len(logprobs.token_logprobs) != len(choice.token_ids):
        raise EngineFailed("the engine's answer lacks token ids or their log-probabilities")
    if choice.finish_reason not in ("stop", "length"):
        raise EngineFailed(f"the engine ended a sequence with {choice.finish_reason}")
    numbers = [float("nan") if number is None else number for number in logprobs.token_logprobs]
    rows = (_by_id(row) for row in logprobs.top_logprobs or ())
    return Sequence(
        tokens=np.asarray(choice.token_ids, "<i4").tobytes(),
        logprobs=np.asarray(numbers, "<f4").tobytes(),
        stopped=choice.finish_reason == "stop",
        topk=_alternatives(rows, topk) if topk else None,
    )


def _of_prompt(prompt: tuple[int, ...], rows: list[dict[str, _Logprob] | None]) -> bytes:
    numbers = []
    for token, row in zip(prompt, rows, strict=True):
        found = row.get(str(token)) if row else None
        numbers.append(float("nan") if found is None else found.logprob)
    return np.asarray(numbers, "<f4").tobytes()


def _likeliest(row: dict[str, _Logprob] | None) -> list[tuple[int, float]]:
    return [(int(token), given.logprob) for token, given in (row or {}).items()]


def _by_id(row: dict[str, float] | None) -> list[tuple[int, float]]:
    return [(int(token.removeprefix(_TOKEN)), logprob) for token, logprob in (row or {}).items()]


def _alternatives(rows: Iterable[list[tuple[int, float]]], k: int) -> Alternatives:
    """The ``k`` likeliest of each row; the engine also gives the token that is there, which may be none of them."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for row in rows:
        chosen = sorted(row, key=lambda pair: -pair[1])[:k]
        chosen += [(0, EMPTY)] * (k - len(chosen))
        tokens += [token for token, _ in chosen]
        logprobs += [logprob for _, logprob in chosen]
    return Alternatives(k, np.asarray(tokens, "<i4").tobytes(), np.asarray(logprobs, "<f4").tobytes())
