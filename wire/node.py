"""What gateways and sidecars say to each other: leases one way, node reports the other."""

from __future__ import annotations

import enum

import msgspec

from .outcomes import Outcome
from .peers import Peer


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
    ``ttl_s``, positive and finite, bounds how long the lease lives without a release; asking for it again renews it.
    The wire's own request deadline says how long the asker will wait.
    Engines of the backend ``not_by`` have no way to be asked the request: the lease is on another one, or on none.
    ``peers`` are nodes that have the bytes, or are getting them, as far as the gateway knows.
    ``failed_engine`` was leased for the same request just now and could not be reached: another one is asked for, if
    the node has one of that base.
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
    not_by: str = ""
    ttl_s: float = 600.0
    peers: tuple[Peer, ...] = ()
    failed_engine: str = ""


class Granted(NodeMessage, frozen=True, kw_only=True):
    """Send the request to ``host:port`` with ``model`` set to ``adapter`` (or the base's served name).

    ``waited`` says whether the grant had to wait for a load: hot grants are immediate. ``token`` is the bearer token
    that the engine wants with each request, if any; it goes into no log. ``backend`` says how the engine is asked.
    """

    lease: int
    engine: str
    host: str
    port: int
    adapter: str
    waited: bool = False
    token: str = ""
    backend: str = "vllm"


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


class FleetKeys(NodeMessage, frozen=True, kw_only=True):
    """One-way: the CURVE keys of all nodes that the gateway knows, by name. They may take bytes from this one.

    Told where the connection is new or the fleet has changed, and now and then; it replaces what that gateway told
    before.
    """

    gateway: str
    keys: dict[str, str]


class AskState(NodeMessage, frozen=True, kw_only=True):
    """Ask for full state (a gateway that starts, or found a gap in the reports)."""


class Cordon(NodeMessage, frozen=True, kw_only=True):
    """Take the node out of service, or back in; a request, answered with full state.

    A cordoned node grants no new lease and starts no load that has not begun (refused ``elsewhere``); leases and loads
    under way go on. It is drained once no engine has an outstanding lease. It stays so over restarts of its sidecar.
    """

    on: bool


class HeldLease(msgspec.Struct, frozen=True):
    """A lease as its gateway has it, which may still be used for ``ttl_s``; ``adapter`` is empty for the base."""

    lease: int
    engine: str
    adapter: str
    ttl_s: float


class Holding(NodeMessage, frozen=True, kw_only=True):
    """One-way: all that a gateway holds of this node, so that neither side's crash leaves the books of the two apart.

    Sent when the node's epoch changed or its connection came back, and now and then. ``asked`` are the leases that the
    gateway waits for; ``newest`` is the highest number that it has used here, so that whatever the node has of it up to
    that number, and is not named, was given back.
    """

    gateway: str
    instance: str
    leases: tuple[HeldLease, ...]
    asked: tuple[int, ...] = ()
    newest: int = 0


class EngineReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One engine of a node. ``serving`` lists the adapters in its slots; ``outstanding`` counts leases.

    ``leases`` counts them by adapter, in the order of ``serving``. ``changing`` counts slots that are neither free nor
    serving: an adapter is being brought in or taken out.
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
    leases: tuple[int, ...] = ()
    changing: int = 0


class NodeReport(NodeMessage, frozen=True, kw_only=True):
    """Full state of a node: what ``AskState`` answers, and what goes out now and then on the feed.

    ``number`` is the newest of the feed when it was taken: it holds all that messages up to that number tell.
    ``fetches``, ``installs`` and ``rejected`` count since the sidecar started: revisions fetched into the arena,
    installs that an engine confirmed, and acquires refused because a bound was reached. ``audit_findings`` counts what
    did not add up in its books: never anything but 0, or it is a bug.
    ``load_s`` is how long a cold load takes lately from its start to its serving, ``load_rate`` how many of those
    that wait start in a second, ``loads_limit`` how many may run at once now. ``queued_by_tenant`` counts waiting loads
    of the tenants that have most of them.
    ``bytes_endpoint`` is where other nodes may take bytes, empty where they may not. ``arrived_bytes`` counts those
    that came into the arena by where they came from (``store``, ``disk``, ``peer``, ``trainer``), ``given_bytes``
    those that went to other nodes; ``peer_faults`` counts, by node, how often one gave something else than was asked.
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
    load_s: float = 0.0
    load_rate: float = 0.0
    loads_limit: int = 0
    queued_by_tenant: dict[str, int] = {}
    audit_findings: int = 0
    bytes_endpoint: str = ""
    arrived_bytes: dict[str, int] = {}
    given_bytes: int = 0
    peer_faults: dict[str, int] = {}


class NodeDelta(NodeMessage, frozen=True, kw_only=True):
    """What changed since the previous number of the feed. Absent keys did not change.

    ``residency`` maps a digest to its new state (``absent`` removes it); ``engines`` replaces whole engine reports;
    ``queued_by_tenant``, ``arrived_bytes`` and ``peer_faults`` replace all of it, None where it did not change.
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
    load_s: float = -1.0
    load_rate: float = -1.0
    loads_limit: int = -1
    queued_by_tenant: dict[str, int] | None = None
    audit_findings: int = -1
    draining: bool | None = None
    arrived_bytes: dict[str, int] | None = None
    given_bytes: int = -1
    peer_faults: dict[str, int] | None = None


AskOfNode = Acquire | Release | GatewayAlive | FleetKeys | AskState | Cordon | Holding
AnswerOfNode = Granted | Refused | NodeReport
ReportOfNode = NodeReport | NodeDelta
