"""Inside the API server: a request that would end the scheduler is refused, one that asks for too much gets less."""

from __future__ import annotations

import functools
from typing import Any

from sglang.srt.managers.tokenizer_manager import TokenizerManager

from . import versions

_SEEDS = range(-(1 << 63), 1 << 63)

_stock_status = TokenizerManager.init_running_status
_stock_validate = TokenizerManager._validate_one_request


def patch() -> None:
    """Replace how requests are looked at. Raises UnsupportedSglang."""
    versions.check(versions.REQUEST_SEAMS)
    TokenizerManager.init_running_status = init_running_status
    TokenizerManager._validate_one_request = validate


@functools.wraps(_stock_status)
def init_running_status(self: Any) -> None:
    """A request that may have more tokens than there is room for in the context ends with it, as on vLLM."""
    _stock_status(self)
    self.validate_total_tokens = False


@functools.wraps(_stock_validate)
def validate(self: Any, obj: Any, input_ids: Any) -> None:
    """A token that the vocabulary lacks ends a stock server. Raises ValueError, which is answered 400."""
    vocabulary = self.model_config.vocab_size
    if input_ids and not 0 <= min(input_ids) <= max(input_ids) < vocabulary:
        raise ValueError(f"the prompt has a token id that is not within 0 to {vocabulary - 1}")
    seed = obj.sampling_params.get("sampling_seed") if isinstance(obj.sampling_params, dict) else None
    if seed is not None and seed not in _SEEDS:
        raise ValueError(f"seed must be a whole number of 64 bits, not {str(seed)[:40]}")
    _stock_validate(self, obj, input_ids)
