"""Talking to a model from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from .command import Roost
from .stub_gateway import error, stub_gateway


def chunk(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


def chatting(stream: bytes) -> Any:
    return stub_gateway({"POST /v1/chat/completions": (200, stream)})


def test_chat_streams_an_answer(roost: Roost, tmp_path: Path) -> None:
    with chatting(chunk("Hello, ") + chunk("world") + b"data: [DONE]\n\n") as gateway:
        done = roost("chat", "acme/support:canary", "Hi", "--system", "Be brief", cwd=tmp_path, url=gateway.url)
    assert done.stdout == "Hello, world\n"
    body = gateway.asked[0].json
    assert body["model"] == "acme/support:canary"
    assert body["stream"] is True
    assert body["messages"] == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]


def test_a_terminal_obeys_no_model(roost: Roost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = "a\x1b[2J\x1b]0;title\x07b\r\x9bc\td\n\u00e9"
    with chatting(chunk(written) + b"data: [DONE]\n\n") as gateway:
        piped = roost("chat", "acme/support", "Hi", cwd=tmp_path, url=gateway.url).stdout
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        shown = roost("chat", "acme/support", "Hi", cwd=tmp_path, url=gateway.url).stdout
    assert piped == f"{written}\n"
    assert shown == "a[2J]0;titlebc\td\n\u00e9\n"


def test_a_conversation_remembers_what_was_said(roost: Roost, tmp_path: Path) -> None:
    with chatting(chunk("Yes") + b"data: [DONE]\n\n") as gateway:
        roost("chat", "acme/support", cwd=tmp_path, url=gateway.url, stdin="One?\n\nTwo?\n")
    assert [message["content"] for message in gateway.asked[1].json["messages"]] == ["One?", "Yes", "Two?"]


def test_an_error_in_the_middle_of_a_stream_is_told(roost: Roost, tmp_path: Path) -> None:
    broken = chunk("Hel") + b"data: " + json.dumps(error("engine_failed", "the engine died")).encode() + b"\n\n"
    with chatting(broken) as gateway:
        done = roost("chat", "acme/support", "Hi", cwd=tmp_path, url=gateway.url)
    assert done.returncode == 1
    assert done.stderr == "error: the engine died\n"
