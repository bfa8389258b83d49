from __future__ import annotations

import pytest

from wire.hosts import is_everywhere, is_loopback, is_port


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.255.255.254", "::1"])
def test_loopback_is_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "128.0.0.1", "127.999.0.1", "localhost.example.org"])
def test_everything_else_is_not(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("host", "everywhere"), [("", True), ("0.0.0.0", True), ("::", True), ("10.0.0.1", False), ("a", False)]
)
def test_all_addresses_are_none_to_be_reached_at(host: str, everywhere: bool) -> None:
    assert is_everywhere(host) is everywhere


def test_ports_are_from_1_to_65535() -> None:
    assert [is_port(number) for number in (0, 1, 65535, 65536)] == [False, True, True, False]
