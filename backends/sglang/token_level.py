"""Completions with token ids and log-probabilities by id, which SGLang tells at ``/generate``, in a form of its own.

One request there is a list of sequences, ``n`` for each prompt, as a seed must be another for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from backends.dialect import Ask, Fields
from wire.outcomes import EngineFailed, InvalidRequest

from .unheeded import COMPLETIONS, asks_for_nothing

GENERATE = "/generate"
# what a completion has of tokens where nobody says
_MAX_TOKENS = 16
# (SGLang's name of it) by vLLM's
_SAMPLING = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "min_tokens": "min_new_tokens",
    "stop": "stop", "stop_token_ids": "stop_token_ids", "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "logit_bias": "logit_bias",
    "include_stop_str_in_output": "no_stop_trim",
}  # fmt: skip
_OWN = frozenset(
    {
        "model", "prompt", "n", "max_tokens", "seed", "logprobs", "prompt_logprobs", "return_token_ids",
        "return_tokens_as_token_ids", "cache_salt", "stream", "user", "detokenize",
    }
)  # fmt: skip

Token = tuple[float | None, int, str | None]
"""(log-probability, token id, text)."""


class _Told(msgspec.Struct):
    """What ``/generate`` says beside a sequence's text."""

    id: str
    finish_reason: dict[str, Any] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    output_token_logprobs: list[Token] = []
    output_top_logprobs: list[list[Token] | None] = []
    input_token_logprobs: list[Token] = []
    input_top_logprobs: list[list[Token] | None] = []


class _Sequence(msgspec.Struct):
    text: str
    output_ids: list[int]
    meta_info: _Told


_decoder = msgspec.json.Decoder(list[_Sequence])


class _Wanted(msgspec.Struct, frozen=True):
    """What a request asks to be told: numbers of alternatives, None where none are wanted; ``n`` to each prompt."""

    model: str
    prompts: Sequence[Any]
    n: int
    top: int | None
    prompt_top: int | None
    by_id: bool
    token_ids: bool


def is_token_level(fields: Fields) -> bool:
    """Whether the request asks for what only ``/generate`` tells. ``fields`` are those that are not null."""
    return "prompt_logprobs" in fields or bytes(fields.get("return_tokens_as_token_ids", b"false")) == b"true"


def generate(fields: Fields) -> Ask:
    """The request at ``/generate``, and its answer as a completion of vLLM's; ``fields`` are those that are not null.
    Raises InvalidRequest.
    """
    given = {name: value_of(name, raw) for name, raw in fields.items()}
    for name, value in given.items():
        if name not in _OWN and name not in _SAMPLING and not asks_for_nothing(COMPLETIONS, name, value):
            raise InvalidRequest(
                f"{name} is nothing that an SGLang engine takes beside tokens by their ids", field=name
            )
    if given.get("stream"):
        raise InvalidRequest("tokens by their ids are not streamed by an SGLang engine", field="stream")
    wanted = _Wanted(
        model=str(given["model"]),
        prompts=_prompts(given.get("prompt")),
        n=_number(given, "n", 1),
        top=_number(given, "logprobs", None),
        prompt_top=_number(given, "prompt_logprobs", None),
        by_id=bool(given.get("return_tokens_as_token_ids")),
        token_ids=bool(given.get("return_token_ids")),
    )
    body = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in _body(given, wanted).items()}
    return Ask(GENERATE, body, lambda answer: _completion(answer, wanted))


def _body(given: Mapping[str, Any], wanted: _Wanted) -> dict[str, Any]:
    sequences = [prompt for prompt in wanted.prompts for _ in range(wanted.n)]
    body: dict[str, Any] = {
        "input_ids" if isinstance(sequences[0], list) else "text": sequences,
        "sampling_params": [_sampling(given, number % wanted.n) for number in range(len(sequences))],
        "return_logprob": wanted.top is not None or wanted.prompt_top is not None,
        "top_logprobs_num": max(wanted.top or 0, wanted.prompt_top or 0),
        "logprob_start_len": -1 if wanted.prompt_top is None else 0,
        "return_text_in_logprobs": not wanted.by_id,
    }
    _, colon, adapter = wanted.model.partition(":")
    if colon:
        body["lora_path"] = [adapter] * len(sequences)
    if given.get("cache_salt"):
        body["cache_salt"] = given["cache_salt"]
    return body


def _sampling(given: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The parameters of the ``number``-th sequence of its prompt."""
    params = {theirs: given[ours] for ours, theirs in _SAMPLING.items() if given.get(ours) is not None}
    params["max_new_tokens"] = given.get("max_tokens", _MAX_TOKENS)
    if params.get("top_k") == 0:
        params["top_k"] = -1
    if given.get("seed") is not None:
        params["sampling_seed"] = _number(given, "seed", 0) + number
    return params


def _completion(answer: bytes, wanted: _Wanted) -> bytes:
    try:
        sequences = _decoder.decode(answer)
    except msgspec.MsgspecError as error:
        raise EngineFailed(f"the engine's answer is not what SGLang generates: {error}") from None
    if len(sequences) != len(wanted.prompts) * wanted.n:
        raise EngineFailed(f"the engine gave {len(sequences)} of {len(wanted.prompts) * wanted.n} sequences")
    told = [sequence.meta_info for sequence in sequences]
    if any((one.finish_reason or {}).get("type") == "abort" for one in told):
        raise EngineFailed("the engine gave up a sequence before its end")
    prompt_tokens = sum(one.prompt_tokens for one in told[:: wanted.n])
    completion_tokens = sum(one.completion_tokens for one in told)
    return msgspec.json.encode(
        {
            "id": told[0].id,
            "object": "text_completion",
            "model": wanted.model,
            "choices": [_choice(number, sequence, wanted) for number, sequence in enumerate(sequences)],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
        }
    )


def _choice(number: int, sequence: _Sequence, wanted: _Wanted) -> dict[str, Any]:
    told = sequence.meta_info
    end = told.finish_reason or {}
    matched = end.get("matched")
    choice: dict[str, Any] = {
        "index": number,
        "text": sequence.text,
        "logprobs": None if wanted.top is None else _logprobs(told, wanted),
        "finish_reason": end.get("type"),
        "stop_reason": matched,
    }
    if wanted.token_ids:
        choice["token_ids"] = sequence.output_ids
    if wanted.prompt_top is not None:
        rows = zip(told.input_token_logprobs, _padded(told.input_top_logprobs, told.input_token_logprobs), strict=True)
        choice["prompt_logprobs"] = [
            _prompt_row(token, (top or [])[: wanted.prompt_top]) if place else None
            for place, (token, top) in enumerate(rows)
        ]
    return choice


def _logprobs(told: _Told, wanted: _Wanted) -> dict[str, Any]:
    tokens = told.output_token_logprobs
    tops = _padded(told.output_top_logprobs, tokens)
    return {
        "tokens": [_spelled(token, wanted) for token in tokens],
        "token_logprobs": [token[0] for token in tokens],
        "top_logprobs": [
            {_spelled(one, wanted): one[0] for one in [*(top or [])[: wanted.top], token]}
            for token, top in zip(tokens, tops, strict=True)
        ]
        if wanted.top
        else None,
    }


def _prompt_row(token: Token, top: Iterable[Token]) -> dict[str, Any]:
    return {str(one[1]): {"logprob": one[0], "decoded_token": one[2]} for one in [*top, token]}


def _padded(rows: Sequence[list[Token] | None], tokens: Sequence[Token]) -> Sequence[list[Token] | None]:
    """A row for each token; without alternatives SGLang gives none."""
    return rows or [None] * len(tokens)


def _spelled(token: Token, wanted: _Wanted) -> str:
    return f"token_id:{token[1]}" if wanted.by_id else token[2] or ""


def _prompts(prompt: Any) -> Sequence[Any]:
    """The prompts, one by one: texts, or lists of token ids."""
    if isinstance(prompt, str):
        return [_not_empty(prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest("prompt must be a text, a list of token ids, or a list of either", field="prompt")
    if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds not in ({str}, {list}):
        raise InvalidRequest("prompt must be a text, a list of token ids, or a list of either", field="prompt")
    return [_not_empty(one) for one in prompt]


def _not_empty(prompt: Any) -> Any:
    if not prompt:
        raise InvalidRequest("prompt has no tokens", field="prompt")
    return prompt


def _number(given: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    value = given.get(name)
    if value is None:
        return otherwise
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be a whole number", field=name)
    return value


def value_of(name: str, raw: msgspec.Raw) -> Any:
    """Raises InvalidRequest for what is no JSON."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{name} is not JSON: {error}", field=name) from None
