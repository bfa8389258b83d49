"""The gateway's HTTP API as commands use it: plain blocking calls from the standard library."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from wire.outcomes import InvalidRequest, Outcome, RoostError, error_for

from .output import Unreachable

TIMEOUT_S = 120.0
# as many as the gateway lists at once
PAGE = 1000
MAX_ANSWER_BYTES = 256 << 20
MAX_LINE_BYTES = 16 << 20
UPLOAD_CHUNK_BYTES = 1 << 20
POLICIES = "/roost/v1/policies"


class ApiClient:
    """Talks to the gateway at ``url`` (http or https), as the holder of ``key`` where there is one."""

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise InvalidRequest(f"--url {url!r}: expected http://host:port", field="url")
        self.url = url.rstrip("/")
        self.key = key
        self._host, self._port, self._secure = parts.hostname, parts.port, parts.scheme == "https"
        self._root = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def call(
        self, method: str, path: str, body: object | None = None, *, query: Mapping[str, object] | None = None
    ) -> Any:
        """The JSON answer. Raises the RoostError that the gateway told, or Unreachable."""
        encoded = None if body is None else json.dumps(body).encode()
        target = path + (f"?{urlencode(query, doseq=True)}" if query else "")
        with self._answer(method, target, encoded, {"Content-Type": "application/json"}) as answer:
            return _decoded(answer.read(MAX_ANSWER_BYTES))

    def call_pages(self, path: str, items: str, query: Mapping[str, object] | None = None) -> Any:
        """The first page of a list with the ``items`` of all pages. Raises as ``call`` does."""
        first = page = self.call("GET", path, query=query)
        while page["has_more"]:
            page = self.call("GET", path, query={**(query or {}), "after": page["after"], "limit": PAGE})
            first[items] += page[items]
        return first | {"has_more": False}

    def upload(self, path: str, file: Path, progress: Callable[[int], None]) -> Any:
        """PUT a file; ``progress`` gets the number of bytes of each chunk sent."""
        size = file.stat().st_size
        with file.open("rb") as source:
            chunks = _chunks(source, progress)
            with self._answer("PUT", path, chunks, {"Content-Length": str(size)}) as answer:
                return _decoded(answer.read(MAX_ANSWER_BYTES))

    def stream(self, path: str, body: object) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer as they come. Raises as ``call`` does, in the middle too."""
        encoded = json.dumps(body).encode()
        with self._answer("POST", path, encoded, {"Content-Type": "application/json"}) as answer:
            while line := answer.readline(MAX_LINE_BYTES):
                data = line.strip().removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    event = _decoded(data)
                    if "error" in event:
                        raise _told(event, 502, None)
                    yield event

    @contextmanager
    def _answer(
        self, method: str, path: str, body: bytes | Iterator[bytes] | None, headers: dict[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connect()
        try:
            connection.request(method, self._root + path, body=body, headers={**self._headers, **headers})
            answer = connection.getresponse()
            if answer.status >= 400:
                raise _told(_decoded(answer.read(MAX_ANSWER_BYTES)), answer.status, answer.headers.get("Retry-After"))
            yield answer
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, RoostError):
                raise
            raise Unreachable(
                f"{self.url} does not answer ({_reason(error)}): is the mesh up? see `roost status`, start it with "
                "`roost up`, or name another gateway with --url"
            ) from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)


def policy_path(policy: str, *rest: str) -> str:
    """The path of a policy's resource; the name is checked by the gateway."""
    return "/".join((POLICIES, quote(policy, safe="/"), *(quote(part, safe="") for part in rest)))


def _chunks(source: Any, progress: Callable[[int], None]) -> Iterator[bytes]:
    while chunk := source.read(UPLOAD_CHUNK_BYTES):
        yield chunk
        progress(len(chunk))


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data or b"{}")
    except ValueError:
        raise Unreachable(
            f"what answers is no Roost gateway: expected JSON, got {data[:60]!r}; check --url or ROOST_URL"
        ) from None


def _told(document: Any, status: int, retry_after: str | None) -> RoostError:
    """The error of an answer in OpenAI's form."""
    error = document.get("error") if isinstance(document, dict) else None
    told = error if isinstance(error, dict) else {}
    try:
        outcome = Outcome(told.get("code", ""))
    except ValueError:
        outcome = next((known for known in Outcome if known.http_status == status), Outcome.ENGINE_FAILED)
    message = str(told.get("message") or f"the gateway answered {status}")
    retry_after_s = float(retry_after) if retry_after and retry_after.isdigit() else None
    return error_for(outcome, message, field=told.get("param"), retry_after_s=retry_after_s)


def _reason(error: OSError | http.client.HTTPException) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__
