"""Error answers in OpenAI's form, and the bytes of response heads."""

from __future__ import annotations

import json

import pytest

from gateway.http import error_answer
from gateway.http.answers import response_head
from wire.outcomes import ColdLoadBound, NotFound, Outcome, RoostError, error_for


@pytest.mark.parametrize("outcome", [each for each in Outcome if each is not Outcome.OK])
def test_every_outcome_has_its_answer(outcome: Outcome) -> None:
    status, headers, body = error_answer(error_for(outcome, "why", field="model"))
    assert status == outcome.http_status
    assert dict(headers)[b"x-roost-outcome"] == outcome.value.encode()
    error = json.loads(body)["error"]
    # why the journal is away names addresses and paths: that is the log's
    told = "the catalog is not available now" if outcome is Outcome.JOURNAL_UNAVAILABLE else "why"
    assert error == {"message": told, "type": outcome.value, "param": "model", "code": outcome.value}


@pytest.mark.parametrize(("seconds", "said"), [(0.0, b"1"), (0.2, b"1"), (2.01, b"3"), (None, None)])
def test_retry_after_is_rounded_up(seconds: float | None, said: bytes | None) -> None:
    error: RoostError = ColdLoadBound("full", retry_after_s=seconds)
    assert dict(error_answer(error)[1]).get(b"retry-after") == said


def test_what_may_be_well_again_soon_always_says_when_to_come_back() -> None:
    for outcome in Outcome:
        if outcome.http_status == 503 or outcome is Outcome.ENGINE_FAILED:
            assert dict(error_answer(error_for(outcome, "why"))[1])[b"retry-after"] == b"1"
    assert b"retry-after" not in dict(error_answer(NotFound("no such policy"))[1])


def test_param_is_null_without_a_field() -> None:
    assert json.loads(error_answer(NotFound("no such policy"))[2])["error"]["param"] is None


def test_response_head() -> None:
    lines = response_head(499, [(b"a", b"b")], b"content-length: 0\r\n").split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 499 Client Closed Request"
    assert lines[1].startswith(b"date: ")
    assert lines[2:] == [b"a: b", b"content-length: 0", b"", b""]


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\nb", b"a\rb"])
def test_line_breaks_in_fields_are_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="line break"):
        response_head(200, [(b"a", value)], b"")
