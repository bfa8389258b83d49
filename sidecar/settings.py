"""What a sidecar process is told when it starts."""

from __future__ import annotations

import msgspec

from backends.interface import EngineSettings
from catalog.artifacts import OWN_FOLDER, StoreLocation
from catalog.settings import CurveSettings

from .policies import PolicyName


class TrainerAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a training service offers revisions while they are written, and where their chunks are asked for.

    ``public`` is its CURVE key, which TCP needs.
    """

    endpoint: str
    feed_endpoint: str
    public: str = ""


class NodeTuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an operator may choose of a node. Sizes in bytes, times in seconds.

    How many loads are in flight at once follows what they take, between ``loads_in_flight_min`` and
    ``loads_in_flight``; where an engine takes loads at its own pace, those that have their bytes are not counted.
    ``loads_queued`` and, within it, ``loads_queued_per_tenant`` bound those that wait for their turn; the bounds are
    wider where so many more start within ``loads_queued_s``, and never with 0. While others ask an engine for what it
    serves, ``tenant_loads_per_s`` of one tenant's start for it, or as few as take ``tenant_loads_share`` of its time.

    An adapter keeps its slot for ``min_residency_s`` after it came, while another can go; and a tenant that has no more
    than its share of an engine's slots keeps those that it used within ``slot_share_s``.

    A load that found no slot or no room for ``slot_age_bound_s`` may take them from residents: a slot gets no new
    leases until it is free. An adapter whose lease was lost (its gateway fell silent) stays ``lost_lease_hold_s`` more
    in an engine that cannot tell whether it is still in use. So does what a new sidecar finds there, until all gateways
    heard within ``gateway_silence_s`` have told what they hold.

    ``peer_transfers`` is how many transfers to other nodes may run at once; with 0 the node neither gives bytes to
    others nor asks them for any.

    With an object store, ``disk_bytes`` of copies of what was fetched are kept; with 0, none are. ``cache_policy``
    decides what leaves them, and what leaves the arena.
    """

    arena_bytes: int = 1 << 30
    cache_policy: PolicyName = PolicyName.ADAPTIVE
    disk_bytes: int = 8 << 30
    peer_transfers: int = 8
    loads_in_flight_min: int = 1
    loads_in_flight: int = 8
    loads_queued: int = 64
    loads_queued_per_tenant: int = 48
    loads_queued_s: float = 20.0
    waiters_per_load: int = 4096
    tenant_loads_per_s: float = 4.0
    tenant_loads_share: float = 0.1
    load_timeout_s: float = 60.0
    negative_first_s: float = 1.0
    negative_max_s: float = 300.0
    gateway_silence_s: float = 15.0
    full_state_every_s: float = 10.0
    slot_age_bound_s: float = 5.0
    min_residency_s: float = 2.0
    slot_share_s: float = 60.0
    lost_lease_hold_s: float = 60.0


class SidecarSettings(NodeTuning, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``store_dir`` holds the artifacts unless ``store`` says where; ``run_dir`` holds what outlives the sidecar
    (engine records, adapter folders); ``disk_dir`` holds the disk's copies, of which there are none without it.

    With a ``registrar_feed``, what is published for policies that this node holds is fetched ahead while nobody waits
    for anything; what ``trainers`` make for them is pulled from there at once. Other nodes take bytes at
    ``bytes_endpoint``; empty, they take none.
    """

    node: str
    endpoint: str
    feed_endpoint: str
    bytes_endpoint: str = ""
    store_dir: str
    run_dir: str
    log_dir: str
    engines: tuple[EngineSettings, ...]
    registrar_feed: str = ""
    trainers: tuple[TrainerAddress, ...] = ()
    disk_dir: str = ""
    store: StoreLocation = OWN_FOLDER
    curve: CurveSettings | None = None
