"""What a sidecar process is told when it starts."""

from __future__ import annotations

import msgspec

from backends.interface import EngineSettings
from catalog.settings import CurveSettings


class SidecarSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes in bytes, times in seconds. ``run_dir`` holds what outlives the sidecar (engine records, adapter folders)."""

    node: str
    endpoint: str
    feed_endpoint: str
    store_dir: str
    run_dir: str
    log_dir: str
    engines: tuple[EngineSettings, ...]
    arena_bytes: int = 1 << 30
    loads_in_flight: int = 2
    loads_queued: int = 64
    waiters_per_load: int = 4096
    load_timeout_s: float = 60.0
    negative_first_s: float = 1.0
    negative_max_s: float = 300.0
    gateway_silence_s: float = 15.0
    full_state_every_s: float = 10.0
    registrar_feed: str = ""
    curve: CurveSettings | None = None
