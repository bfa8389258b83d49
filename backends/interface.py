"""The one interface of all engine backends: what a sidecar may ask of an engine.

A driver talks to one engine process over its own protocol, keeps no adapter bytes and decides nothing about slots.
It imports no torch: the sidecar lives without it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

import msgspec

from backends.dtypes import AUTO, NAMES
from wire.node import Health as Health
from wire.outcomes import EngineFailed, Unfit

# what engines can be told to compute in
DTYPES = (AUTO, *NAMES)
DEVICES = ("auto", "cpu", "cuda")


class Removal(enum.StrEnum):
    """What an engine answers to a removal. BUSY: a scheduled request names the adapter; ask again later.

    FORGOTTEN: a stock server dropped the name, but its cache decides when the adapter's memory is free.
    """

    REMOVED = "removed"
    BUSY = "busy"
    ABSENT = "absent"
    FORGOTTEN = "forgotten"


class EngineLimits(msgspec.Struct, frozen=True):
    """``slots`` counts adapters beside the base; ``max_rank`` the largest rank, 0 where it takes no
    adapters of its base; ``targets`` the adaptable modules, by our names.

    ``serves_base``: a request of the base itself is answered rightly, also beside those of adapters.

    ``calls_at_once``: so many installs and removals may be under way. More than one only where the engine itself lets
    its steps run between them.
    """

    slots: int
    max_rank: int
    targets: tuple[str, ...]
    served_base: str
    dtype: str
    removes_for_real: bool
    serves_base: bool = True
    calls_at_once: int = 1


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine of a node. ``attach`` names a running server (``host:port``); otherwise we start one.

    ``port`` 0 takes a free one. ``fingerprint`` is the base's, as registered in the catalog. An engine that we start
    gets a bearer token of its own; ``attach_key_env`` names the environment variable that holds a running server's.

    A CPU server without our plug-in may answer a request of the base with one of the adapters that run beside it.
    Requests of the base don't go there, unless ``serve_base_unsafely`` says so: right for a server that is never
    asked for an adapter.
    """

    name: str
    backend: str = "vllm"
    base: str
    model_path: str = ""
    fingerprint: str
    attach: str = ""
    attach_key_env: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    slots: int = 8
    max_rank: int = 16
    dtype: str = "auto"
    max_model_len: int = 0
    kv_cache_bytes: int = 0
    max_num_seqs: int = 0
    device: str = "auto"
    extra_args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    start_timeout_s: float = 600.0
    serve_base_unsafely: bool = False


class Installable(msgspec.Struct, frozen=True):
    """A revision whose bytes are in the arena for as long as the install runs.

    ``view()`` gives the revision file's bytes; the caller must not keep the view beyond the install.
    ``segment``, ``offset``, ``length`` and ``generation`` name the extent for engines that map the arena themselves.
    """

    adapter: str
    digest: str
    rank: int
    segment: str
    offset: int
    length: int
    generation: int
    view: Callable[[], memoryview]


class InstallRefused(Unfit):
    """The engine can't run this adapter (rank, module, shape): trying again will not help."""


class InstallFailed(EngineFailed):
    """The install did not happen, and the slot is as it was before: trying again may help."""


class InstallUncertain(EngineFailed):
    """The engine did not answer in time: it may still complete. The extent stays pinned until the engine tells."""


class EngineBackend(Protocol):
    """A driver for one engine. Every call is bounded in time; errors are RoostErrors."""

    settings: EngineSettings
    # why the engine is DEAD, in a line or more for a person, or what should be known of a READY one; empty otherwise
    detail: str

    async def start(self) -> None:
        """Start the engine, or adopt the one that an earlier sidecar started, or attach. Returns once it is spawned."""

    async def health(self) -> Health:
        """What the engine says of itself now, and whether its process lives."""

    async def limits(self) -> EngineLimits:
        """Known once the engine is READY."""

    async def install(self, adapter: Installable, timeout_s: float) -> None:
        """Make ``adapter.adapter`` answer. Raises InstallRefused, InstallFailed or InstallUncertain."""

    async def remove(self, adapter: str, timeout_s: float) -> Removal:
        """Give the adapter's slot back, unless a scheduled request names it."""

    async def installed(self) -> frozenset[str]:
        """All adapters that answer now, strangers' too: read from the engine, not remembered."""

    async def stop(self) -> None:
        """End an engine that we started; leave one that we attached to."""

    async def detach(self) -> None:
        """Close our connections and leave the engine running."""

    def address(self) -> tuple[str, int]:
        """(host, port) of the engine's HTTP server."""

    @property
    def pid(self) -> int | None:
        """The engine's process, where it is one of this host that we started."""

    def token(self) -> str:
        """The bearer token that each request must carry; empty where the engine wants none. Never to be logged."""
