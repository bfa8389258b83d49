"""What the handlers work with."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from backends.trainer import TrainerBackend
from catalog.names import check_part
from gateway.auth import ALL_TENANTS, Authenticator, Caller
from gateway.catalog_source import CatalogSource
from gateway.training.executor import Executor
from gateway.training.futures import Futures
from gateway.training.journal import Journal, must_be_open
from gateway.training.lines import Lines
from gateway.training.listings import Listings
from gateway.training.records import RunRecord, SessionRecord
from gateway.training.removal import Removal
from gateway.training.retention import Retention
from gateway.training.sampling import Samples
from gateway.training.settings import TrainingSettings
from gateway.training.trainees import Trainees
from wire.events import Scope
from wire.outcomes import NotFound


@dataclass(frozen=True)
class Services:
    """Shared by all handlers."""

    settings: TrainingSettings
    catalog: CatalogSource
    authenticator: Authenticator
    trainer: TrainerBackend
    journal: Journal
    executor: Executor
    trainees: Trainees
    lines: Lines
    samples: Samples
    retention: Retention
    removal: Removal
    listings: Listings
    futures: Futures

    def tenant_of(self, caller: Caller) -> str:
        """Whose a caller's new session is."""
        if caller.tenant == ALL_TENANTS:
            return check_part(self.settings.tenant, "tenant")
        return caller.tenant


SERVICES = web.AppKey("services", Services)


def services(request: web.Request) -> Services:
    return request.app[SERVICES]


def caller(request: web.Request, scope: Scope) -> Caller:
    """Who asks, if it may. Raises Unauthenticated, Forbidden and JournalUnavailable."""
    shared = services(request)

    def field(name: str) -> bytes | None:
        value = request.headers.get(name)
        return None if value is None else value.encode("utf-8", "surrogateescape")

    found = shared.authenticator.caller(
        shared.catalog.view(), field("Authorization"), field("X-API-Key"), field("Host"), field("Origin")
    )
    found.require(scope)
    return found


def own_session(request: web.Request, asker: Caller, session_id: str) -> SessionRecord:
    """Raises NotFound, also for another tenant's."""
    session = services(request).journal.session(session_id)
    if session is None or not asker.reaches(session.tenant):
        raise NotFound(f"there is no session {session_id[:80]!a}", field="session_id")
    return session


def open_session(request: web.Request, asker: Caller, session_id: str) -> SessionRecord:
    """The same, if it takes operations still. Raises InvalidRequest too."""
    session = own_session(request, asker, session_id)
    must_be_open(session)
    return session


def own_run(request: web.Request, asker: Caller, model_id: str) -> RunRecord:
    """Raises NotFound, also for another tenant's."""
    run = services(request).journal.run(model_id)
    if run is None or not asker.reaches(run.tenant):
        raise NotFound(f"there is no run {model_id[:80]!a}", field="model_id")
    return run
