"""What a gateway process is told when it starts."""

from __future__ import annotations

import msgspec

from catalog.artifacts import OWN_FOLDER, StoreLocation
from catalog.settings import CurveSettings


class NodeAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sidecar: where it takes requests and where it publishes its reports. ``public`` is its CURVE key, if any."""

    name: str
    endpoint: str
    feed_endpoint: str
    public: str = ""


class GatewaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes in bytes, times in seconds. ``anonymous`` lets requests without a key in (loopback only).

    ``store_dir`` holds the artifacts unless ``store`` says where. ``max_choices`` (``n`` times the prompts),
    ``max_generated_tokens`` (of all choices together) and ``max_logprobs`` bound what one request may ask of an engine.
    ``access_log`` writes a JSON line a request to standard output. ``training`` is the socket file of the training
    service, if there is one.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8080
    catalog_dir: str
    store_dir: str
    registrar_endpoint: str
    nodes: tuple[NodeAddress, ...]
    anonymous: bool = False
    max_body_bytes: int = 8 << 20
    max_artifact_bytes: int = 64 << 30
    request_timeout_s: float = 600.0
    acquire_timeout_s: float = 120.0
    keep_alive_s: float = 75.0
    head_timeout_s: float = 15.0
    max_connections: int = 16384
    access_log: bool = True
    store: StoreLocation = OWN_FOLDER
    max_choices: int = 128
    max_generated_tokens: int = 1 << 18
    max_logprobs: int = 20
    training: str = ""
    curve: CurveSettings | None = None
