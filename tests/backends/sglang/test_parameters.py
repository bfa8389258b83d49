"""Which sampling parameters reach a scheduler: none on which it would end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.sglang.parameters import bounded

VOCABULARY, CONTEXT = 300, 256
NAMES = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop",
    "stop_token_ids", "sampling_seed", "min_new_tokens", "top_k", "logit_bias", "ignore_eos",
)  # fmt: skip


def checked(**params: Any) -> dict[str, Any]:
    return bounded(params, vocabulary=VOCABULARY, context=CONTEXT)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("stop_token_ids", [VOCABULARY], "stop_token_ids"), ("stop_token_ids", [-1], "stop_token_ids"),
        ("stop_token_ids", ["x"], "stop_token_ids"), ("stop_token_ids", 5, "stop_token_ids"),
        ("stop", [5], "stop"), ("stop", 5, "stop"), ("stop", "", "stop"), ("stop", ["a", ""], "stop"),
        ("temperature", 2.5, "temperature"),
        ("temperature", "hot", "temperature"), ("top_p", [1], "top_p"),
        ("sampling_seed", "x", "seed"), ("sampling_seed", 1 << 63, "seed"), ("sampling_seed", 1.5, "seed"),
        ("min_new_tokens", 1 << 40, "min_tokens"), ("min_new_tokens", "x", "min_tokens"), ("top_k", 1.5, "top_k"),
        ("logit_bias", {"5": "x"}, "logit_bias"), ("logit_bias", [5], "logit_bias"),
        ("logit_bias", {"5": float("nan")}, "logit_bias"),
    ],
)  # fmt: skip
def test_what_would_end_a_scheduler_is_refused_by_name(name: str, value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        checked(**{name: value})


def test_what_is_larger_than_anything_is_as_good_as_the_largest() -> None:
    assert checked(top_k=1 << 40) == {"top_k": VOCABULARY}
    assert checked(logit_bias={"5": 1e39, "6": -1e39, "7": 2}) == {"logit_bias": {"5": 100.0, "6": -100.0, "7": 2}}


def test_all_else_stays_as_it_is() -> None:
    params = {
        "temperature": 0, "top_p": 0.5, "top_k": -1, "stop": ["a"], "stop_token_ids": [0, VOCABULARY - 1],
        "sampling_seed": -(1 << 63), "min_new_tokens": 2, "max_new_tokens": None, "logit_bias": None,
    }  # fmt: skip
    assert checked(**params) == params


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(NAMES), _ANYTHING))
def test_any_json_is_refused_or_fits(params: dict[str, Any]) -> None:
    try:
        found = checked(**params)
    except ValueError:
        return
    assert found.keys() == params.keys()
    assert (found.get("top_k") or 0) <= VOCABULARY
    assert all(abs(bias) <= 100 for bias in (found.get("logit_bias") or {}).values())
    assert all(0 <= token < VOCABULARY for token in found.get("stop_token_ids") or ())
