"""What nodes hold is told to the registrar."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from gateway.holdings import InUseReports, held_digests
from gateway.nodes import NodeTable
from gateway.workers import Workers
from wire.node import Residency
from wire.registrar import ReportInUse

from .mesh import Mesh, until

ONE, OTHER = "1" * 64, "2" * 64


async def test_many_digests_come_in_parts_and_a_silent_node_makes_the_report_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.holdings._DIGESTS_A_PART", 2)
    held = tuple(f"{number:064x}" for number in range(5))
    node = NodeTable(["a"])["a"]
    node.resident = dict.fromkeys(held, Residency.SERVING)
    told: list[ReportInUse] = []
    enough = asyncio.Event()

    class Registrar:
        async def run(self, report: ReportInUse) -> None:
            told.append(report)
            if len(told) == 3:
                node.heard = True
            if len(told) == 6:
                enough.set()
                await asyncio.Event().wait()

    workers = Workers(1, "scan")
    reports = InUseReports(Registrar(), [node], workers, gateway="g0", every_s=0.0)  # type: ignore[arg-type]
    reporting = asyncio.create_task(reports.run())
    await asyncio.wait_for(enough.wait(), 10)
    reporting.cancel()
    workers.close()
    assert [(report.part, report.parts) for report in told] == [(0, 3), (1, 3), (2, 3)] * 2
    assert [report.complete for report in told] == [False] * 3 + [True] * 3
    assert sum((report.digests for report in told[:3]), ()) == held


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
