"""Who is in the fleet: the nodes of the settings, and those that a file lists, which is followed at run time."""

from __future__ import annotations

import asyncio
import logging
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from catalog.names import check_part
from wire.curve import decode_key
from wire.hosts import is_port
from wire.outcomes import InvalidRequest, RoostError

from .fleet import Fleet
from .settings import GatewaySettings, NodeAddress

_log = logging.getLogger(__name__)

_EVERY_S = 1.0
_ENDPOINT_RE = re.compile(r"ipc:///.+|tcp://[^:/]+:[0-9]{1,5}")

_Signature = tuple[int, int, int]


class NodesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[[nodes]]`` tables with ``name``, ``endpoint``, ``feed_endpoint`` and ``public``; ``nodes = []`` for none."""

    nodes: tuple[NodeAddress, ...]


def read_nodes(file: Path) -> tuple[NodeAddress, ...]:
    """The nodes that ``file`` lists. Raises InvalidRequest that names what is wrong in it."""
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
        nodes = msgspec.convert(tree, NodesFile).nodes
    except OSError as error:
        raise InvalidRequest(f"{file}: {error.strerror}", field="nodes_file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"{file}: {error}", field="nodes_file") from None
    return nodes


def check_nodes(nodes: Iterable[NodeAddress], *, curve: bool, field: str) -> None:
    """Raise InvalidRequest for a node that can't stand, or one of a name or an endpoint that another has.

    ``curve``: this gateway has CURVE keys of its own, without which nothing is reached over TCP.
    """
    names: set[str] = set()
    endpoints: dict[str, str] = {}
    for index, node in enumerate(nodes):
        path = f"{field}[{index}]"
        check_part(node.name, f"{path}.name")
        if node.name in names:
            raise InvalidRequest(f"{path}.name: another node is called {node.name}", field=f"{path}.name")
        names.add(node.name)
        for part, endpoint in (("endpoint", node.endpoint), ("feed_endpoint", node.feed_endpoint)):
            if not _ENDPOINT_RE.fullmatch(endpoint):
                message = f"{path}.{part}: expected ipc:///path/to/socket or tcp://host:port, got {endpoint!r}"
                raise InvalidRequest(message, field=f"{path}.{part}")
            if endpoints.setdefault(endpoint, node.name) != node.name:
                message = f"{path}.{part}: it is node {endpoints[endpoint]}'s already"
                raise InvalidRequest(message, field=f"{path}.{part}")
            if endpoint.startswith("tcp://") and not is_port(int(endpoint.rpartition(":")[2])):
                raise InvalidRequest(f"{path}.{part}: expected a port of 1 to 65535", field=f"{path}.{part}")
            if endpoint.startswith("tcp://") and not (curve and node.public):
                whose = "the node's CURVE key as `public`" if curve else "CURVE keys of this gateway"
                raise InvalidRequest(f"{path}.{part}: over TCP this needs {whose}", field=f"{path}.public")
        if node.public:
            decode_key(node.public, f"{path}.public")


class Membership:
    """Keeps the fleet what settings and file say. ``trouble`` is why the file's present content is not in force.

    A file that is not there at the start lists nobody; one that goes away later changes nothing, nor does one that
    can't be understood: what was in force stays so.
    """

    def __init__(self, settings: GatewaySettings, fleet: Fleet) -> None:
        self.trouble = ""
        self._settings = settings
        self._fleet = fleet
        self._file = Path(settings.nodes_file) if settings.nodes_file else None
        self._seen: _Signature | None = None
        self._in_force: _Signature | None = None
        if self._file is not None:
            self._seen = _signature(self._file)
            if self._seen is not None:
                self._apply(self._file, self._seen)

    async def run(self) -> None:
        """Until cancelled."""
        while self._file is not None:
            await asyncio.sleep(_EVERY_S)
            try:
                self.look()
            except Exception as error:
                # whatever it is, the next file may be taken
                trouble = f"{self._file}: {error!r}"
                if trouble != self.trouble:
                    _log.exception("the nodes file can't be followed")
                self.trouble = trouble

    def look(self) -> None:
        """Take what the file says by now, once it was the same twice: it may just be being written."""
        if self._file is None:
            return
        before, self._seen = self._seen, _signature(self._file)
        if self._seen is not None and self._seen == before and self._seen != self._in_force:
            self._apply(self._file, self._seen)

    def _apply(self, file: Path, signature: _Signature) -> None:
        """What fails is tried again at each look: permissions change, and files that are open get fewer."""
        try:
            nodes = (*self._settings.nodes, *read_nodes(file))
            check_nodes(nodes, curve=self._settings.curve is not None, field="nodes")
            self._fleet.update(nodes)
        except RoostError as error:
            if error.message != self.trouble:
                _log.warning("the nodes file is not in force: %s", error.message)
            self.trouble = error.message
        else:
            self.trouble = ""
            self._in_force = signature
            _log.info("%d node(s) are in the fleet", len(nodes))


def _signature(file: Path) -> _Signature | None:
    """What changes whenever the file does; None where there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
