"""The registrar on its sockets, over a journal in LMDB or in PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import lmdb

from wire.events import Event
from wire.outcomes import JournalUnavailable
from wire.registrar import AnyAnswer, AnyCommand
from wire.sockets import FeedPublisher, Responder

from .artifacts import RegistrarStore, registrar_store
from .environment import Environment
from .exclusive import ExclusiveFolder
from .layout import Txn
from .ledger import Ledger
from .lookahead import Lookahead
from .migrations import open_to_write
from .pruner import Pruner
from .registrar import Registrar
from .settings import RegistrarSettings

_log = logging.getLogger(__name__)

# closing a socket drops what its I/O thread has not sent yet
_FLUSH_S = 0.1


async def serve(
    settings: RegistrarSettings, stop: asyncio.Event, *, commit: Callable[[Txn], None] = lmdb.Transaction.commit
) -> None:
    """Serve until ``stop`` is set; ``commit`` makes a transaction of LMDB durable.

    Raises JournalUnavailable where another registrar writes this catalog, where it has another layout, or once the
    journal can't be written any more; InvalidRequest for endpoints that can't be used.
    """
    catalog_dir = Path(settings.catalog_dir)
    store = registrar_store(Path(settings.store_dir), settings.store, shared=bool(settings.journal))
    with (
        ExclusiveFolder(catalog_dir),
        contextlib.closing(open_to_write(catalog_dir, settings.map_bytes)) as environment,
        contextlib.closing(_feed(settings)) as feed,
    ):
        over_journal = _over_postgres if settings.journal else functools.partial(_over_lmdb, commit=commit)
        async with over_journal(settings, store, environment, feed) as registrar:
            lookahead = None if store.look is None else Lookahead(registrar.take, store.look, store.missed)
            responder: Responder[AnyCommand, AnyAnswer] = Responder(
                settings.endpoint,
                AnyCommand,
                AnyAnswer,
                registrar.take if lookahead is None else lookahead.take,
                curve=settings.curve,
            )
            with contextlib.closing(responder):
                _log.info("registrar ready at %s, feed at %s", responder.endpoint, feed.endpoint)
                async with _pruning(settings, registrar):
                    await _until(stop, registrar.failed)
                if lookahead is not None:
                    # while its askers can still be told
                    await lookahead.close()
                await registrar.stop()
                await asyncio.sleep(_FLUSH_S)
    if registrar.failed.done():
        raise registrar.failed.result()


@contextlib.asynccontextmanager
async def _over_lmdb(
    settings: RegistrarSettings, store: RegistrarStore, environment: Environment, feed: FeedPublisher[Event], *,
    commit: Callable[[Txn], None],
) -> AsyncIterator[Registrar]:  # fmt: skip
    ledger = Ledger(environment, store, commit=commit)
    ledger.housekeep()
    yield Registrar(ledger, publish=feed.publish, batch_max=settings.batch_max)


@contextlib.asynccontextmanager
async def _over_postgres(
    settings: RegistrarSettings, store: RegistrarStore, environment: Environment, feed: FeedPublisher[Event]
) -> AsyncIterator[Registrar]:
    # one host alone needs neither the driver nor its start-up time
    from .postgres.follower import Follower
    from .postgres.ledger import PostgresLedger
    from .postgres.local_view import LocalView

    view = LocalView(environment)
    ledger = PostgresLedger(settings.journal, store, view)
    await asyncio.to_thread(ledger.open)
    registrar = Registrar(ledger, publish=feed.publish, batch_max=settings.batch_max, view_wait_s=settings.view_wait_s)
    follower = Follower(settings.journal, view, on_applied=registrar.advance, on_failed=registrar.fail)
    following = asyncio.create_task(follower.run())
    try:
        yield registrar
    finally:
        following.cancel()
        await asyncio.wait({following})
        await asyncio.to_thread(ledger.close)


@contextlib.asynccontextmanager
async def _pruning(settings: RegistrarSettings, registrar: Registrar) -> AsyncIterator[None]:
    def in_use() -> tuple[str, ...] | None:
        known = settings.prune_unreported or registrar.in_use.known()
        return registrar.in_use.digests() if known else None

    pruner = Pruner(registrar.take, in_use, every_s=settings.prune_every_s)
    pruning = asyncio.create_task(pruner.run())
    try:
        yield
    finally:
        pruning.cancel()
        await asyncio.wait({pruning})


def _feed(settings: RegistrarSettings) -> FeedPublisher[Event]:
    # the time in nanoseconds is an epoch that no earlier life of this registrar has had
    return FeedPublisher(settings.feed_endpoint, Event, epoch=time.time_ns(), curve=settings.curve)


async def _until(stop: asyncio.Event, failed: asyncio.Future[JournalUnavailable]) -> None:
    stopping = asyncio.ensure_future(stop.wait())
    failed.add_done_callback(lambda _: stopping.cancel())
    await asyncio.wait({stopping})
