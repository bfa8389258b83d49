"""What the gateway itself costs on a 1 KB chat request: its CPU a request, and the latency that it adds.

The engine is a stand-in that answers at once, so that nothing else is measured; requests to it directly and through
the gateway take turns within one run.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from .deployment import BASE, StubbedMesh, cpu_seconds, wait_until_answering
from .generator import Generator, post
from .report import environment, percentile, write_report

POLICY = "bench/hot"
CONCURRENCY = 16
RATE = 500.0
_STAND_IN = {"engine": "loadtest.stub_engine: a fixed answer at once; no model runs"}


def run(file: Path, *, small: bool, seed: int) -> dict[str, Any]:
    """Measure and write the report; returns the summary."""
    rounds, burst, paced = (5, 4_000, 1_000) if small else (15, 20_000, 5_000)
    with tempfile.TemporaryDirectory(prefix="roost-loadtest-") as scratch, StubbedMesh(Path(scratch) / "mesh") as mesh:
        mesh.publish(POLICY, seed)
        wait_until_answering(mesh.port)
        samples = uvloop.run(_measure(mesh, mesh.pid("gateway"), rounds, burst, paced))
    summary, left_out = _summary(samples)
    where = environment(seed=seed, engine="stub", stand_in=_STAND_IN) | {"left_out": left_out}
    write_report(file, where, samples, summary)
    return summary


async def _measure(mesh: StubbedMesh, gateway_pid: int, rounds: int, burst: int, paced: int) -> dict[str, Any]:
    through = Generator("127.0.0.1", mesh.port)
    direct = Generator("127.0.0.1", mesh.engine_port)
    ours, bare = post("/v1/chat/completions", _body(POLICY)), post("/v1/chat/completions", _body(BASE))
    await through.run_closed([ours] * 500, CONCURRENCY)
    cpu_us: list[float] = []
    latency: dict[str, list[float]] = {"gateway_ms": [], "direct_ms": []}
    for _ in range(rounds):
        before = cpu_seconds(gateway_pid)
        answered = await through.run_closed([ours] * burst, CONCURRENCY)
        cpu_us.append((cpu_seconds(gateway_pid) - before) / burst * 1e6)
        _check(answered)
        for name, generator, request in (("direct_ms", direct, bare), ("gateway_ms", through, ours)):
            answered = await generator.run([request] * paced, RATE)
            _check(answered)
            latency[name] += [(one.done - one.intended) * 1e3 for one in answered]
    through.close()
    direct.close()
    return {"cpu_us_per_request": cpu_us, **latency}


def _check(answered: list[Any]) -> None:
    failed = [one.status for one in answered if one.status != 200]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(answered)} requests failed, the first with status {failed[0]}")


def _summary(samples: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The figures, and why others are none: a gateway that seems to make requests faster was lost in the noise."""
    cpu = percentile(samples["cpu_us_per_request"], 0.5)
    found = {"cpu_us_per_request": round(cpu, 1), "requests_per_s_per_core": round(1e6 / cpu)}
    left_out = {}
    for share in (50, 99):
        added = percentile(samples["gateway_ms"], share / 100) - percentile(samples["direct_ms"], share / 100)
        if added < 0:
            left_out[f"added_p{share}_ms"] = f"{added:.4f}: below the noise of this machine, which made it negative"
        else:
            found[f"added_p{share}_ms"] = round(added, 4)
    return found, left_out


def _body(model: str) -> bytes:
    """A chat request of 1 KB."""
    message = {"role": "user", "content": ""}
    asked = {"model": model, "messages": [message], "max_tokens": 64, "temperature": 0}
    message["content"] = "x" * (1024 - len(msgspec.json.encode(asked)))
    return msgspec.json.encode(asked)
