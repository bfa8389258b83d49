"""Acknowledged commits a second of 64 publishers: in batches, and with a commit and an fsync for each.

Both are measured on the disk itself and on a stand-in for a slower one, and one publisher alone beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from catalog.blobs import BlobStore
from catalog.client import RegistrarClient
from catalog.view import CatalogView
from wire.events import ArtifactFacts
from wire.registrar import AddBase, PublishRevision

from ..report import percentile
from .filled import BASE, FINGERPRINT
from .registrar import RegistrarProcess
from .slow_disk import COMMIT_S

PUBLISHERS = 64
_BATCH_MAX = 512
_FSYNCS = 300
_SLOW = "loadtest.catalog.slow_disk"


class _Kind(NamedTuple):
    """A way to publish: ``each`` of so many publishers, to a registrar that puts ``batch_max`` into a commit."""

    publishers: int
    each: int
    batch_max: int
    program: str = "catalog"


# those whose rates are divided by each other take turns
KINDS = {
    "alone": _Kind(1, 300, _BATCH_MAX),
    "single": _Kind(PUBLISHERS, 15, 1),
    "concurrent": _Kind(PUBLISHERS, 150, _BATCH_MAX),
    "slow_single": _Kind(PUBLISHERS, 3, 1, _SLOW),
    "slow_concurrent": _Kind(PUBLISHERS, 50, _BATCH_MAX, _SLOW),
}

STAND_IN = {"slow_commit_s": COMMIT_S, "figures": "those that begin with slow_"}
"""What of this is not real: the disk of the kinds that are called slow."""


async def measure(folder: Path, *, rounds: int) -> dict[str, Any]:
    """Commits a second of each kind, a round each in turn, and the milliseconds of every commit.

    Raises RuntimeError where an acknowledged publish is not in the catalog afterwards.
    """
    found: dict[str, Any] = {f"{kind}_{figure}": [] for kind in KINDS for figure in ("per_s", "ms")}
    with contextlib.ExitStack() as stack:
        servers = {kind: await _start(stack, folder / kind, how) for kind, how in KINDS.items()}
        for turn in range(rounds + 1):
            for kind, (_, client, artifacts) in servers.items():
                begun = time.perf_counter()
                workers = [
                    _publish(client, f"load/p{turn}-{number}", artifacts, KINDS[kind].each)
                    for number in range(KINDS[kind].publishers)
                ]
                times = [one for worker in await asyncio.gather(*workers) for one in worker]
                rate = len(times) / (time.perf_counter() - begun)
                # the first round warms up
                if turn:
                    found[f"{kind}_per_s"].append(round(rate, 1))
                    found[f"{kind}_ms"] += [round(one * 1000, 3) for one in times]
        for kind, (registrar, _, _) in servers.items():
            _check(registrar.catalog_dir, rounds + 1, KINDS[kind])
    found["fsync_ms"] = _fsyncs(folder / "fsync")
    return found


def summary(samples: dict[str, Any]) -> dict[str, Any]:
    """Rates of 64 publishers in batches over those of as many with an fsync for each commit, a round with a round."""
    found: dict[str, Any] = {}
    for disk in ("", "slow_"):
        pairs = zip(samples[f"{disk}concurrent_per_s"], samples[f"{disk}single_per_s"], strict=True)
        found[f"{disk}group_commit_over_single"] = round(statistics.median(many / one for many, one in pairs), 2)
        found[f"{disk}commit_p99_ms"] = round(percentile(samples[f"{disk}concurrent_ms"], 0.99), 2)
    pairs = zip(samples["concurrent_per_s"], samples["alone_per_s"], strict=True)
    found["group_commit_over_alone"] = round(statistics.median(many / one for many, one in pairs), 2)
    found["fsync_p50_ms"] = percentile(samples["fsync_ms"], 0.5)
    for kind in KINDS:
        found[f"{kind}_commits_per_s"] = round(statistics.median(samples[f"{kind}_per_s"]), 1)
    return found


async def _start(
    stack: contextlib.ExitStack, folder: Path, how: _Kind
) -> tuple[RegistrarProcess, RegistrarClient, list[ArtifactFacts]]:
    registrar = stack.enter_context(RegistrarProcess(folder, batch_max=how.batch_max, program=how.program))
    client = stack.enter_context(closing(RegistrarClient(registrar.endpoint)))
    await client.run(AddBase(name=BASE, fingerprint=FINGERPRINT, path="/models/tiny", config=b"{}"))
    return registrar, client, _upload(BlobStore(registrar.store_dir))


async def _publish(client: RegistrarClient, policy: str, artifacts: list[ArtifactFacts], count: int) -> list[float]:
    """Publish one revision after another; seconds until each was acknowledged."""
    times = []
    for number in range(count):
        command = PublishRevision(
            actor="loadtest", policy=policy, artifact=artifacts[number % len(artifacts)], create_over=BASE
        )
        begun = time.perf_counter()
        await client.run(command, timeout_s=60.0)
        times.append(time.perf_counter() - begun)
    return times


def _fsyncs(file: Path) -> list[float]:
    """What the disk itself takes to make a page durable, in milliseconds."""
    times = []
    with file.open("wb", buffering=0) as out:
        for _ in range(_FSYNCS):
            out.write(bytes(4096))
            begun = time.perf_counter()
            os.fdatasync(out.fileno())
            times.append(round((time.perf_counter() - begun) * 1000, 3))
    return times


def _upload(store: BlobStore) -> list[ArtifactFacts]:
    found = []
    for content in (b"one", b"two"):
        with store.writer() as writer:
            writer.write(content)
            stored = writer.commit()
        found.append(ArtifactFacts(stored.digest, stored.size, 8, ("q", "v"), "bf16", 4, 1024))
    return found


def _check(catalog_dir: Path, turns: int, kind: _Kind) -> None:
    published = turns * kind.publishers * kind.each
    with closing(CatalogView.open(catalog_dir)) as view:
        records = [view.policy(f"load/p{turn}-{number}") for turn in range(turns) for number in range(kind.publishers)]
    kept = sum(record.latest for record in records if record is not None)
    if kept != published:
        raise RuntimeError(f"{published} publishes were acknowledged, and {kept} are in the catalog")
