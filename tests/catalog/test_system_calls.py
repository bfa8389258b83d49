"""The order of system calls: a killed process can't show that an acknowledgement came after the fsync. A tracer can.

Needs strace, which is a package of every distribution.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.catalog.harness import BASE, add_base, upload
from tests.catalog.processes import ROOT, RegistrarProcess
from wire.registrar import PublishRevision

WRITE_BLOB = """
import sys
from pathlib import Path
from catalog.blobs import BlobStore
with BlobStore(Path(sys.argv[1])).writer() as writer:
    writer.write(b"the bytes of an adapter")
    print(f"stored {writer.commit().digest}", flush=True)
"""


def strace(output: Path) -> list[str]:
    """The tracer's command line. ``-yy`` names the file behind each descriptor."""
    tracer = shutil.which("strace")
    assert tracer is not None, "these tests need strace: install the package of that name (apt-get install strace)"
    calls = "openat,write,pwrite64,pwritev,fsync,fdatasync,rename,renameat,renameat2,send,sendto,sendmsg,recvfrom"
    return [tracer, "-f", "-yy", "-s", "400", "-e", f"trace={calls}", "-o", str(output)]


def joined(trace: str) -> list[str]:
    """The calls in the order in which they returned: what one thread's interrupts of another, put together."""
    begun: dict[str, str] = {}
    calls = []
    for line in trace.splitlines():
        thread, _, rest = line.partition(" ")
        rest = rest.strip()
        if rest.endswith("<unfinished ...>"):
            begun[thread] = rest.removesuffix("<unfinished ...>").strip()
        elif resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", rest):
            calls.append(begun.pop(thread) + resumed[1])
        else:
            calls.append(rest)
    return calls


def place(calls: list[str], wanted: Callable[[str], bool], start: int = 0) -> int:
    """Where the first such call is, from ``start`` on."""
    for index in range(start, len(calls)):
        if wanted(calls[index]):
            return index
    raise AssertionError("no such call after\n" + "\n".join(calls[max(0, start - 3) : start + 60]))


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="roost-") as name:
        yield Path(name)


async def publish_once(registrar: RegistrarProcess) -> None:
    client = registrar.client()
    await client.run(add_base())
    facts = upload(registrar.store, b"one")
    answer = await client.run(PublishRevision(policy="acme/a", artifact=facts, create_over=BASE))
    assert answer.revision == 1
    client.close()


def test_an_acknowledged_publish_was_fsynced_before_its_acknowledgement(folder: Path) -> None:
    trace = folder / "trace"
    registrar = RegistrarProcess(folder, prefix=strace(trace))
    registrar.start()
    try:
        asyncio.run(publish_once(registrar))
        assert registrar.terminate() == 0
    finally:
        registrar.close()
    calls = joined(trace.read_text())
    of_data = re.compile(r"\w+\(\d+<[^>]*/catalog/data\.mdb>")
    asked = place(calls, lambda call: call.startswith("recvfrom") and "PublishRevision" in call)
    pages = place(calls, lambda call: call.startswith("pwrite") and of_data.match(call) is not None, asked)
    synced = place(calls, lambda call: call.startswith("fdatasync") and of_data.match(call) is not None, pages)
    # the page that makes the commit visible is written where every write is durable before it returns
    meta = durable_descriptor(calls)
    visible = place(calls, lambda call: call.startswith(f"pwrite64({meta}<"), synced)
    answered = place(calls, lambda call: call.startswith("send") and "Committed" in call, asked)
    assert asked < pages < synced < visible < answered
    assert not any(" = -1 " in calls[index] for index in (pages, synced, visible))


def durable_descriptor(calls: list[str]) -> str:
    """The number under which LMDB opened its file with O_DSYNC."""
    opened = next(call for call in calls if call.startswith("openat") and "data.mdb" in call and "O_DSYNC" in call)
    number = re.search(r"= (\d+)<", opened)
    assert number is not None, opened
    return number[1]


def test_a_blob_is_named_only_after_its_bytes_are_durable(folder: Path) -> None:
    trace = folder / "trace"
    store = folder / "store"
    command = [*strace(trace), sys.executable, "-c", WRITE_BLOB, str(store)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    calls = joined(trace.read_text())
    written = place(calls, lambda call: call.startswith("write") and "the bytes of an adapter" in call)
    synced = place(calls, lambda call: call.startswith("fsync") and "/store/partial/" in call, written)
    renamed = place(calls, lambda call: call.startswith("rename") and "/store/blobs/" in call, synced)
    durable = place(calls, lambda call: call.startswith("fsync") and "/store/blobs/" in call, renamed)
    told = place(calls, lambda call: call.startswith("write") and "stored " in call, durable)
    assert written < synced < renamed < durable < told
