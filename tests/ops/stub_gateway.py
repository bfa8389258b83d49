"""A gateway of canned answers, to see what the command sends and how it tells what comes back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Asked:
    """One request as it came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class StubGateway:
    """``answers`` maps "METHOD path", with the query or without, to (status, body): bytes are sent as they are,
    all else as JSON."""

    answers: dict[str, tuple[int, Any]]
    url: str = ""
    asked: list[Asked] = field(default_factory=list)


@contextmanager
def stub_gateway(answers: dict[str, tuple[int, Any]]) -> Iterator[StubGateway]:
    stub = StubGateway(answers)

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            stub.asked.append(Asked(self.command, self.path, dict(self.headers), body))
            path = self.path.partition("?")[0]
            absent = 404, error("not_found", f"no {path}")
            whole, bare = f"{self.command} {self.path}", f"{self.command} {path}"
            status, document = stub.answers.get(whole) or stub.answers.get(bare, absent)
            data = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if status in {429, 503}:
                self.send_header("Retry-After", "7")
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815 - http.server's names

        def log_message(self, *_: object) -> None:
            """Keep the tests' output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def error(code: str, message: str) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": code, "param": None, "code": code}}
