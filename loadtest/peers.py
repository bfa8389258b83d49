"""One new revision, and every node of a fleet asked for it at once: what is read from the store, and when all serve.

The sidecars and what a gateway does for a lease are the real ones, in one process; each round is run once with nodes
that take bytes from each other and once with nodes that don't.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvloop
from msgspec.structs import fields

from backends.interface import EngineLimits, EngineSettings, Health, Installable, Removal
from catalog.artifacts import ArtifactSource, ArtifactStore
from catalog.blobs import BlobStore
from gateway.fleet import Fleet
from gateway.leases import LeaseDesk
from gateway.nodes import NodeTable
from gateway.peers import PeerDirectory
from gateway.placement import Demand
from gateway.settings import NodeAddress
from sidecar.arena import Arena, segment_name
from sidecar.fetch import Fetcher
from sidecar.service import Sidecar, Storage
from sidecar.settings import NodeTuning, SidecarSettings

from .report import environment, write_report

NODES, REVISION_BYTES, STORE_BYTES_S = 8, 64 << 20, 125_000_000
_BASE, _FINGERPRINT = "stub", "stub"
_STEP = 1 << 20
_PEER_TRANSFERS = next(field.default for field in fields(NodeTuning) if field.name == "peer_transfers")
_STAND_IN = {
    "engine": "none: an install ends at once, and reads nothing",
    "store": f"a folder whose readers share {STORE_BYTES_S:,} bytes a second (a network of 1 Gbit/s)",
    "network": "all nodes are in one process of one host, and their bytes go through socket files",
}


def run(file: Path, *, small: bool, seed: int, say: Callable[[str], object] = lambda text: None) -> dict[str, Any]:
    """Measure and write the report; returns the summary."""
    rounds = uvloop.run(_rounds(3 if small else 9, seed, say))
    alone, shared = [one[0] for one in rounds], [one[1] for one in rounds]
    summary = {
        "nodes": NODES,
        "revision_bytes": REVISION_BYTES,
        "store_reads_alone": statistics.median(reads for reads, _ in alone),
        "store_reads_with_peers": statistics.median(reads for reads, _ in shared),
        "most_store_reads_with_peers": max(reads for reads, _ in shared),
        "all_serve_alone_s": round(statistics.median(seconds for _, seconds in alone), 3),
        "all_serve_with_peers_s": round(statistics.median(seconds for _, seconds in shared), 3),
        "speedup": round(statistics.median(one[1] / other[1] for one, other in rounds), 2),
    }
    samples = {"alone": alone, "with_peers": shared, "of_each": ["revisions read from the store", "seconds"]}
    write_report(file, environment(seed=seed, engine="none", stand_in=_STAND_IN), samples, summary)
    return summary


async def _rounds(count: int, seed: int, say: Callable[[str], object]) -> list[tuple[_Round, _Round]]:
    chance = random.Random(seed)
    found = []
    for number in range(count):
        data = chance.randbytes(REVISION_BYTES)
        pair = await _round(data, peer_transfers=0), await _round(data, peer_transfers=_PEER_TRANSFERS)
        say(f"round {number + 1}: {pair[0]} alone, {pair[1]} with peers")
        found.append(pair)
    return found


_Round = tuple[float, float]
"""How often all of the revision was read from the store, and seconds until every node served it."""


async def _round(data: bytes, *, peer_transfers: int, nodes: int = NODES) -> _Round:
    with tempfile.TemporaryDirectory(prefix="roost-") as scratch:
        store = _SlowStore(Path(scratch) / "store", STORE_BYTES_S)
        with store.blobs.writer() as writer:
            writer.write(data)
            digest = writer.commit().digest
        async with AsyncExitStack() as stack:
            sidecars = [
                await stack.enter_async_context(_node(Path(scratch), f"n{number}", store, peer_transfers, len(data)))
                for number in range(nodes)
            ]
            seconds = await _ask_all(sidecars, digest, len(data))
            read = sum(sidecar.machine.state.arrived_bytes["store"] for sidecar in sidecars)
    return read / len(data), seconds


async def _ask_all(sidecars: list[Sidecar], digest: str, size: int) -> float:
    """Have every node serve the revision; seconds until the last one does."""
    table = NodeTable()
    told = [sidecar.machine.state.settings for sidecar in sidecars]
    addresses = [NodeAddress(one.node, one.endpoint, one.feed_endpoint) for one in told]
    fleet = Fleet(addresses, table, gateway="bench", instance="1", curve=None)
    peers = PeerDirectory(table, fleet.address_of, clock=asyncio.get_running_loop().time)
    desk = LeaseDesk(fleet.requesters, gateway="bench", instance="1", peers=peers)
    try:
        while not all(node.heard and _ready(node.engines) for node in table):  # noqa: ASYNC110 - reports are awaited
            await asyncio.sleep(0.01)
        demand = Demand(base=_BASE, fingerprint=_FINGERPRINT, policy="bench/new", tenant="bench", digest=digest, rank=8)
        begun = time.perf_counter()
        await asyncio.gather(*(desk.acquire(node, demand, size=size, timeout_s=60.0, use_s=60.0) for node in table))
        return time.perf_counter() - begun
    finally:
        desk.close()
        fleet.close()


def _ready(engines: dict[str, Any]) -> bool:
    return bool(engines) and all(engine.health is Health.READY for engine in engines.values())


@asynccontextmanager
async def _node(root: Path, name: str, store: _SlowStore, peer_transfers: int, size: int) -> AsyncIterator[Sidecar]:
    folder = root / name
    folder.mkdir()
    engine = EngineSettings(name="e0", base=_BASE, fingerprint=_FINGERPRINT)
    settings = SidecarSettings(
        node=name, endpoint=f"ipc://{folder}/node", feed_endpoint=f"ipc://{folder}/feed",
        bytes_endpoint=f"ipc://{folder}/bytes", store_dir=str(root / "store"), run_dir=str(folder),
        log_dir=str(folder), engines=(engine,), arena_bytes=2 * size, peer_transfers=peer_transfers,
    )  # fmt: skip
    stop = asyncio.Event()
    sidecar = Sidecar(settings, {"e0": _InstantEngine(engine)}, storage=store.storage)
    serving = asyncio.create_task(sidecar.run(stop))
    try:
        yield sidecar
    finally:
        stop.set()
        await serving


class _SlowStore:
    """A folder of artifacts whose readers share a network, with as much of an ``ArtifactStore`` as fetches use."""

    def __init__(self, root: Path, bytes_s: float) -> None:
        self.blobs = BlobStore(root)
        self._bytes_s = bytes_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def storage(self, settings: SidecarSettings) -> Storage:
        arena = Arena(segment_name(settings.node, settings.run_dir), settings.arena_bytes)
        store: ArtifactStore = self  # type: ignore[assignment]
        return Storage(arena, Fetcher(store, arena, workers=2, timeout_s=settings.load_timeout_s))

    @contextmanager
    def open(self, digest: str) -> Iterator[ArtifactSource]:
        with self.blobs.open(digest) as source:
            yield _SlowSource(source, self)

    def wait_for(self, count: int) -> None:
        """Until so many bytes more have come through the network."""
        with self._lock:
            self._free_at = until = max(self._free_at, time.monotonic()) + count / self._bytes_s
        time.sleep(max(0.0, until - time.monotonic()))


class _SlowSource:
    def __init__(self, source: ArtifactSource, store: _SlowStore) -> None:
        self._source = source
        self._store = store
        self.size = source.size

    def fill(self, view: memoryview, given_up: Callable[[], bool]) -> str | None:
        for start in range(0, len(view), _STEP):
            if given_up():
                return None
            self._store.wait_for(min(_STEP, len(view) - start))
        return self._source.fill(view, given_up)


class _InstantEngine:
    """An engine that is ready at once and does nothing."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.detail = ""
        self.pid: int | None = None
        self._adapters: set[str] = set()

    async def start(self) -> None:
        """It runs."""

    async def health(self) -> Health:
        return Health.READY

    async def limits(self) -> EngineLimits:
        return EngineLimits(
            slots=4, max_rank=16, targets=("q",), served_base=_BASE, dtype="float32", removes_for_real=True
        )

    async def install(self, adapter: Installable, timeout_s: float) -> None:
        self._adapters.add(adapter.adapter)

    async def remove(self, adapter: str, timeout_s: float) -> Removal:
        known = adapter in self._adapters
        self._adapters.discard(adapter)
        return Removal.REMOVED if known else Removal.ABSENT

    async def installed(self) -> frozenset[str]:
        return frozenset(self._adapters)

    async def stop(self) -> None:
        """There is no process."""

    async def detach(self) -> None:
        """Nor a connection."""

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def token(self) -> str:
        return ""
