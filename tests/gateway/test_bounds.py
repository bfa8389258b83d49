"""What one request may ask of an engine, by the fields in which it asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.body import parse_body
from gateway.bounds import GenerationBounds
from tests.gateway.mesh import Mesh
from wire.outcomes import InvalidRequest

BOUNDS = GenerationBounds(max_choices=128, max_generated_tokens=10_000, max_logprobs=20)


def _check(**fields: Any) -> None:
    BOUNDS.check(parse_body(json.dumps({"model": "acme/a", **fields}).encode()).fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 128, "max_tokens": 78},
        {"n": None, "max_tokens": 10_000, "logprobs": None},
        {"logprobs": True, "top_logprobs": 20},
        {"logprobs": 20, "best_of": 2},
        {"prompt": ["a"] * 64, "n": 2},
        {"prompt": [7] * 5000},
        {"prompt": [[7, 8], [9]]},
        {"prompt": []},
        {"max_completion_tokens": 10_000},
    ],
)
def test_what_is_within_the_bounds_passes(fields: dict[str, Any]) -> None:
    _check(**fields)


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"n": 4000}, "n", "from 1 to 128"),
        ({"n": 129}, "n", "not 129"),
        ({"n": 0}, "n", "from 1"),
        ({"n": "4000"}, "n", "whole number"),
        ({"n": 4e3}, "n", "whole number"),
        ({"n": 10**30}, "n", "from 1 to 128"),
        ({"n": True}, "n", "whole number"),
        ({"n": 2, "best_of": 129}, "best_of", "not 129"),
        ({"n": 128, "max_tokens": 79}, "max_tokens", "0 to 78 in this request"),
        ({"best_of": 128, "max_completion_tokens": 79}, "max_completion_tokens", "not 79"),
        ({"max_tokens": 10_001}, "max_tokens", "not 10001"),
        ({"top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ({"logprobs": 21}, "logprobs", "0 to 20"),
        ({"logprobs": -1}, "logprobs", "0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "0 to 20"),
        ({"prompt": ["a"] * 129}, "prompt", "129 prompts"),
        ({"prompt": [[7]] * 129}, "prompt", "129 prompts"),
        ({"prompt": ["a"] * 64, "n": 3}, "n", "from 1 to 2"),
        ({"prompt": ["a"] * 100, "max_tokens": 101}, "max_tokens", "0 to 100"),
    ],
)
def test_what_is_past_a_bound_is_refused_by_its_field(fields: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        _check(**fields)
    assert caught.value.field == field


async def test_too_much_is_refused_before_any_engine_is_asked(tmp_path: Path) -> None:
    async with Mesh(tmp_path, max_choices=8) as mesh:
        mesh.publish("acme/bot")
        told = await mesh.chat("acme/bot", n=9, logprobs=True, top_logprobs=20)
        assert (told.status, told.error["param"]) == (400, "n")
        assert mesh.sidecar.acquired == []
        assert (await mesh.chat("acme/bot", n=8)).status == 200
