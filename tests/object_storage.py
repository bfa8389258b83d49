"""A real server that speaks S3, and a proxy before it that makes the network and the server misbehave."""

from __future__ import annotations

import http.client
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import boto3

REGION = "us-east-1"
SECRET = "not-to-be-seen-anywhere"
START_S = 60.0
_HOP_HEADERS = {"connection", "transfer-encoding", "content-length", "keep-alive"}


class ObjectServer:
    """moto's server in a process of its own, on loopback."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._buckets = 0
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, "the S3 server ended"
            assert time.monotonic() < deadline, "the S3 server did not start"
            time.sleep(0.05)
        self.client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id="tests",
            aws_secret_access_key=SECRET,
        )

    def new_bucket(self) -> str:
        self._buckets += 1
        name = f"bucket-{self._buckets}"
        self.client.create_bucket(Bucket=name)
        return name

    def keys(self, bucket: str) -> dict[str, int]:
        """Every object of the bucket and its size."""
        listed = self.client.list_objects_v2(Bucket=bucket).get("Contents", [])
        return {entry["Key"]: entry["Size"] for entry in listed}

    def unfinished(self, bucket: str) -> list[str]:
        """The keys of multipart uploads that were neither completed nor aborted."""
        return [entry["Key"] for entry in self.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(START_S)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint, timeout=1.0):
                return True
        except OSError:
            return False


class Seen(NamedTuple):
    """A request that came to the proxy."""

    method: str
    path: str
    headers: dict[str, str]


class Reply(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


Fault = Callable[["Handler", Callable[[], Reply]], None]


class Rule(NamedTuple):
    match: Callable[[Seen], bool]
    fault: Fault
    left: list[int]


class FaultyProxy(ThreadingHTTPServer):
    """Forwards to ``port``; ``inject`` says what goes wrong on the way."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream = port
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.seen: list[Seen] = []
        self.rules: list[Rule] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def inject(
        self, fault: Fault, *, method: str = "", path: str = "", copy: bool | None = None, times: int = 1_000_000
    ) -> None:
        """``fault`` happens to the next ``times`` requests that fit. ``copy``: only (or no) copies within the store."""

        def match(seen: Seen) -> bool:
            copies = "x-amz-copy-source" in seen.headers
            return seen.method in (method or seen.method) and re.search(path, seen.path) is not None and (
                copy is None or copy == copies
            )  # fmt: skip

        self.rules.append(Rule(match, fault, [times]))

    def heal(self) -> None:
        self.rules.clear()
        self.seen.clear()

    def count(self, method: str, path: str = "") -> int:
        return sum(seen.method == method and re.search(path, seen.path) is not None for seen in list(self.seen))

    def fault_for(self, seen: Seen) -> Fault | None:
        for rule in list(self.rules):
            if rule.left[0] > 0 and rule.match(seen):
                rule.left[0] -= 1
                return rule.fault
        return None

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections that are cut are what this is for."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        seen = Seen(self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
        self.server.seen.append(seen)
        fault = self.server.fault_for(seen)
        if fault is None:
            self.give(self.ask(body))
        else:
            fault(self, lambda: self.ask(body))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on  # noqa: N815

    def ask(self, body: bytes) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=60.0)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_HEADERS}
            headers["Content-Length"] = str(len(body))
            connection.request(self.command, self.path, body=body, headers=headers)
            answer = connection.getresponse()
            return Reply(answer.status, answer.getheaders(), answer.read())
        finally:
            connection.close()

    def give(self, reply: Reply, *, only: int | None = None) -> None:
        """Send the reply, or its head and the first ``only`` bytes, and then cut the connection."""
        length = str(len(reply.body))
        if self.command == "HEAD":
            length = next((value for name, value in reply.headers if name.lower() == "content-length"), "0")
        self.send_response(reply.status)
        for name, value in reply.headers:
            if name.lower() not in _HOP_HEADERS | {"date", "server"}:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body[:only])
        if only is not None:
            self.cut()

    def cut(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing on standard error."""


def answer(status: int, code: str) -> Fault:
    """The server answers with an error of S3's."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
    return lambda handler, _: handler.give(Reply(status, [("Content-Type", "application/xml")], body))


def cut(after: int = 0) -> Fault:
    """The connection ends after ``after`` bytes of the body."""
    return lambda handler, ask: handler.give(ask(), only=after)


def dropped() -> Fault:
    """The connection ends before the server has heard of it."""
    return lambda handler, _: handler.cut()


def unheard() -> Fault:
    """The server does what was asked, and the connection ends before it can say so."""

    def fault(handler: Handler, ask: Callable[[], Reply]) -> None:
        ask()
        handler.cut()

    return fault


def delay(seconds: float) -> Fault:
    def fault(handler: Handler, ask: Callable[[], Reply]) -> None:
        time.sleep(seconds)
        handler.give(ask())

    return fault


def corrupt() -> Fault:
    """One bit of the body comes out wrong."""

    def fault(handler: Handler, ask: Callable[[], Reply]) -> None:
        reply = ask()
        middle = len(reply.body) // 2
        wrong = bytes([reply.body[middle] ^ 1])
        handler.give(reply._replace(body=reply.body[:middle] + wrong + reply.body[middle + 1 :]))

    return fault


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    server = ObjectServer()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def faulty_proxy(server: ObjectServer) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(server.port)
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
