"""A sidecar on real sockets, and a gateway's side of them."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from catalog.blobs import BlobStore
from sidecar.service import Sidecar
from sidecar.settings import SidecarSettings
from wire.node import Acquire, AnswerOfNode, AskOfNode, AskState, NodeDelta, NodeReport, ReportOfNode
from wire.sockets import FeedSubscriber, Requester

from .bench import BASE, settings
from .fake_engine import FakeBackend


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder with a short path: an ``ipc://`` endpoint has room for about 100 characters."""
    with tempfile.TemporaryDirectory(prefix="roost-") as folder:
        yield Path(folder)


class Store:
    """A blob store and revisions in it: bytes of any kind, since only engines look into them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs = BlobStore(root)

    def put(self, data: bytes) -> str:
        with self.blobs.writer() as writer:
            writer.write(data)
            return writer.commit().digest


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


class Gateway:
    """One gateway: asks for leases, and follows the feed."""

    def __init__(self, config: SidecarSettings, name: str = "g1") -> None:
        self.name = name
        self.instance = "i1"
        self.messages: list[tuple[int, ReportOfNode]] = []
        # what the whole suite has imported can hold a process up for longer than a gateway would wait
        self.wire: Requester[AskOfNode, AnswerOfNode] = Requester(
            config.endpoint, AskOfNode, AnswerOfNode, patience_s=30.0
        )
        self._feed: FeedSubscriber[ReportOfNode] = FeedSubscriber(
            config.feed_endpoint,
            ReportOfNode,
            on_message=lambda number, message: self.messages.append((number, message)),
            on_gap=lambda expected, got: None,
        )
        self._leases = itertools.count(1)

    def acquire(self, digest: str, size: int, **changes: object) -> Acquire:
        values: dict[str, object] = {
            "gateway": self.name,
            "instance": self.instance,
            "lease": next(self._leases),
            "base": BASE,
            "tenant": "acme",
            "digest": digest,
            "size": size,
            "rank": 8,
        }
        return Acquire(**{**values, **changes})  # type: ignore[arg-type]

    async def ask(self, digest: str, size: int, *, timeout_s: float = 20.0, **changes: object) -> AnswerOfNode:
        return await self.wire.request(self.acquire(digest, size, **changes), timeout_s=timeout_s)

    async def connect(self) -> None:
        """Wait for an answer: what is sent one way before that may be lost."""
        await self.wire.request(AskState(), timeout_s=10.0)

    def residencies(self, digest: str) -> list[str]:
        """What the feed has said of ``digest``, in order, repetitions left out."""
        told: list[str] = []
        for _, message in self.messages:
            where = (message.resident if isinstance(message, NodeReport) else message.residency).get(digest)
            if where is not None and told[-1:] != [where]:
                told.append(where)
        return told

    def engine_health(self) -> list[str]:
        told: list[str] = []
        for _, message in self.messages:
            for engine in message.engines if isinstance(message, NodeReport | NodeDelta) else ():
                if told[-1:] != [engine.health]:
                    told.append(engine.health)
        return told

    def close(self) -> None:
        self.wire.close()
        self._feed.close()


def config(sockets: Path, store: Store, **changes: object) -> SidecarSettings:
    values: dict[str, object] = {
        "endpoint": f"ipc://{sockets}/node",
        "feed_endpoint": f"ipc://{sockets}/feed",
        "store_dir": str(store.root),
        "run_dir": str(sockets),
        "log_dir": str(sockets),
        "full_state_every_s": 0.5,
    }
    return settings(**{**values, **changes})  # type: ignore[arg-type]


@asynccontextmanager
async def running(config: SidecarSettings, *engines: FakeBackend) -> AsyncIterator[Sidecar]:
    """A sidecar that serves until the block ends."""
    stop = asyncio.Event()
    sidecar = Sidecar(config, {engine.settings.name: engine for engine in engines})
    serving = asyncio.create_task(sidecar.run(stop))
    try:
        await until(lambda: all(engine.ready for engine in sidecar.machine.state.engines.values()))
        yield sidecar
    finally:
        stop.set()
        await serving


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)
