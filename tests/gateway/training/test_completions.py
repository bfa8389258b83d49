"""What a sample asks of the gateway."""

from __future__ import annotations

import pytest

from gateway.training.completions import explained, request_body
from gateway.training.work import Sample


@pytest.mark.parametrize(("asked", "told"), [(None, 1000), (7, 7)])
def test_a_sample_without_a_bound_asks_for_all_that_it_may_have(asked: int | None, told: int) -> None:
    """What it leaves out would be 16 tokens to an engine."""
    body = request_body("acme/bot@1", Sample(prompt=(1,), count=8, max_tokens=asked), most_tokens=1000)
    assert body["max_tokens"] == told


def test_a_prompt_that_leaves_no_room_is_told_as_such() -> None:
    ask = Sample(prompt=(1,) * 512, max_tokens=5)
    engine_s = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
    assert explained(ask, engine_s).startswith("the prompt's 512 tokens fill the engine's context")
    assert explained(ask, "the model is on fire") == "the model is on fire"
