"""What nodes hold is told to the registrar."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from gateway.holdings import InUseReports, held_digests
from wire.node import Residency

from .mesh import Mesh, until

ONE, OTHER = "1" * 64, "2" * 64


async def test_the_registrar_hears_what_nodes_hold(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        gateway = mesh.gateways[0]
        mesh.sidecar.resident[ONE] = Residency.FETCHING
        mesh.sidecar.serving.add(f"acme@{OTHER}")
        mesh.sidecar.announce()
        await until(lambda: ONE in next(iter(gateway.nodes)).resident)
        assert await held_digests(gateway.nodes, gateway._scans) == (ONE, OTHER)
        reports = InUseReports(gateway._registrar, gateway.nodes, gateway._scans, gateway="g0", every_s=0.01)
        reporting = asyncio.create_task(reports.run())
        await until(lambda: mesh.registrar.in_use.digests() == (ONE, OTHER))
        mesh.stop_registrar()
        await asyncio.sleep(0.05)
        assert not reporting.done()
        reporting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reporting
