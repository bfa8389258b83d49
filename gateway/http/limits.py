"""Bounds of the front door and of the upstream side. Sizes in bytes, times in seconds."""

from __future__ import annotations

from dataclasses import dataclass

# Above this a head and its body are two writes: joining them would cost a copy worth more than a system call.
JOINED_BODY_BYTES = 65536
# Files that a gateway has open beside its connections: the catalog, sockets to the host's sidecar, uploads; and for
# each node of another host.
FILES_OF_OUR_OWN = 128
FILES_A_NODE = 8


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one client connection may ask of a gateway.

    A body must be complete after ``body_timeout_s``, or have come at ``min_body_rate`` (bytes/s) over each such span.
    A client that takes nothing for ``stall_s`` of what is ready for it is given up. After a refusal the rest of the
    request is read and thrown away for ``linger_s``, so that the client gets to see the answer.
    """

    max_target_bytes: int = 8192
    max_head_bytes: int = 32768
    max_headers: int = 100
    max_body_bytes: int = 8 << 20
    max_control_body_bytes: int = 64 << 30
    head_timeout_s: float = 15.0
    body_timeout_s: float = 30.0
    min_body_rate: float = 16384.0
    keep_alive_s: float = 75.0
    stall_s: float = 60.0
    linger_s: float = 2.0
    max_connections: int = 16384

    def __post_init__(self) -> None:
        _require_positive(self)


def connections_within(open_files: int, *, other_nodes: int = 0) -> int:
    """How many clients a process that may open so many files can take: each may need a connection to an engine too."""
    return max(1, (open_files - FILES_OF_OUR_OWN - FILES_A_NODE * other_nodes) // 2)


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """What the pool may ask of one upstream, a (host, port).

    ``idle_s`` stays under the 5 s after which uvicorn closes an idle connection, so that a request seldom meets a
    connection that is just being closed.
    """

    max_connections: int = 4096
    max_idle: int = 512
    idle_s: float = 4.0
    connect_timeout_s: float = 5.0
    max_head_bytes: int = 65536
    max_headers: int = 200

    def __post_init__(self) -> None:
        _require_positive(self)


def _require_positive(limits: HttpLimits | UpstreamLimits) -> None:
    for name in limits.__slots__:
        if not getattr(limits, name) > 0:
            raise ValueError(f"{name} must be positive, not {getattr(limits, name)!r}")
