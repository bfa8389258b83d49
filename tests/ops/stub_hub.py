"""A model hub on loopback: what the hub's own client asks of the real one when it fetches a file."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LATER = "fedcba9876543210fedcba9876543210fedcba98"


@dataclass
class StubHub:
    """``files`` maps (repository, file) to bytes. ``refused`` maps a repository to (status, X-Error-Code).

    The branch ``main`` is at COMMIT; ``moves`` makes it go on once the first file was looked at. ``announced`` is
    what a file's size is said to be; the next ``cuts`` downloads of weights break off in the middle.
    """

    files: dict[tuple[str, str], bytes]
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    announced: dict[str, int] = field(default_factory=dict)
    moves: bool = False
    cuts: int = 0
    url: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)

    def commit_of(self, revision: str) -> str | None:
        if revision == "main":
            return LATER if self.moves and self.asked[1:] else COMMIT
        return {"v1": COMMIT, COMMIT: COMMIT, LATER: LATER}.get(revision)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: StubHub, *connection: Any) -> None:
        self.hub = hub
        # which answers the requests, and returns at the end of the connection
        super().__init__(*connection)

    def answer(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.hub.asked.append((self.command, path))
        self.hub.tokens.add(self.headers.get("Authorization", ""))
        repo, _, rest = path.strip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        if repo in self.hub.refused:
            return self.refuse(*self.hub.refused[repo])
        commit = self.hub.commit_of(revision)
        if not any(repo == known for known, _ in self.hub.files):
            return self.refuse(404, "RepoNotFound")
        if commit is None:
            return self.refuse(404, "RevisionNotFound")
        if (repo, name) not in self.hub.files:
            return self.refuse(404, "EntryNotFound", commit)
        return self.give(name, self.hub.files[repo, name], commit)

    do_GET = do_HEAD = answer  # noqa: N815 - http.server's names

    def give(self, name: str, content: bytes, commit: str) -> None:
        size = self.hub.announced.get(name, len(content)) if self.command == "HEAD" else len(content)
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(size - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.end_headers()
        if self.command == "GET":
            rest = content[start:]
            if self.hub.cuts and name.endswith(".safetensors"):
                self.hub.cuts -= 1
                self.wfile.write(rest[: len(rest) // 2])
                self.close_connection = True
            else:
                self.wfile.write(rest)

    def refuse(self, status: int, code: str, commit: str = "") -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        if commit:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep the tests' output clean."""


@contextmanager
def stub_hub(files: dict[tuple[str, str], bytes]) -> Iterator[StubHub]:
    hub = StubHub(files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
