"""A training service's process: its parts made and joined, and taken down in order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

from aiohttp import web

from backends.registry import make_trainer
from backends.trainer import TrainerBackend
from catalog.artifacts import open_store
from catalog.client import RegistrarClient
from gateway.auth import Authenticator
from gateway.catalog_source import CatalogSource
from wire.node import Health
from wire.outcomes import EngineFailed, RoostError

from .api import Services, make_app
from .executor import Executor
from .expected import ExpectedNode
from .futures import Futures
from .journal import Journal
from .lines import Lines
from .listings import Listings
from .postgres import PostgresStore
from .publishing import Publisher
from .removal import Removal
from .retention import Retention
from .sampling import GatewayClient, Samples
from .settings import TrainingSettings
from .store import Store
from .trainees import Trainees
from .transfers import Transfers
from .waiting import listen_on, waited_for

_log = logging.getLogger(__name__)

_SWEEP_S = 60.0
_LOOK_S = 1.0
_END_S = 2.0

MakeTrainer = Callable[[TrainingSettings], TrainerBackend]


def _trainer_of(settings: TrainingSettings) -> TrainerBackend:
    state_dir = Path(settings.state_dir) / "trainer"
    return make_trainer(settings.trainer, state_dir=state_dir, log_dir=Path(settings.log_dir))


def _store_of(settings: TrainingSettings) -> Store:
    folder = Path(settings.state_dir) / "journal"
    if not settings.journal:
        return Store(folder, map_bytes=settings.map_bytes)
    return PostgresStore(folder, map_bytes=settings.map_bytes, url=settings.journal, name=settings.name)


def _transfers_of(settings: TrainingSettings) -> Transfers | None:
    if not settings.transfers:
        return None
    nodes = ExpectedNode(settings.nodes, settings.nodes_file)
    return Transfers(settings.transfers, nodes=nodes, curve=settings.curve)


class TrainingService:
    """One running service. Made by ``start`` inside the event loop that it runs on."""

    def __init__(
        self, settings: TrainingSettings, trainer: TrainerBackend, store: Store, catalog: CatalogSource
    ) -> None:
        self.settings = settings
        folder = Path(settings.state_dir)
        self._trainer = trainer
        self._context = 0
        self._store = store
        self._catalog = catalog
        self._transfers = _transfers_of(settings)
        self._registrar = RegistrarClient(settings.registrar_endpoint, curve=settings.curve)
        self.journal = Journal(store)
        futures = Futures()
        trainees = Trainees(trainer, self.journal)
        publisher = Publisher(
            open_store(Path(settings.store_dir), settings.store),
            self._registrar,
            format_name=settings.trainer.backend,
            transfers=self._transfers,
            announce_wait_s=settings.announce_wait_s,
        )
        self._retention = Retention(self.journal, publisher, idle_s=settings.sampler_idle_s)
        self._removal = Removal(self.journal, publisher, self._retention)
        self._executor = Executor(
            self.journal, trainees, publisher, self._retention, self._removal, catalog, folder,
            revision_dtype=settings.revision_dtype,
        )  # fmt: skip
        self._lines = Lines(self.journal, self._executor, futures, gap_s=settings.gap_s)
        gateway = GatewayClient(
            settings.gateway_url,
            settings.key_file,
            timeout_s=settings.sample_timeout_s,
            most_tokens=settings.max_generated_tokens,
            context=self._trained_context,
        )
        self._samples = Samples(self.journal, gateway, futures, at_once=settings.samples_at_once)
        shared = Services(
            settings=settings,
            catalog=self._catalog,
            authenticator=Authenticator(anonymous=settings.anonymous),
            trainer=trainer,
            journal=self.journal,
            executor=self._executor,
            trainees=trainees,
            lines=self._lines,
            samples=self._samples,
            retention=self._retention,
            removal=self._removal,
            listings=Listings(store),
            futures=futures,
        )
        self._runner = web.AppRunner(make_app(shared), auto_decompress=False, access_log=None, shutdown_timeout=_END_S)
        self._sweeping: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        settings: TrainingSettings,
        *,
        make: MakeTrainer = _trainer_of,
        catalog: CatalogSource | None = None,
        store: Store | None = None,
    ) -> Self:
        """Make a service, go on with what an earlier life left, and listen. ``store`` is its own from now on.

        Raises InvalidRequest or Unfit for settings that can't stand, JournalUnavailable where another one runs.
        """
        trainer = make(settings)
        store = store or _store_of(settings)
        service = cls(settings, trainer, store, catalog or CatalogSource(Path(settings.catalog_dir)))
        try:
            await trainer.start()
            service._go_on()
            await service._listen()
        except BaseException:
            await service.stop()
            raise
        return service

    async def _trained_context(self) -> int:
        """Tokens. The trainer is asked once: it answers in its turn."""
        if not self._context:
            self._context = (await self._trainer.limits()).max_context
        return self._context

    async def died(self) -> str:
        """Why the trainer is dead, or the journal is another's, once it is."""
        while not self._store.lost:
            if await self._trainer.health() is Health.DEAD:
                return f"the trainer is dead: {self._trainer.detail}"
            await asyncio.sleep(_LOOK_S)
        return self._store.lost

    async def stop(self) -> None:
        """Take no more requests; what has no result yet is gone on with by the next life."""
        await self._runner.cleanup()
        if self._sweeping is not None:
            self._sweeping.cancel()
        await self._samples.stop()
        await self._lines.stop()
        await self._retention.stop()
        await self._trainer.stop()
        await self._store.close()
        if self._transfers is not None:
            self._transfers.close()
        self._registrar.close()
        self._catalog.close()

    def _go_on(self) -> None:
        for operation in self.journal.pending():
            if self.journal.run(operation.owner) is not None:
                self._lines.admit(operation)
            else:
                self._samples.admit(operation)
        for run in self.journal.ending():
            self._lines.end(run.model_id)
        self._retention.go_on()
        self._sweeping = asyncio.create_task(self._sweep())

    async def _listen(self) -> None:
        await self._runner.setup()
        await listen_on(self._runner, self.settings.socket)

    async def _sweep(self) -> None:
        """Now and then, drop what has had its time; what can't be dropped now keeps the rest from nothing."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now_ms = time.time_ns() // 1_000_000
            await _dropped("checkpoints", self._removal.expire(now_ms))
            await _dropped("sampling sessions' revisions", self._retention.sweep())
            await _dropped("results", self.journal.prune(now_ms - int(self.settings.keep_results_s * 1000)))


async def _dropped(what: str, dropping: Awaitable[object]) -> None:
    try:
        await dropping
    except RoostError as error:
        _log.warning("old %s can't be dropped: %s", what, error.message)
    except Exception:
        _log.exception("old %s can't be dropped", what)


async def run(
    settings: TrainingSettings,
    stop: asyncio.Event,
    *,
    make: MakeTrainer = _trainer_of,
    catalog: CatalogSource | None = None,
) -> None:
    """Serve until ``stop`` is set, once the journal can be had.

    Raises what ``TrainingService.start`` does, and EngineFailed if the trainer dies or the journal is lost.
    """
    store = await waited_for(lambda: _store_of(settings), settings.socket, stop)
    if store is None:
        return
    service = await TrainingService.start(settings, make=make, catalog=catalog, store=store)
    _log.info("training service ready: %s on %s", settings.base, settings.socket)
    stopping, dying = asyncio.create_task(stop.wait()), asyncio.create_task(service.died())
    await asyncio.wait({stopping, dying}, return_when=asyncio.FIRST_COMPLETED)
    why = "" if stopping.done() else dying.result()
    for waiting in (stopping, dying):
        waiting.cancel()
    _log.info("training service stopping")
    await service.stop()
    if why:
        raise EngineFailed(why)
