from __future__ import annotations

import json

import pytest

from gateway.answer import AnswerFilter, RequestRefused
from wire.outcomes import EngineFailed

ADAPTER = "acme@" + "a" * 64
SHOWN = "acme/bot@7"


def event(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def error_event(code: object, message: str = "no") -> bytes:
    return event({"error": {"message": message, "type": "x", "param": None, "code": code}})


def chunk(content: str) -> bytes:
    return f'data: {{"model":"{ADAPTER}","content":"{content}"}}\n\n'.encode()


def test_a_stream_tells_the_revision() -> None:
    answer = AnswerFilter(ADAPTER, SHOWN)
    out = (
        answer(chunk("a"), False) + answer(chunk("b")[:20], False) + answer(chunk("b")[20:], False) + answer(b"", True)
    )
    assert out == (chunk("a") + chunk("b")).replace(ADAPTER.encode(), SHOWN.encode())
    assert not answer.engine_error


def test_what_was_held_back_comes_at_the_end() -> None:
    answer = AnswerFilter(ADAPTER, SHOWN)
    assert answer(b'x"model":"acme', True) == b'x"model":"acme'


def test_a_request_at_fault_is_told_so_although_the_engine_said_200() -> None:
    with pytest.raises(RequestRefused) as caught:
        AnswerFilter(ADAPTER, SHOWN)(error_event(400, f"{ADAPTER} has a context of 10") + b"data: [DONE]\n\n", False)
    assert caught.value.status == 400
    assert json.loads(caught.value.body)["error"] == {
        "message": f"{SHOWN} has a context of 10", "type": "invalid_request", "param": None, "code": "invalid_request",
    }  # fmt: skip


@pytest.mark.parametrize("code", [500, "500", 404, None, "x", 200])
def test_an_engine_that_fails_before_its_first_token_has_failed(code: object) -> None:
    with pytest.raises(EngineFailed):
        AnswerFilter(ADAPTER, SHOWN)(error_event(code), False)


def test_a_failure_in_the_middle_is_passed_on_and_remembered() -> None:
    answer = AnswerFilter(ADAPTER, SHOWN)
    answer(chunk("a"), False)
    out = answer(error_event(500, f"{ADAPTER} is gone") + b"data: [DONE]\n\n", False)
    event, _, rest = out.partition(b"\n\n")
    assert rest == b"data: [DONE]\n\n"
    assert json.loads(event.removeprefix(b"data: "))["error"] == {
        "message": f"{SHOWN} is gone", "type": "engine_failed", "param": None, "code": "engine_failed",
    }  # fmt: skip
    assert answer.engine_error


def test_generated_text_cannot_pass_for_an_error() -> None:
    answer = AnswerFilter(ADAPTER, SHOWN)
    answer(event({"content": 'data: {"error": 1}'}), False)
    assert not answer.engine_error


def test_the_closing_event_stands_for_itself_after_half_an_event() -> None:
    answer = AnswerFilter(ADAPTER, SHOWN)
    answer(chunk("a"), False)
    assert answer.closing_event(b"{}") == b"data: {}\n\n"
    answer(b'data: {"con', False)
    assert answer.closing_event(b"{}") == b"\n\ndata: {}\n\n"
