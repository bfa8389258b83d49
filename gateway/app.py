"""A gateway process: its parts made and joined, and taken down in order."""

from __future__ import annotations

import asyncio
import logging
import resource
import secrets
import sys
from pathlib import Path
from typing import Self

from aiohttp import web

from catalog.artifacts import open_store
from catalog.client import RegistrarClient

from .accesslog import AccessLog, write_to
from .auth import Authenticator, check_exposure
from .bounds import GenerationBounds
from .catalog_source import CatalogSource
from .control import Services, TrainingService, make_control
from .dataplane import DATA_ROUTES, ROUTES, DataPlane, Timeouts
from .fleet import Fleet
from .holdings import InUseReports
from .http import HttpLimits, Server, UpstreamPool, connections_within, serve
from .leases import LeaseDesk
from .membership import Membership
from .metrics import GatewayCollector, Metrics
from .nodes import NodeTable
from .peers import PeerDirectory
from .placement import Placer, Tuning
from .popularity import Popularity
from .quotas import Quotas
from .settings import GatewaySettings
from .workers import Workers

_log = logging.getLogger(__name__)

DRAIN_S = 30.0
# scans share the interpreter with the event loop: more at a time would only slow it down
_SCANS = 2
# questions to a remote store at a time
_LOOKUPS = 8


class Gateway:
    """One running gateway. Made by ``start`` inside the event loop that it runs on.

    ``catalog`` may be shared: a process opens one catalog once. It is closed with the gateway.
    """

    def __init__(self, settings: GatewaySettings, catalog: CatalogSource) -> None:
        check_exposure(settings.host, anonymous=settings.anonymous)
        loop = asyncio.get_running_loop()
        self.settings = settings
        popularity = Popularity(
            loop.time, replica_leases=settings.replica_leases, cooldown_s=settings.replica_cooldown_s
        )
        self.nodes = NodeTable(popularity=popularity)
        self.quotas = Quotas(settings.quotas, settings.default_quota, gateways=settings.gateways, clock=loop.time)
        self.metrics = Metrics(tuple(ROUTES.values()))
        self._catalog = catalog
        self._registrar = RegistrarClient(settings.registrar_endpoint, curve=settings.curve)
        instance = secrets.token_hex(8)
        self._fleet = Fleet(
            settings.nodes,
            self.nodes,
            gateway=settings.name,
            instance=instance,
            curve=settings.curve,
        )
        peers = PeerDirectory(self.nodes, self._fleet.address_of, clock=loop.time)
        self._leases = LeaseDesk(self._fleet.requesters, gateway=settings.name, instance=instance, peers=peers)
        self._fleet.tell_holding(self._leases.holding)
        self._members = Membership(settings, self._fleet)
        self._upstream = UpstreamPool()
        self._access_log = AccessLog(write_to(sys.stdout.fileno()), loop) if settings.access_log else None
        self._server: Server | None = None
        self._training = TrainingService(settings.training) if settings.training else None
        self._scans, self._lookups = Workers(_SCANS, "scan"), Workers(_LOOKUPS, "lookup")
        reports = InUseReports(self._registrar, self.nodes, self._scans, gateway=settings.name)
        self._tasks = (loop.create_task(reports.run()), loop.create_task(self._members.run()))

    @classmethod
    async def start(cls, settings: GatewaySettings, *, catalog: CatalogSource | None = None) -> Self:
        """Make a gateway and listen. Raises InvalidRequest for settings that can't stand, OSError for the port."""
        gateway = cls(settings, catalog or CatalogSource(Path(settings.catalog_dir)))
        try:
            await gateway._listen()
        except BaseException:
            await gateway.stop(drain_s=0.0)
            raise
        return gateway

    @property
    def port(self) -> int:
        """The port it listens on."""
        if self._server is None:
            raise RuntimeError("the gateway does not listen")
        return self._server.port

    async def stop(self, *, drain_s: float = DRAIN_S) -> None:
        """Take no more connections, let requests end for up to ``drain_s`` seconds, then close everything."""
        if self._server is not None:
            await self._server.close(drain_s)
        for task in self._tasks:
            task.cancel()
        if self._training is not None:
            await self._training.close()
        self._leases.close()
        self._upstream.close()
        self._fleet.close()
        self._registrar.close()
        self._scans.close()
        self._lookups.close()
        self._catalog.close()
        if self._access_log is not None:
            await self._access_log.close()

    async def _listen(self) -> None:
        settings = self.settings
        authenticator = Authenticator(anonymous=settings.anonymous)
        limits = HttpLimits(
            max_body_bytes=settings.max_body_bytes,
            max_control_body_bytes=settings.max_artifact_bytes,
            head_timeout_s=settings.head_timeout_s,
            keep_alive_s=settings.keep_alive_s,
            max_connections=_affordable(settings.max_connections, other_nodes=max(0, len(self.nodes) - 1)),
        )
        self._server = await serve(
            settings.host,
            settings.port,
            data_routes=DATA_ROUTES,
            handler=self._data_plane(authenticator).handle,
            control=self._control(authenticator),
            limits=limits,
        )

    def _data_plane(self, authenticator: Authenticator) -> DataPlane:
        settings = self.settings
        tuning = Tuning(
            placed_excess=settings.placed_excess,
            spill_excess=settings.spill_excess,
            quiet_leases=settings.replica_leases,
        )
        return DataPlane(
            catalog=self._catalog,
            authenticator=authenticator,
            placer=Placer(self.nodes, tuning),
            leases=self._leases,
            upstream=self._upstream,
            metrics=self.metrics,
            access_log=self._access_log,
            timeouts=Timeouts(settings.request_timeout_s, settings.acquire_timeout_s),
            bounds=GenerationBounds(settings.max_choices, settings.max_generated_tokens, settings.max_logprobs),
            quotas=self.quotas,
            prefix_bytes=settings.prefix_bytes,
        )

    def _control(self, authenticator: Authenticator) -> web.Application:
        settings = self.settings
        services = Services(
            gateway=settings.name,
            catalog=self._catalog,
            registrar=self._registrar,
            store=open_store(Path(settings.store_dir), settings.store),
            nodes=self.nodes,
            fleet=self._fleet,
            members=self._members,
            authenticator=authenticator,
            collector=GatewayCollector(self.metrics, self.nodes, self._dropped),
            max_artifact_bytes=settings.max_artifact_bytes,
            scans=self._scans,
            lookups=self._lookups,
        )
        return make_control(services, data_paths=ROUTES, training=self._training)

    def _dropped(self) -> dict[str, int]:
        dropped = self._fleet.dropped()
        if self._server is not None:
            dropped |= {f"http_{reason}": count for reason, count in self._server.refused.items()}
        if self._access_log is not None:
            dropped["access_log"] = self._access_log.dropped
        return dropped


def _affordable(wanted: int, *, other_nodes: int) -> int:
    """Past the bound a client is told so; past the host's bound on open files nobody could be told anything."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    within = wanted if files == resource.RLIM_INFINITY else connections_within(files, other_nodes=other_nodes)
    affordable = min(wanted, within)
    if affordable < wanted:
        _log.warning("%d connections at most, not %d: this process may open %d files only", affordable, wanted, files)
    return affordable


async def run(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Serve until ``stop`` is set, then drain. Raises what ``Gateway.start`` raises."""
    gateway = await Gateway.start(settings)
    _log.info("gateway ready: %s on http://%s:%d", settings.name, settings.host, gateway.port)
    await stop.wait()
    _log.info("gateway stopping")
    await gateway.stop()
