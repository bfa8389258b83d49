"""What a lease costs: the round trip from a gateway's socket to a sidecar and back, for a revision that is serving."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from catalog.names import parse_reference
from catalog.view import CatalogView, Resolution
from ops.layout import Layout
from wire.node import Acquire, AnswerOfNode, AskOfNode, Granted, Release
from wire.requester import Requester

from .deployment import StubbedMesh
from .report import environment, percentile, write_report

POLICY = "bench/hot"
_GATEWAY = "bench"
_STAND_IN = {"engine": "loadtest.stub_engine: the adapter is in a slot that no model reads"}


def run(file: Path, *, small: bool, seed: int) -> dict[str, Any]:
    """Measure and write the report; returns the summary."""
    with tempfile.TemporaryDirectory(prefix="roost-loadtest-") as scratch, StubbedMesh(Path(scratch) / "mesh") as mesh:
        mesh.publish(POLICY, seed)
        layout = Layout.of(str(mesh.state))
        resolution = CatalogView.open(layout.catalog).resolve(parse_reference(POLICY))
        samples = uvloop.run(_measure(layout.socket("node"), resolution, 5_000 if small else 50_000))
    summary = {"lease_p50_us": percentile(samples, 0.5), "lease_p99_us": percentile(samples, 0.99)}
    summary = {name: round(value, 1) for name, value in summary.items()}
    found = environment(seed=seed, engine="stub", stand_in=_STAND_IN)
    write_report(file, found, {"lease_us": [round(one, 1) for one in samples]}, summary)
    return summary


class LeaseClient:
    """Asks a node's socket for leases, as a gateway does."""

    def __init__(self, endpoint: str) -> None:
        self._requester: Requester[AskOfNode, AnswerOfNode] = Requester(endpoint, AskOfNode, AnswerOfNode)
        self._asked = 0

    async def acquire(self, resolution: Resolution, timeout_s: float = 30.0) -> int:
        """The lease's number. Raises RuntimeError where it is not granted."""
        self._asked += 1
        number = self._asked
        ask = Acquire(
            gateway=_GATEWAY, instance="1", lease=number, base=resolution.base, tenant=resolution.tenant,
            policy=resolution.policy, digest=resolution.digest, size=resolution.size, rank=resolution.rank,
        )  # fmt: skip
        answer = await self._requester.request(ask, timeout_s=timeout_s)
        if not isinstance(answer, Granted):
            raise RuntimeError(f"no lease: {answer}")
        return number

    def release(self, *leases: int) -> None:
        self._requester.send(Release(gateway=_GATEWAY, instance="1", leases=leases))

    def close(self) -> None:
        self._requester.close()


async def _measure(endpoint: str, resolution: Resolution, rounds: int) -> list[float]:
    """Acquire and release, one after another; microseconds of each acquire."""
    client = LeaseClient(endpoint)
    samples: list[float] = []
    for number in range(rounds + 100):
        begun = time.perf_counter()
        lease = await client.acquire(resolution)
        if number >= 100:
            samples.append((time.perf_counter() - begun) * 1e6)
        client.release(lease)
    client.close()
    return samples
