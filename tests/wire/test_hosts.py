from __future__ import annotations

import pytest

from wire.hosts import is_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.255.255.254", "::1"])
def test_loopback_is_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "128.0.0.1", "127.999.0.1", "localhost.example.org"])
def test_everything_else_is_not(host: str) -> None:
    assert not is_loopback(host)
