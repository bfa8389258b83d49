"""A sidecar that pulls from a trainer's end over real sockets, while the file is being written."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from blake3 import blake3
from msgspec import structs

from catalog.names import adapter_name
from gateway.training.settings import TransferAddress
from gateway.training.transfers import Transfer, Transfers
from sidecar.events import RevisionOffered, TransferOffered, TransferWithdrawn
from sidecar.service import Sidecar
from sidecar.settings import SidecarSettings, TrainerAddress
from wire.curve import CurveKeys, make_keys
from wire.node import Granted, Release
from wire.sockets import Reply, Requester, Responder
from wire.transfer import AnswerOfTransfer, AskOfTransfer, Chunk, Offered, Pull, Unavailable

from .bench import BASE
from .conftest import Gateway, Store, config, running, until
from .fake_engine import FakeBackend

POLICY = "acme/p"
NEW = os.urandom(5_000_000)
DIGEST = blake3(NEW).hexdigest()
STEP = 700_000


class Writer:
    """A revision file that grows as a test wants it to."""

    def __init__(self, transfers: Transfers, path: Path, data: bytes = NEW) -> None:
        self.data = data
        self.path = path
        self.path.write_bytes(bytes(len(data)))
        self.transfer: Transfer = transfers.begin(path, policy=POLICY, base=BASE, rank=8)

    def write(self, start: int, end: int) -> None:
        with self.path.open("r+b") as file:
            file.seek(start)
            file.write(self.data[start:end])
        self.transfer.progress(end, len(self.data))

    def write_all(self) -> None:
        for start in range(0, len(self.data), STEP):
            self.write(start, min(start + STEP, len(self.data)))

    def complete(self, digest: str = DIGEST) -> None:
        """All of it is written, and it has its digest."""
        self.write_all()
        self.transfer.bind(digest)

    async def begin(self, end: int = STEP) -> None:
        """Write as far as ``end``, and wait for the node to pull."""
        self.write(0, end)
        await self.pulling()

    async def pulling(self) -> None:
        await until(lambda: self.transfer.pulling == {"n1"})


@pytest.fixture
def address(sockets: Path) -> TrainerAddress:
    return TrainerAddress(endpoint=f"ipc://{sockets}/chunks", feed_endpoint=f"ipc://{sockets}/offers")


@pytest.fixture
async def transfers(address: TrainerAddress) -> AsyncIterator[Transfers]:
    transfers = Transfers([TransferAddress(address.endpoint, address.feed_endpoint)], nodes=lambda policy: ("n1",))
    yield transfers
    transfers.close()


@pytest.fixture
def node(sockets: Path, store: Store, address: TrainerAddress) -> SidecarSettings:
    return config(sockets, store, trainers=(address,), arena_bytes=64 << 20)


async def heard(sidecar: Sidecar) -> None:
    """The offers are followed: what was told before is lost."""
    await until(lambda: sidecar._pulls.heard)


@contextlib.asynccontextmanager
async def following(node: SidecarSettings, *engines: FakeBackend) -> AsyncIterator[Sidecar]:
    async with running(node, *(engines or (FakeBackend(),))) as sidecar:
        await heard(sidecar)
        yield sidecar


async def test_a_revision_is_in_the_arena_when_its_last_byte_is_written(
    transfers: Transfers, node: SidecarSettings, tmp_path: Path
) -> None:
    async with following(node) as sidecar:
        state = sidecar.machine.state
        writer = Writer(transfers, tmp_path / "new")
        await writer.begin()
        writer.write_all()
        assert not state.cache.resident(DIGEST)
        writer.transfer.bind(DIGEST)
        await writer.transfer.pulled(20.0)
        assert state.cache.resident(DIGEST)
        with sidecar.arena.read(state.cache.extent(DIGEST)) as view:
            assert bytes(view) == NEW


async def test_the_announced_revision_serves_before_it_is_asked_for(
    transfers: Transfers, node: SidecarSettings, tmp_path: Path, store: Store
) -> None:
    old, engine, gateway = store.put(b"old" * 1000), FakeBackend(), Gateway(node)
    async with following(node, engine) as sidecar:
        answer = await gateway.ask(old, 3000, policy=POLICY)
        assert isinstance(answer, Granted)
        gateway.wire.send(Release(gateway="g1", instance="i1", leases=(answer.lease,)))
        writer = Writer(transfers, tmp_path / "new")
        writer.complete()
        await until(lambda: sidecar.machine.state.cache.resident(DIGEST))
        assert engine.installs == [adapter_name("acme", old)]
        sidecar._apply(RevisionOffered(policy=POLICY, digest=DIGEST, size=len(NEW)))
        await until(lambda: sidecar.machine.state.engines["e1"].serving(adapter_name("acme", DIGEST)) is not None)
        answer = await gateway.ask(DIGEST, len(NEW), policy=POLICY)
        assert isinstance(answer, Granted)
        assert not answer.waited
    gateway.close()


async def test_a_trainer_that_dies_in_the_middle_leaves_nothing(
    transfers: Transfers, node: SidecarSettings, tmp_path: Path, address: TrainerAddress
) -> None:
    async with following(node) as sidecar:
        state = sidecar.machine.state
        writer = Writer(transfers, tmp_path / "new")
        await writer.begin()
        transfers.close()
        await until(lambda: not list(state.cache))
        assert state.cache.used == 0
        again = Transfers([TransferAddress(address.endpoint, address.feed_endpoint)], nodes=lambda policy: ("n1",))
        await heard(sidecar)
        async with asyncio.timeout(20.0):
            while not state.cache.resident(DIGEST):
                writer = Writer(again, tmp_path / "again")
                writer.complete()
                await writer.transfer.pulled(1.0)
                await asyncio.sleep(0.05)
        again.close()


async def test_a_sidecar_that_dies_in_the_middle_is_waited_for_no_longer_than_a_moment(
    transfers: Transfers, node: SidecarSettings, tmp_path: Path
) -> None:
    writer = Writer(transfers, tmp_path / "new")
    async with following(node):
        await writer.begin()
        await asyncio.sleep(0.1)
    writer.complete()
    async with asyncio.timeout(5.0):
        await writer.transfer.pulled(0.1)


async def test_bytes_of_another_digest_than_was_told_are_not_kept(
    transfers: Transfers, node: SidecarSettings, tmp_path: Path
) -> None:
    async with following(node) as sidecar:
        writer = Writer(transfers, tmp_path / "new")
        writer.complete("0" * 64)
        await until(lambda: sidecar.machine.state.counts["pulls_failed"] == 1)
        assert not list(sidecar.machine.state.cache)


async def test_a_withdrawn_revision_leaves_nothing(transfers: Transfers, node: SidecarSettings, tmp_path: Path) -> None:
    async with following(node) as sidecar:
        writer = Writer(transfers, tmp_path / "new")
        await writer.begin()
        writer.transfer.withdraw()
        await until(lambda: not list(sidecar.machine.state.cache))


async def test_a_revision_withdrawn_in_the_moment_of_its_offer_leaves_nothing(
    node: SidecarSettings, address: TrainerAddress
) -> None:
    async with running(node, FakeBackend()) as sidecar:
        await until(lambda: sidecar.machine.state.engines["e1"].ready)
        offer = Offered(transfer="t", policy=POLICY, base=BASE, rank=8, size=len(NEW), nodes=("n1",))
        sidecar._apply(TransferOffered(trainer=address.endpoint, offer=offer))
        assert list(sidecar.machine.state.cache)
        sidecar._apply(TransferWithdrawn(transfer="t"))
        await until(lambda: not list(sidecar.machine.state.cache))


async def test_a_file_that_was_begun_anew_with_the_same_bytes_is_pulled_on(
    transfers: Transfers, node: SidecarSettings, tmp_path: Path
) -> None:
    async with following(node) as sidecar:
        writer = Writer(transfers, tmp_path / "new")
        await writer.begin(3 * STEP)
        writer.path.unlink()
        writer.path.write_bytes(bytes(len(NEW)))
        writer.complete()
        await writer.transfer.pulled(20.0)
        assert sidecar.machine.state.cache.resident(DIGEST)


async def test_a_file_that_is_gone_before_it_was_read_is_sent(
    transfers: Transfers, node: SidecarSettings, tmp_path: Path
) -> None:
    async with following(node) as sidecar:
        writer = Writer(transfers, tmp_path / "new")
        writer.path.write_bytes(NEW)
        writer.transfer.progress(STEP, len(NEW))
        await writer.pulling()
        writer.path.unlink()
        writer.transfer.progress(len(NEW), len(NEW))
        writer.transfer.bind(DIGEST)
        await writer.transfer.pulled(20.0)
        assert sidecar.machine.state.cache.resident(DIGEST)


@pytest.mark.parametrize(
    ("offset", "length", "field"),
    [(0, 0, "length"), (0, 5 << 20, "length"), (-1, 10, "offset"), (4_999_999, 2, "offset")],
)  # fmt: skip
async def test_what_is_out_of_bounds_is_refused_by_name(
    transfers: Transfers, address: TrainerAddress, tmp_path: Path, offset: int, length: int, field: str
) -> None:
    writer = Writer(transfers, tmp_path / "new")
    writer.write_all()
    asker: Requester[AskOfTransfer, AnswerOfTransfer] = Requester(address.endpoint, AskOfTransfer, AnswerOfTransfer)
    ask = Pull(transfer=writer.transfer.name, node="n1", offset=offset, length=length)
    answer = await asker.request(ask, timeout_s=5.0)
    assert isinstance(answer, Unavailable)
    assert answer.field == field
    asker.close()


async def test_a_node_has_no_more_chunks_asked_for_than_its_credits(
    transfers: Transfers, address: TrainerAddress, tmp_path: Path
) -> None:
    writer = Writer(transfers, tmp_path / "new")
    writer.write(0, STEP)
    asker: Requester[AskOfTransfer, AnswerOfTransfer] = Requester(address.endpoint, AskOfTransfer, AnswerOfTransfer)
    ask = Pull(transfer=writer.transfer.name, node="n1", offset=STEP, length=1000)
    asking = [asyncio.create_task(asker.request(ask, timeout_s=20.0)) for _ in range(9)]
    await until(lambda: sum(task.done() for task in asking) == 1)
    refused = next(task.result() for task in asking if task.done())
    assert isinstance(refused, Unavailable)
    assert refused.field == "node"
    writer.write_all()
    answers = await asyncio.gather(*asking)
    assert [answer.data for answer in answers if isinstance(answer, Chunk)] == [NEW[STEP : STEP + 1000]] * 8
    asker.close()


async def test_a_trainer_on_another_host_can_t_have_our_files_read(sockets: Path, store: Store, tmp_path: Path) -> None:
    (trainer, secret), ours = make_keys(), make_keys()
    curve = CurveKeys(trainer, secret, peers=(ours[0],))
    asked: list[AskOfTransfer] = []
    file = tmp_path / "ours"
    file.write_bytes(NEW)

    def name_it(ask: AskOfTransfer, reply: Reply[AnswerOfTransfer]) -> None:
        asked.append(ask)
        reply(Chunk(path=str(file), digest=DIGEST))

    chunks: Responder[AskOfTransfer, AnswerOfTransfer] = Responder(
        "tcp://127.0.0.1:*", AskOfTransfer, AnswerOfTransfer, name_it, curve=curve
    )
    address = TrainerAddress(endpoint=chunks.endpoint, feed_endpoint=f"ipc://{sockets}/offers", public=trainer)
    node = structs.replace(
        config(sockets, store, trainers=(address,), arena_bytes=64 << 20), curve=CurveKeys(*ours, peers=(trainer,))
    )
    async with running(node, FakeBackend()) as sidecar:
        state = sidecar.machine.state
        await until(lambda: state.engines["e1"].ready)
        offer = Offered(transfer="t", policy=POLICY, base=BASE, rank=8, size=len(NEW), nodes=("n1",))
        sidecar._apply(TransferOffered(trainer=address.endpoint, offer=offer))
        await until(lambda: not list(state.cache))
        assert asked and not state.counts["pulled"]
    chunks.close()


async def test_over_tcp_only_with_the_keys(sockets: Path, store: Store, tmp_path: Path) -> None:
    trainer, sidecar_keys = make_keys(), make_keys()
    allowed = (sidecar_keys[0],)
    transfers = Transfers(
        [TransferAddress("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")],
        nodes=lambda policy: ("n1",),
        curve=CurveKeys(*trainer, peers=allowed),
    )  # type: ignore[arg-type]
    (at,) = transfers.addresses
    address = TrainerAddress(endpoint=at.endpoint, feed_endpoint=at.feed_endpoint, public=trainer[0])
    ours = CurveKeys(*sidecar_keys, peers=allowed)
    node = structs.replace(config(sockets, store, trainers=(address,), arena_bytes=64 << 20), curve=ours)  # type: ignore[arg-type]
    async with following(node) as sidecar:
        writer = Writer(transfers, tmp_path / "new")
        writer.complete()
        await until(lambda: sidecar.machine.state.cache.resident(DIGEST))
    transfers.close()
