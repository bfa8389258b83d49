from __future__ import annotations

from loadtest.gateway import _summary


def test_a_gateway_that_seems_to_make_requests_faster_is_told_as_noise() -> None:
    samples = {
        "cpu_us_per_request": [100.0],
        "gateway_ms": [*[2.0] * 98, 5.0, 5.0],
        "direct_ms": [*[1.0] * 98, 9.0, 9.0],
    }
    figures, left_out = _summary(samples)
    assert figures == {"cpu_us_per_request": 100.0, "requests_per_s_per_core": 10_000, "added_p50_ms": 1.0}
    assert list(left_out) == ["added_p99_ms"]
    assert "-4.0000" in left_out["added_p99_ms"]
