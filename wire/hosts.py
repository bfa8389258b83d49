"""Names and addresses of hosts."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether ``host``, a name or an address, is this machine's loopback: nobody else can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_everywhere(host: str) -> bool:
    """Whether ``host`` stands for all addresses of this machine: one to listen on, not one to be reached at."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_port(number: int) -> bool:
    """Whether TCP has such a port that somebody may be reached at."""
    return 0 < number < 65536
