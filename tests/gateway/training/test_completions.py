"""What a sample asks of the gateway."""

from __future__ import annotations

import pytest

from gateway.training.completions import request_body
from gateway.training.work import Sample


@pytest.mark.parametrize(("count", "asked", "told"), [(1, None, 1000), (8, None, 125), (1, 7, 7), (8, 7, 7)])
def test_a_sample_without_a_bound_asks_for_all_that_the_gateway_lets_it_have(
    count: int, asked: int | None, told: int
) -> None:
    """What it leaves out would be 16 tokens to an engine."""
    body = request_body("acme/bot@1", Sample(prompt=(1,), count=count, max_tokens=asked), most_tokens=1000)
    assert body["max_tokens"] == told
