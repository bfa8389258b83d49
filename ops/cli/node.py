"""``roost node``: the fleet's nodes, and taking one out of service without losing a request."""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from wire.outcomes import DeadlinePassed, VersionConflict

from .client import ApiClient
from .output import ERR, size_of, tell, tell_json, tell_table
from .session import AsJson, session

app = typer.Typer(help="Nodes: list, show, cordon, uncordon, drain.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NODE")]

_NODES = "/roost/v1/nodes"
# the most that one request waits for a drain
_WAIT_S = 20.0
_LOOK_EVERY_S = 0.5
_DRAINED, _SERVING = "drained", "serving"
_TENANTS_TOLD = 3
_STYLES = {_SERVING: "green", "silent": "red", "doubtful": "red"}


@app.command("list")
def list_nodes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the nodes as the gateway sees them."""
    found = session(context).client().call("GET", _NODES)
    if as_json:
        tell_json(found)
        return
    rows = [
        (
            node["node"], node["state"], f"{node['engines_ready']} of {node['engines']}",
            f"{node['slots_used']} of {node['slots']}", node["leases"],
            f"{node['loads_in_flight']} of {node['loads_limit']}", ", ".join(node["bases"]), _queued(node),
        )
        for node in found["nodes"]
    ]  # fmt: skip
    columns = ("NODE", "STATE", "ENGINES", "SLOTS", "REQUESTS", "LOADS", "BASES", "QUEUED")
    tell_table(columns, rows, empty="There are no nodes.")
    if found["trouble"]:
        ERR.print(f"Not all that is listed is in force: {found['trouble']}", style="bold red", markup=False)
    for node in found["nodes"]:
        _tell_faults(node)


@app.command("show")
def show(context: typer.Context, node: Name, as_json: AsJson = False) -> None:
    """Show a node: its state, what it holds, and where the bytes came from since its sidecar started."""
    found = session(context).client().call("GET", _path(node))
    _tell(found, as_json)
    if not as_json:
        tell(f"{found['resident']} revision(s) there or coming; bytes from: {_arrived(found)}")
        tell(f"given to other nodes: {size_of(found['given_bytes'])}")
        _tell_faults(found)


@app.command("cordon")
def cordon(context: typer.Context, node: Name, as_json: AsJson = False) -> None:
    """Send a node nothing new; what is under way there goes on."""
    _tell(session(context).client().call("POST", _path(node, "cordon"), {}), as_json)


@app.command("uncordon")
def uncordon(context: typer.Context, node: Name, as_json: AsJson = False) -> None:
    """Put a node back into service."""
    _tell(session(context).client().call("POST", _path(node, "uncordon"), {}), as_json)


@app.command("drain")
def drain(
    context: typer.Context,
    node: Name,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for the last request to end.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Cordon a node and wait until no request is there. Exits with 7 where some still are after --timeout."""
    found = _drained(session(context).client(), node, timeout)
    if found["state"] != _DRAINED:
        raise DeadlinePassed(
            f"node {node} gets nothing new, but is {found['state']} with {found['leases']} request(s) there: "
            "drain it again to wait on"
        )
    _tell(found, as_json)


def _drained(client: ApiClient, node: str, timeout_s: float) -> Any:
    """The node once nothing runs there, or as it is after ``timeout_s``. It is cordoned once: whoever puts it back into
    service meanwhile is heard, and VersionConflict raised.
    """
    until = time.monotonic() + timeout_s
    found = client.call("POST", _path(node, "drain"), {"wait_s": min(_WAIT_S, timeout_s)})
    while found["state"] != _DRAINED:
        if found["state"] == _SERVING:
            raise VersionConflict(f"node {node} was put back into service meanwhile")
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        time.sleep(min(_LOOK_EVERY_S, left_s))
        found = client.call("GET", _path(node))
    return found


def _queued(node: Any) -> str:
    """How many loads wait, at which rate they get their turn, and whose they are."""
    if not node["loads_queued"]:
        return "0"
    tenants = sorted(node["queued_by_tenant"].items(), key=lambda pair: (-pair[1], pair[0]))
    of_whom = ", ".join(f"{tenant} {count}" for tenant, count in tenants[:_TENANTS_TOLD])
    return f"{node['loads_queued']}, {node['load_rate']:.3g}/s: {of_whom}"


def _arrived(node: Any) -> str:
    """Where what came into its arena came from."""
    return ", ".join(f"{source} {size_of(count)}" for source, count in sorted(node["arrived_bytes"].items())) or "none"


def _tell_faults(node: Any) -> None:
    for peer, count in node["peer_faults"].items():
        line = f"Node {peer} gave wrong bytes to node {node['node']} {count} time(s): see to its memory and disk"
        ERR.print(line, style="bold red", markup=False)


def _path(node: str, *action: str) -> str:
    return "/".join((_NODES, quote(node, safe=""), *action))


def _tell(node: Any, as_json: bool) -> None:
    if as_json:
        tell_json(node)
        return
    state = node["state"]
    tell(
        "Node ", (node["node"], "bold"), " is ", (state, _STYLES.get(state, "yellow")), f", {node['leases']} request(s)"
    )
