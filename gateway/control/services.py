"""What the control plane's handlers work with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client.registry import Collector

from catalog.artifacts import ArtifactStore
from catalog.client import RegistrarClient
from catalog.view import CatalogView
from gateway.auth import Authenticator
from gateway.catalog_source import CatalogSource
from gateway.fleet import Fleet
from gateway.membership import Membership
from gateway.nodes import NodeTable
from gateway.workers import Workers

# files being checked at a time: each is read whole
_EXAMINATIONS = 2
# requests that wait for a position at a time
_WAITS = 256


@dataclass(frozen=True)
class Services:
    """Shared by all handlers. ``max_artifact_bytes`` bounds one upload.

    ``scans`` run what reads many records of the catalog, ``lookups`` what asks the store of many artifacts.
    """

    gateway: str
    catalog: CatalogSource
    registrar: RegistrarClient
    store: ArtifactStore
    nodes: NodeTable
    fleet: Fleet
    members: Membership
    authenticator: Authenticator
    collector: Collector
    max_artifact_bytes: int
    scans: Workers
    lookups: Workers
    examinations: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_EXAMINATIONS))
    waits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_WAITS))

    @property
    def view(self) -> CatalogView:
        """The catalog. Raises JournalUnavailable while there is none."""
        return self.catalog.view()


SERVICES = web.AppKey("services", Services)


def services(request: web.Request) -> Services:
    return request.app[SERVICES]
