"""Sampling parameters on which a scheduler would end, and the server with it. Imports nothing of SGLang's.

A server takes them as they come: its own checks compare some numbers, and look at no type. What vLLM bounds is bounded
in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_SEEDS = range(-(1 << 63), 1 << 63)
_MAX_BIAS = 100.0
_MAX_TEMPERATURE = 2.0


def bounded(given: Mapping[str, Any], *, vocabulary: int, context: int) -> dict[str, Any]:
    """``given`` with ``top_k`` and ``logit_bias`` within what the scheduler's tensors hold. ``vocabulary`` and
    ``context`` are numbers of tokens. Raises ValueError that names the parameter.
    """
    params = dict(given)
    for name in _NUMBERS:
        if params.get(name) is not None and not _is_number(params[name]):
            raise ValueError(f"{name} must be a number")
    if (params.get("temperature") or 0) > _MAX_TEMPERATURE:
        raise ValueError(f"temperature must be within 0 to {_MAX_TEMPERATURE:g}")
    _check_stops(params, vocabulary)
    seed = params.get("sampling_seed")
    if seed is not None and not (_is_whole(seed) and seed in _SEEDS):
        raise ValueError(f"seed must be a whole number of 64 bits, not {str(seed)[:40]}")
    least = params.get("min_new_tokens")
    if least is not None and not (_is_whole(least) and 0 <= least <= context):
        raise ValueError(f"min_tokens must be a whole number from 0 to {context}")
    if params.get("top_k") is not None:
        if not _is_whole(params["top_k"]):
            raise ValueError("top_k must be a whole number")
        params["top_k"] = min(params["top_k"], vocabulary)
    if params.get("logit_bias") is not None:
        params["logit_bias"] = _biases(params["logit_bias"])
    return params


def _check_stops(params: Mapping[str, Any], vocabulary: int) -> None:
    tokens = params.get("stop_token_ids")
    if tokens is not None and not (
        isinstance(tokens, list | set) and all(_is_whole(token) and 0 <= token < vocabulary for token in tokens)
    ):
        raise ValueError(f"stop_token_ids must be token ids, within 0 to {vocabulary - 1}")
    stop = params.get("stop")
    texts = stop if isinstance(stop, list) else [] if stop is None else [stop]
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError("stop must be a text, or a list of texts, none of them empty")


def _biases(given: Any) -> dict[str, float]:
    if not isinstance(given, dict) or not all(_is_number(bias) and not math.isnan(bias) for bias in given.values()):
        raise ValueError("logit_bias must map token ids to numbers")
    return {token: min(_MAX_BIAS, max(-_MAX_BIAS, bias)) for token, bias in given.items()}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
