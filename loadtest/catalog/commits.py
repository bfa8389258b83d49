"""Acknowledged commits a second: by one publisher, so that each has an fsync of its own, and by 64 at once."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from catalog.blobs import BlobStore
from catalog.client import RegistrarClient
from catalog.view import CatalogView
from wire.events import ArtifactFacts
from wire.registrar import AddBase, PublishRevision

from .filled import BASE, FINGERPRINT
from .registrar import RegistrarProcess

PUBLISHERS = 64
_SINGLE = 300
_EACH = 150


async def measure(folder: Path, *, rounds: int) -> dict[str, Any]:
    """Commits a second of both kinds, a round each in turn, and the milliseconds of every one.

    Raises RuntimeError where an acknowledged publish is not in the catalog afterwards.
    """
    found: dict[str, Any] = {"single_per_s": [], "concurrent_per_s": [], "single_ms": [], "concurrent_ms": []}
    with RegistrarProcess(folder) as registrar, closing(RegistrarClient(registrar.endpoint)) as client:
        await client.run(AddBase(name=BASE, fingerprint=FINGERPRINT, path="/models/tiny", config=b"{}"))
        artifacts = _upload(BlobStore(registrar.store_dir))
        published = 0
        for turn in range(rounds + 1):
            for kind, publishers, each in (("single", 1, _SINGLE), ("concurrent", PUBLISHERS, _EACH)):
                begun = time.perf_counter()
                workers = [
                    _publish(client, f"{kind}/p{turn}-{number}", artifacts, each) for number in range(publishers)
                ]
                times = [one for worker in await asyncio.gather(*workers) for one in worker]
                rate = len(times) / (time.perf_counter() - begun)
                published += len(times)
                # the first round warms up
                if turn:
                    found[f"{kind}_per_s"].append(round(rate, 1))
                    found[f"{kind}_ms"] += [round(one * 1000, 3) for one in times]
        _check(registrar.catalog_dir, rounds + 1, published)
    return found


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


def _upload(store: BlobStore) -> list[ArtifactFacts]:
    found = []
    for content in (b"one", b"two"):
        with store.writer() as writer:
            writer.write(content)
            stored = writer.commit()
        found.append(ArtifactFacts(stored.digest, stored.size, 8, ("q", "v"), "bf16", 4, 1024))
    return found


def _check(catalog_dir: Path, turns: int, published: int) -> None:
    view = CatalogView.open(catalog_dir)
    kept = 0
    for turn in range(turns):
        for kind, publishers in (("single", 1), ("concurrent", PUBLISHERS)):
            records = [view.policy(f"{kind}/p{turn}-{number}") for number in range(publishers)]
            kept += sum(record.latest for record in records if record is not None)
    view.close()
    if kept != published:
        raise RuntimeError(f"{published} publishes were acknowledged, and {kept} are in the catalog")
