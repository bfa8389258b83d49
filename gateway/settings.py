"""What a gateway process is told when it starts."""

from __future__ import annotations

import msgspec

from catalog.artifacts import OWN_FOLDER, StoreLocation
from catalog.settings import CurveSettings

from .placement.tuning import PLACED_EXCESS, SPILL_EXCESS
from .popularity import COOLDOWN_S, REPLICA_LEASES
from .quotas import Quota


class NodeAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sidecar: where it takes requests and where it publishes its reports. ``public`` is its CURVE key, if any:
    over ``tcp://`` it must have one.
    """

    name: str
    endpoint: str
    feed_endpoint: str
    public: str = ""


class GatewayTuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an operator may choose of a gateway. Sizes in bytes, times in seconds. ``anonymous`` lets requests without a
    key in (loopback only).

    ``max_choices`` (``n`` times the prompts), ``max_generated_tokens`` (of all choices together) and ``max_logprobs``
    bound what one request may ask of an engine. ``quotas`` bound what tenants may ask in a minute, ``default_quota``
    those that have none of their own; each of ``gateways`` gateways lets its share of them in.
    A policy gets one copy more for each ``replica_leases`` that it has on average, and one less every
    ``replica_cooldown_s`` while it has fewer; ``placed_excess`` and ``spill_excess`` are how much more than its share a
    node may have. With ``prefix_bytes`` requests that begin with the same so many go to the same of several copies.
    ``access_log`` writes a JSON line a request to standard output.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    anonymous: bool = False
    max_body_bytes: int = 8 << 20
    max_artifact_bytes: int = 64 << 30
    request_timeout_s: float = 600.0
    acquire_timeout_s: float = 120.0
    keep_alive_s: float = 75.0
    head_timeout_s: float = 15.0
    max_connections: int = 16384
    access_log: bool = True
    max_choices: int = 128
    max_generated_tokens: int = 1 << 18
    max_logprobs: int = 20
    quotas: dict[str, Quota] = {}
    default_quota: Quota = Quota()
    gateways: int = 1
    replica_leases: int = REPLICA_LEASES
    replica_cooldown_s: float = COOLDOWN_S
    placed_excess: float = PLACED_EXCESS
    spill_excess: float = SPILL_EXCESS
    prefix_bytes: int = 0


class GatewaySettings(GatewayTuning, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``nodes`` are those of the start; ``nodes_file`` names a TOML file that lists more of them and is followed while
    the gateway runs. ``store_dir`` holds the artifacts unless ``store`` says where. ``training`` is the socket file of
    the training service, if there is one.
    """

    name: str
    catalog_dir: str
    store_dir: str
    registrar_endpoint: str
    nodes: tuple[NodeAddress, ...]
    nodes_file: str = ""
    store: StoreLocation = OWN_FOLDER
    training: str = ""
    curve: CurveSettings | None = None
