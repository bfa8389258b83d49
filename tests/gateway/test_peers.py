"""Whom gateways tell nodes to ask for bytes; and nodes of a fleet over TCP that do."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from msgspec import structs

from gateway.fleet import Fleet
from gateway.leases import LeaseDesk
from gateway.nodes import NodeTable
from gateway.peers import PeerDirectory
from gateway.placement import Demand
from gateway.settings import NodeAddress
from tests.sidecar.bench import BASE
from tests.sidecar.conftest import Store, config, running, until
from tests.sidecar.fake_engine import FakeBackend
from wire.curve import CurveKeys, make_keys
from wire.node import NodeDelta, Residency
from wire.peers import Peer

from .fleet_states import digest_of, report

DIGEST = digest_of(1)
RESIDENT, FETCHING, SERVING = Residency.RESIDENT, Residency.FETCHING, Residency.SERVING


class Known:
    """A gateway's knowledge of nodes, each on a host of its own."""

    def __init__(self, names: str = "abcde") -> None:
        self.table = NodeTable()
        self.now = 0.0
        self.addresses = {
            name: NodeAddress(name, f"tcp://10.0.0.{number}:7001", f"tcp://10.0.0.{number}:7002", f"key of {name}")
            for number, name in enumerate(names, 1)
        }
        for name in self.addresses:
            node = self.table.add(name)
            node.replace(structs.replace(report(name), bytes_endpoint="tcp://0.0.0.0:40000"))
        self.peers = PeerDirectory(self.table, self.addresses.get, clock=lambda: self.now)

    def stands(self, state: Residency, *names: str) -> None:
        for name in names:
            self.table[name].apply(NodeDelta(node=name, residency={DIGEST: state}))

    def told(self, name: str) -> list[str]:
        return [peer.node for peer in self.peers(self.table[name], DIGEST)]


@pytest.fixture
def known() -> Known:
    return Known()


def test_a_node_is_told_who_has_the_bytes_and_where(known: Known) -> None:
    known.stands(RESIDENT, "b")
    assert known.peers(known.table["a"], DIGEST) == (Peer("b", "tcp://10.0.0.2:40000", "key of b"),)


def test_those_who_have_it_are_told_of_in_turn_and_no_more_than_two(known: Known) -> None:
    known.stands(SERVING, "b", "c", "d", "e")
    told = [known.told("a") for _ in range(8)]
    assert all(len(names) == 2 for names in told)
    assert {name for names in told for name in names} == {"b", "c", "d", "e"}


@pytest.mark.parametrize("state", [RESIDENT, FETCHING, SERVING])
def test_who_has_it_or_is_getting_it_is_told_of_nobody(known: Known, state: Residency) -> None:
    known.stands(RESIDENT, "b")
    known.stands(state, "a")
    assert known.told("a") == []


def silent(known: Known) -> None:
    known.table["b"].fall_silent()


def doubtful(known: Known) -> None:
    known.table["b"].doubt()


def gives_nothing(known: Known) -> None:
    known.table["b"].bytes_endpoint = ""


def left(known: Known) -> None:
    known.table.remove("b")


def lost_it(known: Known) -> None:
    known.stands(Residency.FAILED, "b")


@pytest.mark.parametrize("change", [silent, doubtful, gives_nothing, left, lost_it])
def test_nobody_is_sent_to_a_node_that_will_not_answer(known: Known, change: Callable[[Known], None]) -> None:
    known.stands(RESIDENT, "b")
    change(known)
    assert known.told("a") == []


def test_of_those_who_ask_at_once_one_goes_to_the_store(known: Known) -> None:
    assert [known.told(name) for name in "abcd"] == [[], ["a"], ["a"], ["a"]]
    assert known.told("a") == [], "asked again, it is not sent to itself"
    known.stands(RESIDENT, "c")
    assert known.told("d") == ["c"], "who has it comes before who is getting it"


def test_of_many_one_more_goes_to_the_store_for_each_so_many() -> None:
    known = Known("abcdefghijklmnopqrst")
    told = [known.told(name) for name in "abcdefghijklmnopqrst"]
    assert told == [[], *8 * [["a"]], [], *8 * [["j"]], [], ["s"]]


def test_one_that_asks_often_counts_once(known: Known) -> None:
    assert known.told("a") == []
    assert [known.told("b") for _ in range(20)] == 20 * [["a"]]
    assert known.told("c") == ["a"], "b was never sent to the store"


def test_who_asks_often_while_it_goes_to_the_store_is_waited_for_by_no_more_than_others_are() -> None:
    known = Known("abcdefghij")
    told = []
    for name in "bcdefghij":
        assert known.told("a") == []
        told.append(known.told(name))
    assert told == [*8 * [["a"]], []]


def test_who_went_to_the_store_long_ago_is_not_waited_for(known: Known) -> None:
    known.told("a")
    known.now = 31.0
    assert known.told("b") == []
    assert known.told("c") == ["b"]


def test_what_another_gateway_sent_to_the_store_is_known_by_its_report(known: Known) -> None:
    known.stands(FETCHING, "e")
    assert known.told("a") == ["e"]


@pytest.mark.parametrize(
    ("asker", "other", "gives_at", "reached"),
    [
        ("ipc:///a", "ipc:///b", "ipc:///b-bytes", "ipc:///b-bytes"),
        ("tcp://10.0.0.1:1", "ipc:///b", "ipc:///b-bytes", None),
        ("ipc:///a", "tcp://10.0.0.2:1", "ipc:///b-bytes", None),
        ("ipc:///a", "tcp://127.0.0.1:1", "ipc:///b-bytes", "ipc:///b-bytes"),
        ("ipc:///a", "tcp://10.0.0.2:1", "tcp://10.0.0.2:9", "tcp://10.0.0.2:9"),
        ("tcp://10.0.0.1:1", "tcp://10.0.0.2:1", "tcp://0.0.0.0:9", "tcp://10.0.0.2:9"),
        ("tcp://10.0.0.1:1", "tcp://0.0.0.0:1", "tcp://0.0.0.0:9", None),
        ("tcp://10.0.0.1:1", "tcp://127.0.0.1:1", "tcp://127.0.0.1:9", None),
        ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "tcp://127.0.0.1:9", "tcp://127.0.0.1:9"),
        ("tcp://10.0.0.1:1", "ipc:///b", "tcp://10.0.0.2:9", "tcp://10.0.0.2:9"),
    ],
)  # fmt: skip
def test_only_places_that_the_asker_can_reach(
    known: Known, asker: str, other: str, gives_at: str, reached: str | None
) -> None:
    known.addresses["a"] = structs.replace(known.addresses["a"], endpoint=asker)
    known.addresses["b"] = structs.replace(known.addresses["b"], endpoint=other)
    known.table["b"].bytes_endpoint = gives_at
    known.stands(RESIDENT, "b")
    assert [peer.endpoint for peer in known.peers(known.table["a"], DIGEST)] == ([reached] if reached else [])


async def test_nodes_of_a_fleet_read_the_store_once(tmp_path: Path) -> None:
    """Three sidecars over TCP with keys, which the gateway makes known to each other; no configuration says more."""
    store, data = Store(tmp_path / "store"), os.urandom(3_000_000)
    digest = store.put(data)
    keys = {name: make_keys() for name in ("gateway", "n1", "n2", "n3")}
    gateway = CurveKeys(*keys["gateway"])
    addresses, sidecars = [], {}
    async with AsyncExitStack() as stack:
        for name in ("n1", "n2", "n3"):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="roost-")))
            anywhere = dict.fromkeys(("endpoint", "feed_endpoint", "bytes_endpoint"), "tcp://127.0.0.1:*")
            settings = config(folder, store, node=name, arena_bytes=16 << 20, **anywhere)
            curve = CurveKeys(*keys[name], peers=(gateway.public,))
            sidecar = await stack.enter_async_context(
                running(structs.replace(settings, curve=curve), FakeBackend())  # type: ignore[arg-type]
            )
            addresses.append(NodeAddress(name, sidecar._responder.endpoint, sidecar._feed.endpoint, keys[name][0]))
            sidecars[name] = sidecar
        table = NodeTable()
        fleet = Fleet(addresses, table, gateway="g", instance="i", curve=gateway)
        loop = asyncio.get_running_loop()
        desk = LeaseDesk(
            fleet.requesters, gateway="g", instance="i", peers=PeerDirectory(table, fleet.address_of, clock=loop.time)
        )
        await until(lambda: len(table) == 3 and all(node.heard for node in table))
        await until(lambda: all(sidecar._giver and sidecar._giver._keys for sidecar in sidecars.values()))
        for name in sidecars:
            giver = sidecars["n1"]._giver
            assert giver and giver.knows(Peer(name, "tcp://127.0.0.1:9", keys["n2"][0])) is (name == "n2")
        demand = Demand(policy="acme/p", tenant="acme", digest=digest, base=BASE, fingerprint="f", rank=8)
        loads = (desk.acquire(node, demand, size=len(data), timeout_s=20.0, use_s=60.0) for node in table)
        await asyncio.gather(*loads)
        await until(lambda: sum(node.arrived_bytes.get("peer", 0) for node in table) == 2 * len(data))
        assert sum(node.arrived_bytes.get("store", 0) for node in table) == len(data)
        await until(lambda: sum(node.given_bytes for node in table) == 2 * len(data))
        desk.close()
        fleet.close()
