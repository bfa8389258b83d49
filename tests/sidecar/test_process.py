"""The process itself: started, killed, started again, told to stop; its engine never notices."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from backends.interface import EngineSettings
from catalog.artifacts import StoreLocation
from catalog.names import adapter_name
from catalog.objects.store import ObjectStore
from sidecar.arena import segment_name
from sidecar.settings import SidecarSettings
from tests.backends.fake import serving
from tests.object_storage import REGION, FaultyProxy, ObjectServer, answer
from tests.packer.adapters import config_for, packed, shape_of, tensors_for, write_folder
from tests.sidecar.bench import BASE
from tests.sidecar.conftest import Gateway, Store, config, running, until
from tests.sidecar.fake_engine import FakeBackend, FakeVllm
from wire.node import Granted, Refused, Residency
from wire.outcomes import Outcome, RoostError
from wire.peers import Peer

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def process(settings: SidecarSettings, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    path = folder / "sidecar.json"
    path.write_bytes(msgspec.json.encode(settings))
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", "sidecar", "--settings", str(path), cwd=ROOT)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def granted(gateway: Gateway, digest: str, size: int) -> Granted:
    """Ask until there is a lease: a sidecar that starts has no engine ready yet."""
    async with asyncio.timeout(30.0):
        while True:
            try:
                answer = await gateway.ask(digest, size, timeout_s=5.0)
            except RoostError:
                await asyncio.sleep(0.05)
                continue
            if isinstance(answer, Granted):
                return answer
            assert isinstance(answer, Refused)
            assert answer.outcome is Outcome.NO_HEALTHY_NODE, answer
            await asyncio.sleep(0.05)


async def test_killed_sidecar_comes_back_and_adopts_its_engine(sockets: Path, store: Store, tmp_path: Path) -> None:
    shape = shape_of()
    data = packed(write_folder(tmp_path / "peft", tensors_for(shape), config_for()), shape)
    digest = store.put(data)
    vllm = FakeVllm(BASE)
    async with serving(vllm) as port:
        engine = EngineSettings(name="e1", base=BASE, fingerprint="f", attach=f"127.0.0.1:{port}")
        settings = config(sockets, store, engines=(engine,))
        segment = Path("/dev/shm") / segment_name(settings.node, settings.run_dir)
        gateway = Gateway(settings)
        async with process(settings, tmp_path) as child:
            assert (await granted(gateway, digest, len(data))).waited
            child.kill()
            await child.wait()
        assert segment.exists(), "nobody was there to unlink it"
        async with process(settings, tmp_path) as child:
            answer = await granted(gateway, digest, len(data))
            assert (answer.waited, answer.port, answer.adapter) == (False, port, adapter_name("acme", digest))
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == 0
        gateway.close()
        assert not segment.exists()
        assert vllm.loads == [adapter_name("acme", digest)]
        assert list(vllm.adapters) == [adapter_name("acme", digest)], "detaching leaves the engine as it is"


@pytest.mark.parametrize("what", ["removed", "replaced", "truncated"])
async def test_sidecar_that_lost_its_segment_ends_and_its_next_life_serves(
    sockets: Path, store: Store, tmp_path: Path, what: str
) -> None:
    shape = shape_of()
    folders = [write_folder(tmp_path / f"peft{n}", tensors_for(shape, seed=n), config_for()) for n in range(2)]
    files = [packed(folder, shape) for folder in folders]
    first, second = map(store.put, files)
    vllm = FakeVllm(BASE)
    async with serving(vllm) as port:
        engine = EngineSettings(name="e1", base=BASE, fingerprint="f", attach=f"127.0.0.1:{port}")
        settings = config(sockets, store, engines=(engine,))
        segment = Path("/dev/shm") / segment_name(settings.node, settings.run_dir)
        gateway = Gateway(settings)
        async with process(settings, tmp_path) as child:
            assert (await granted(gateway, first, len(files[0]))).waited
            if what == "truncated":
                os.truncate(segment, 4096)
            else:
                segment.unlink()
            if what == "replaced":
                segment.write_bytes(bytes(1 << 20))
            async with asyncio.timeout(20.0):
                assert await child.wait() == 1
        async with process(settings, tmp_path) as child:
            assert not (await granted(gateway, first, len(files[0]))).waited
            assert (await granted(gateway, second, len(files[1]))).waited
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == 0
        gateway.close()
    assert vllm.loads == [adapter_name("acme", first), adapter_name("acme", second)]


async def test_killed_sidecar_finds_its_copies_on_disk(
    sockets: Path, store: Store, tmp_path: Path, s3: ObjectServer, proxy: FaultyProxy, s3_keys: None
) -> None:
    shape = shape_of()
    data = packed(write_folder(tmp_path / "peft", tensors_for(shape), config_for()), shape)
    bucket = ObjectStore(f"s3://{s3.new_bucket()}/p", endpoint=proxy.endpoint, region=REGION)
    with bucket.writer() as writer:
        writer.write(data)
        digest = writer.commit().digest
    vllm = FakeVllm(BASE)
    async with serving(vllm) as port:
        engine = EngineSettings(name="e1", base=BASE, fingerprint="f", attach=f"127.0.0.1:{port}")
        settings = structs.replace(
            config(sockets, store, engines=(engine,)),
            store=StoreLocation(bucket.url, proxy.endpoint, REGION),
            disk_dir=str(tmp_path / "disk"),
        )
        gateway = Gateway(settings)
        async with process(settings, tmp_path) as child:
            assert (await granted(gateway, digest, len(data))).waited
            await until((tmp_path / "disk" / "blobs" / digest[:2] / digest).exists)
            child.kill()
            await child.wait()
        vllm.adapters.clear()
        proxy.inject(answer(503, "ServiceUnavailable"))
        async with process(settings, tmp_path) as child:
            assert (await granted(gateway, digest, len(data))).waited
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == 0
        gateway.close()
        assert vllm.loads == 2 * [adapter_name("acme", digest)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_giver_that_ends_or_hangs_in_the_middle_costs_a_fetch(
    sockets: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    data = os.urandom(24 << 20)
    digest = store.put(data)
    there, here = sockets / "there", sockets / "here"
    there.mkdir(), here.mkdir()
    async with serving(FakeVllm(BASE)) as port:
        engine = EngineSettings(name="e1", base=BASE, fingerprint="f", attach=f"127.0.0.1:{port}")
        giver = config(there, store, engines=(engine,), bytes_endpoint=f"ipc://{there}/bytes", arena_bytes=64 << 20)
        taker = config(here, store, node="n2", arena_bytes=64 << 20)
        async with process(giver, tmp_path) as child, running(taker, FakeBackend()) as sidecar:
            gateway, other = Gateway(giver), Gateway(taker)
            await fetched(gateway, digest, len(data))
            took: list[int] = []
            take = sidecar._peers.take

            async def counted(peer: Peer, digest: str, offset: int, *rest: Any) -> Any:
                took.append(offset)
                if len(took) == 12:
                    child.send_signal(how)
                return await take(peer, digest, offset, *rest)

            monkeypatch.setattr(sidecar._peers, "take", counted)
            answer = await other.ask(digest, len(data), peers=(Peer("n1", giver.bytes_endpoint),))
            assert isinstance(answer, Granted)
            assert len(took) >= 12
            assert sidecar.machine.state.arrived_bytes == {"store": len(data)}
            gateway.close()
            other.close()


async def fetched(gateway: Gateway, digest: str, size: int) -> None:
    """Have a node get bytes into its arena that no engine could load."""
    async with asyncio.timeout(30.0):
        while Residency.FAILED not in gateway.residencies(digest):
            with contextlib.suppress(RoostError):
                await gateway.ask(digest, size, timeout_s=5.0)
            await asyncio.sleep(0.05)


async def test_settings_that_are_wrong_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"node": 1}')
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sidecar", "--settings", str(path), cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    _, output = await child.communicate()
    assert child.returncode == 2
    assert b"Traceback" not in output
    assert str(path).encode() in output
