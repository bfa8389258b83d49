"""The commands about the nodes of a fleet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .command import Roost
from .stub_gateway import stub_gateway

NODE = {
    "node": "gpu-1", "state": "serving", "endpoint": "tcp://10.0.0.1:7001", "bases": ["smol"], "engines": 2,
    "engines_ready": 1, "slots": 8, "slots_used": 3, "leases": 4, "own_leases": 2, "loads_in_flight": 1,
    "loads_queued": 5, "loads_limit": 2, "queued_by_tenant": {"other": 1, "acme": 4}, "load_s": 0.2, "load_rate": 2.5,
    "resident": 9, "arrived_bytes": {"store": 1024, "peer": 3 << 20}, "given_bytes": 7, "peer_faults": {"gpu-3": 2},
}  # fmt: skip


def test_nodes_are_listed_with_what_is_wrong_with_their_file(roost: Roost, tmp_path: Path) -> None:
    silent = NODE | {"node": "gpu-2", "state": "silent", "loads_queued": 0}
    listed = {"nodes": [NODE, silent], "trouble": "nodes.toml: [bold] is no TOML"}
    with stub_gateway({"GET /roost/v1/nodes": (200, listed)}) as gateway:
        done = roost("node", "list", cwd=tmp_path, url=gateway.url)
        told = roost("node", "list", "--json", cwd=tmp_path, url=gateway.url)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[1].startswith("gpu-1 serving 1 of 2 3 of 8 4 1 of 2 smol 5, 2.5/s: acme 4")
    assert "Node gpu-3 gave wrong bytes to node gpu-1 2 time(s)" in " ".join(done.stderr.split())
    assert any(line.startswith("gpu-2 silent 1 of 2 3 of 8 4 1 of 2 smol 0") for line in lines)
    assert "Not all that is listed is in force: nodes.toml: [bold] is no TOML" in " ".join(done.stderr.split())
    assert json.loads(told.stdout) == listed


def test_a_node_is_shown_with_where_its_bytes_came_from(roost: Roost, tmp_path: Path) -> None:
    with stub_gateway({"GET /roost/v1/nodes/gpu-1": (200, NODE)}) as gateway:
        done = roost("node", "show", "gpu-1", cwd=tmp_path, url=gateway.url)
    assert done.stdout == (
        "Node gpu-1 is serving, 4 request(s)\n"
        "9 revision(s) there or coming; bytes from: peer 3.0 MiB, store 1.0 KiB\n"
        "given to other nodes: 7 B\n"
    )
    assert "Node gpu-3 gave wrong bytes to node gpu-1 2 time(s)" in " ".join(done.stderr.split())


@pytest.mark.parametrize(("command", "state"), [("cordon", "cordoned"), ("uncordon", "serving")])
def test_a_node_is_cordoned_and_put_back(roost: Roost, tmp_path: Path, command: str, state: str) -> None:
    answers = {f"POST /roost/v1/nodes/gpu-1/{command}": (200, NODE | {"state": state})}
    with stub_gateway(answers) as gateway:
        done = roost("node", command, "gpu-1", cwd=tmp_path, url=gateway.url)
        missing = roost("node", command, "../keys", cwd=tmp_path, url=gateway.url)
    assert done.stdout == f"Node gpu-1 is {state}, 4 request(s)\n"
    assert missing.returncode == 5
    assert gateway.asked[-1].path == f"/roost/v1/nodes/..%2Fkeys/{command}"


def test_a_drain_waits_and_tells_what_is_left_when_its_time_is_up(roost: Roost, tmp_path: Path) -> None:
    path = "POST /roost/v1/nodes/gpu-1/drain"
    with stub_gateway({path: (200, NODE | {"state": "drained", "leases": 0})}) as gateway:
        done = roost("node", "drain", "gpu-1", cwd=tmp_path, url=gateway.url)
        assert (done.returncode, done.stdout) == (0, "Node gpu-1 is drained, 0 request(s)\n")
        assert gateway.asked[0].json == {"wait_s": 20.0}
    cordoned = NODE | {"state": "cordoned"}
    with stub_gateway({path: (200, cordoned), "GET /roost/v1/nodes/gpu-1": (200, cordoned)}) as gateway:
        done = roost("node", "drain", "gpu-1", "--timeout", "0.05", cwd=tmp_path, url=gateway.url)
        assert done.returncode == 7
        assert "gets nothing new, but is cordoned with 4 request(s) there" in done.stderr
        assert gateway.asked[0].json["wait_s"] <= 0.05


def test_a_drain_cordons_once_and_ends_where_somebody_puts_the_node_back(roost: Roost, tmp_path: Path) -> None:
    answers = {
        "POST /roost/v1/nodes/gpu-1/drain": (200, NODE | {"state": "cordoned"}),
        "GET /roost/v1/nodes/gpu-1": (200, NODE),
    }
    with stub_gateway(answers) as gateway:
        done = roost("node", "drain", "gpu-1", cwd=tmp_path, url=gateway.url)
        assert [(asked.method, asked.path.rpartition("/")[2]) for asked in gateway.asked] == [
            ("POST", "drain"), ("GET", "gpu-1"),
        ]  # fmt: skip
    assert done.returncode != 0
    assert "node gpu-1 was put back into service meanwhile" in " ".join(done.stderr.split())
