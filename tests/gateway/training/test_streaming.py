"""What a real trainer exports, through a real sidecar's arena into the store and the catalog's feed."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from backends.megatron_train import exporting
from backends.megatron_train.control import MegatronTrainer
from catalog.client import RegistrarClient
from catalog.names import adapter_name
from catalog.registrar import Registrar
from gateway.training.publishing import Publication, Publisher
from gateway.training.records import RunRecord
from gateway.training.settings import TransferAddress
from gateway.training.transfers import Transfers
from packer.revision import RevisionFile
from sidecar.service import Sidecar
from sidecar.settings import TrainerAddress
from tests.backends.megatron.bases import make_base, mixed_batch
from tests.backends.megatron.trainers import LocalRanks, local_trainer
from tests.catalog.harness import BASE, Catalog, add_base
from tests.sidecar.conftest import Store as Blobs
from tests.sidecar.conftest import config, running, until
from tests.sidecar.fake_engine import FakeBackend
from wire.events import ArtifactFacts, Event
from wire.outcomes import InvalidRequest
from wire.registrar import AnyAnswer, AnyCommand, Committed
from wire.sockets import FeedPublisher, Responder
from wire.trainer import Adam, ExportLayers, PolicySpec

RUN = RunRecord("run", "s", "acme", "key", "acme/taught", BASE, 8, 16.0, 1, attention=True, mlp=True, created_ms=1)


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder with a short path, as ``ipc://`` endpoints need it."""
    with tempfile.TemporaryDirectory(prefix="roost-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "qwen3", "qwen3")


class Line:
    """A trainer, a registrar, a publisher between them, and a sidecar whose engine obeys."""

    def __init__(self, folder: Path, sockets: Path, base: Path, *, wait_s: float = 0.5) -> None:
        self.folder = folder
        self.catalog = Catalog(folder)
        self.catalog.run(add_base())
        self.engine = FakeBackend(base=BASE)
        self.address = TrainerAddress(endpoint=f"ipc://{sockets}/chunks", feed_endpoint=f"ipc://{sockets}/offers")
        self.trainer: MegatronTrainer
        self.sidecar: Sidecar
        self._sockets = sockets
        self._base = base
        self._wait_s = wait_s
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        stack, feed_endpoint = self._stack, f"ipc://{self._sockets}/registrar-feed"
        feed: FeedPublisher[Event] = FeedPublisher(feed_endpoint, Event, epoch=time.time_ns(), heartbeat_s=0.05)
        stack.callback(feed.close)
        registrar = Registrar(self.catalog.ledger, publish=feed.publish, batch_max=64)
        stack.push_async_callback(registrar.stop)
        endpoint = f"ipc://{self._sockets}/registrar"
        responder: Responder[AnyCommand, AnyAnswer] = Responder(endpoint, AnyCommand, AnyAnswer, registrar.take)
        stack.callback(responder.close)
        client = RegistrarClient(endpoint)
        stack.callback(client.close)
        transfers = Transfers(
            [TransferAddress(self.address.endpoint, self.address.feed_endpoint)], nodes=lambda policy: ("n1",)
        )
        stack.callback(transfers.close)
        self.publisher = Publisher(
            self.catalog.store, client, format_name="megatron", transfers=transfers, announce_wait_s=self._wait_s
        )
        node = config(
            self._sockets, Blobs(self.catalog.store.root), engines=(self.engine.settings,), arena_bytes=64 << 20,
            trainers=(self.address,), registrar_feed=feed_endpoint,
        )  # fmt: skip
        self.sidecar = await stack.enter_async_context(running(node, self.engine))
        await until(lambda: self.sidecar._pulls.heard and not self.sidecar._offers.silent)  # type: ignore[union-attr]
        self.trainer = await stack.enter_async_context(local_trainer(self._base, self.folder / "trainer"))
        await self.trainer.create_policy(PolicySpec(policy="run", rank=8, alpha=16.0, seed=1))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def ranks(self) -> LocalRanks:
        assert isinstance(self.trainer._ranks, LocalRanks)
        return self.trainer._ranks

    async def learn(self, number: int) -> None:
        """Change ``2 * number + 1`` and the one behind it."""
        await self.trainer.forward_backward("run", mixed_batch(number), number=2 * number + 1)
        await self.trainer.optim_step("run", Adam(learning_rate=0.01), number=2 * number + 2)

    @contextlib.asynccontextmanager
    async def publication(self) -> AsyncIterator[tuple[Publication, Path]]:
        file = self.folder / "export"
        async with self.publisher.publication(RUN, file) as publication:
            yield publication, file
        assert not file.exists()

    async def publish(self) -> tuple[Committed, ArtifactFacts]:
        async with self.publication() as (publication, file):
            facts = await self.trainer.export_revision("run", file, progress=publication.progress)
            return await publication.commit(facts, "test"), facts

    def serves(self, digest: str) -> bool:
        return self.sidecar.machine.state.engines["e1"].serving(adapter_name("acme", digest)) is not None

    def arena(self, digest: str) -> bytes:
        with self.sidecar.arena.read(self.sidecar.machine.state.cache.extent(digest)) as view:
            return bytes(view)

    @property
    def counts(self) -> Any:
        return self.sidecar.machine.state.counts


async def test_each_revision_is_in_arena_and_store_when_it_is_named_and_serves_unasked(
    tmp_path: Path, sockets: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_RANGE_BYTES", 1 << 14)
    async with Line(tmp_path, sockets, base) as line:
        for number in range(6):
            await line.learn(number)
            committed, facts = await line.publish()
            assert committed.revision == number + 1
            policy = line.catalog.view.policy("acme/taught")
            assert policy is not None
            assert policy.latest == number + 1
            stored = line.catalog.store.path(facts.digest)
            assert RevisionFile.open(stored).facts() == facts
            assert line.arena(facts.digest) == stored.read_bytes()
            await until(lambda digest=facts.digest: line.serves(digest))  # type: ignore[misc]
        assert line.counts["pulled"] == 6
        assert line.counts["fetched"] == 0, "nothing came from the store"
        assert len(line.engine.removals) == 2, "of its own older ones, as there are four slots"


async def test_ranks_that_die_in_the_middle_of_an_export_change_none_of_its_bytes(
    tmp_path: Path, sockets: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_RANGE_BYTES", 1 << 14)
    async with Line(tmp_path, sockets, base) as line:
        await line.learn(0)
        async with line.publication() as (publication, file):

            def progress(done: int, total: int) -> None:
                if done > total // 2 and line.ranks.starts == 1:
                    line.ranks.die_before.append(ExportLayers)
                publication.progress(done, total)

            facts = await line.trainer.export_revision("run", file, progress=progress)
            await publication.commit(facts, "test")
        assert line.ranks.starts == 2
        line.catalog.store.verify(facts.digest)
        await until(lambda: line.serves(facts.digest))
        assert line.counts["pulled"] == 1


async def test_an_export_that_fails_leaves_nothing(tmp_path: Path, sockets: Path, base: Path) -> None:
    async with Line(tmp_path, sockets, base) as line:
        for number in range(1, 7):
            await line.trainer.optim_step("run", Adam(learning_rate=9e5, weight_decay=9e5), number=number)
        with pytest.raises(InvalidRequest, match="not finite"):
            await line.publish()
        assert line.catalog.view.policy("acme/taught") is None
        assert list((line.catalog.store.root / "partial").iterdir()) == []
        assert line.catalog.store.stored() == []
        await until(lambda: not list(line.sidecar.machine.state.cache))
        assert line.sidecar.machine.state.cache.used == 0
        assert line.engine.installs == []


async def test_a_revision_without_changes_is_the_same_one_and_pulled_once(
    tmp_path: Path, sockets: Path, base: Path
) -> None:
    async with Line(tmp_path, sockets, base) as line:
        first, facts = await line.publish()
        await until(lambda: line.serves(facts.digest))
        again, _ = await line.publish()
        assert (again.revision, again.changed) == (first.revision, False)
        await until(lambda: len(list(line.sidecar.machine.state.cache)) == 1)
        assert len(line.engine.installs) == 1


async def test_the_event_waits_no_longer_than_a_moment_for_a_node_that_hangs(
    tmp_path: Path, sockets: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Line(tmp_path, sockets, base, wait_s=0.2) as line:
        monkeypatch.setattr("sidecar.pulls._Filling.add", lambda *_: time.sleep(3.0))
        begun = time.monotonic()
        _, facts = await line.publish()
        assert time.monotonic() - begun < 3.0
        assert line.catalog.view.policy("acme/taught") is not None
        assert not line.sidecar.machine.state.cache.resident(facts.digest)


async def test_what_a_trainer_writes_when_its_caller_has_left_is_copied_nowhere(
    tmp_path: Path, sockets: Path, base: Path
) -> None:
    async with Line(tmp_path, sockets, base) as line:
        with pytest.raises(asyncio.CancelledError):
            async with line.publication() as (publication, file):
                file.write_bytes(bytes(100))
                publication.progress(50, 100)
                raise asyncio.CancelledError
        (tmp_path / "export").write_bytes(bytes(100))
        publication.progress(100, 100)
        await asyncio.sleep(0.1)
        assert list((line.catalog.store.root / "partial").iterdir()) == []
        await until(lambda: not list(line.sidecar.machine.state.cache))
