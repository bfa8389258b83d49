"""What gateways and sidecars say to each other: leases one way, node reports the other."""

from __future__ import annotations

import enum

import msgspec

from .outcomes import Outcome


class Residency(enum.StrEnum):
    """Where a revision stands on a node. ``serving`` means: in a slot of at least one engine."""

    ABSENT = "absent"
    FETCHING = "fetching"
    RESIDENT = "resident"
    INSTALLING = "installing"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


class Health(enum.StrEnum):
    """How an engine is."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class NodeMessage(msgspec.Struct, frozen=True, tag=True, tag_field="t", omit_defaults=True, kw_only=True):
    """Base of all messages between gateways and a sidecar."""


class Acquire(NodeMessage, frozen=True, kw_only=True):
    """Ask for a lease. An empty ``digest`` asks for the base itself, which never waits behind a cold load.

    ``lease`` is chosen by the gateway, unique within ``gateway``; the same lease asked twice is one lease.
    ``instance`` is the gateway's life, as in ``GatewayAlive``: whichever message of a new life comes first ends what
    the former one held.
    ``ttl_s`` bounds how long the lease lives without a release; asking for it again renews it.
    The wire's own request deadline says how long the asker will wait.
    """

    gateway: str
    instance: str
    lease: int
    base: str
    tenant: str = ""
    policy: str = ""
    digest: str = ""
    size: int = 0
    rank: int = 0
    ttl_s: float = 600.0


class Granted(NodeMessage, frozen=True, kw_only=True):
    """Send the request to ``host:port`` with ``model`` set to ``adapter`` (or the base's served name).

    ``waited`` says whether the grant had to wait for a load: hot grants are immediate. ``token`` is the bearer token
    that the engine wants with each request, if any; it goes into no log.
    """

    lease: int
    engine: str
    host: str
    port: int
    adapter: str
    waited: bool = False
    token: str = ""


class Refused(NodeMessage, frozen=True, kw_only=True):
    """No lease. ``elsewhere``: another node may do better (this one is full, draining or lost its engine)."""

    lease: int
    outcome: Outcome
    message: str
    field: str | None = None
    retry_after_s: float | None = None
    elsewhere: bool = False


class Release(NodeMessage, frozen=True, kw_only=True):
    """One-way. ``failed_engine`` names an engine that broke under the gateway: its health is checked at once."""

    gateway: str
    instance: str
    leases: tuple[int, ...]
    failed_engine: str = ""


class GatewayAlive(NodeMessage, frozen=True, kw_only=True):
    """One-way, every few seconds: leases of a gateway that falls silent are dropped after a grace period.

    ``instance`` changes when the gateway restarts, so that the leases of its former life can go at once.
    """

    gateway: str
    instance: str


class AskState(NodeMessage, frozen=True, kw_only=True):
    """Ask for full state (a gateway that starts, or found a gap in the reports)."""


class Prefetch(NodeMessage, frozen=True, kw_only=True):
    """A hint, one-way: have these bytes in the arena, if there is room and idle bandwidth."""

    digest: str
    size: int


class EngineReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One engine of a node. ``serving`` lists the adapters in its slots; ``outstanding`` counts leases.

    ``pid`` is its process, where the node started it; ``since`` is when its health last changed, in Unix seconds. 0 is
    what is not known. ``restarts`` counts its lives after the first that this sidecar saw.
    """

    engine: str
    backend: str
    base: str
    fingerprint: str
    health: Health
    detail: str = ""
    slots: int = 0
    max_rank: int = 0
    targets: tuple[str, ...] = ()
    serving: tuple[str, ...] = ()
    outstanding: int = 0
    pid: int = 0
    since: float = 0.0
    restarts: int = 0


class NodeReport(NodeMessage, frozen=True, kw_only=True):
    """Full state of a node: what ``AskState`` answers, and what goes out now and then on the feed.

    ``number`` is the newest of the feed when it was taken: it holds all that messages up to that number tell.
    ``fetches``, ``installs`` and ``rejected`` count since the sidecar started: revisions fetched into the arena,
    installs that an engine confirmed, and acquires refused because a bound was reached.
    """

    node: str
    endpoint: str
    epoch: int
    engines: tuple[EngineReport, ...]
    resident: dict[str, Residency]
    arena_bytes: int
    arena_used: int
    loads_in_flight: int = 0
    loads_queued: int = 0
    draining: bool = False
    base_names: tuple[str, ...] = ()
    fetches: int = 0
    installs: int = 0
    rejected: int = 0
    number: int = 0


class NodeDelta(NodeMessage, frozen=True, kw_only=True):
    """What changed since the previous number of the feed. Absent keys did not change.

    ``residency`` maps a digest to its new state (``absent`` removes it); ``engines`` replaces whole engine reports.
    """

    node: str
    residency: dict[str, Residency] = {}
    engines: tuple[EngineReport, ...] = ()
    arena_used: int = -1
    loads_in_flight: int = -1
    loads_queued: int = -1
    fetches: int = -1
    installs: int = -1
    rejected: int = -1


AskOfNode = Acquire | Release | GatewayAlive | AskState | Prefetch
AnswerOfNode = Granted | Refused | NodeReport
ReportOfNode = NodeReport | NodeDelta
