"""A bulk import of JSON lines into a registrar that serves meanwhile, declared facts and one revision a policy."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from catalog.bulk import BATCH, OnlineImporter, import_all, read_lines
from catalog.client import RegistrarClient
from wire.registrar import AddBase

from .filled import BASE, FINGERPRINT, facts, policy_name
from .registrar import RegistrarProcess


async def measure(folder: Path, policies: int) -> dict[str, Any]:
    """Seconds from the first line read to the last batch acknowledged, and the bytes of file that it came to."""
    lines = folder / "import.jsonl"
    batches: list[float] = []
    with RegistrarProcess(folder) as registrar, closing(RegistrarClient(registrar.endpoint)) as client:
        await client.run(AddBase(name=BASE, fingerprint=FINGERPRINT, path="/models/tiny", config=b"{}"))
        write_lines(lines, policies)
        begun = time.perf_counter()
        with lines.open("rb") as file:
            totals = await import_all(
                read_lines(file, _never), OnlineImporter(client), actor="loadtest", external=True,
                done=lambda count, at: batches.append(time.perf_counter() - begun),
            )  # fmt: skip
        seconds = time.perf_counter() - begun
        file_bytes = (registrar.catalog_dir / "data.mdb").stat().st_size
    if totals.published != policies:
        raise RuntimeError(f"{totals.published} of {policies} policies were published")
    return {
        "policies": policies, "seconds": seconds, "file_bytes": file_bytes, "batch": BATCH,
        "acknowledged_s": [round(at, 3) for at in batches],
    }  # fmt: skip


def write_lines(file: Path, policies: int) -> None:
    """A file to import: each policy with one revision."""
    encode = msgspec.json.Encoder().encode
    provenance = {"source": "loadtest", "format": "peft"}
    with file.open("wb") as out:
        for number in range(policies):
            line = {
                "policy": policy_name(number), "base": BASE, "revision": 1, "artifact": facts(number, 1),
                "provenance": provenance,
            }  # fmt: skip
            out.write(encode(line) + b"\n")


def _never(digest: str) -> NoReturn:
    raise RuntimeError(f"the lines declare their facts, but {digest} came without")
