"""``roost.toml``: what a deployment is told, in layers: defaults, the file, the environment, flags.

Every error names the field as a person would write it: ``node.engines[0].slots: expected int, got str``.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

import msgspec

from backends.dtypes import AUTO, NAMES
from backends.interface import DEVICES, DTYPES, EngineSettings
from backends.registry import BACKENDS
from backends.trainer import TrainerSettings
from catalog.artifacts import StoreLocation, check_location
from catalog.inputs import ALL_TENANTS
from catalog.names import check_base, check_part
from catalog.postgres.address import check_address
from catalog.settings import RegistrarTuning
from gateway.membership import check_nodes
from gateway.settings import GatewayTuning, NodeAddress
from gateway.training.settings import TrainingTuning
from sidecar.settings import NodeTuning, TrainerAddress
from wire.curve import decode_key
from wire.hosts import is_everywhere, is_loopback, is_port
from wire.outcomes import InvalidRequest

ENVIRONMENT_PREFIX = "ROOST_"
NESTING = "__"
DEFAULT_FILE = "roost.toml"
_MAY_BE_ZERO = frozenset(
    {
        "announce_wait_s",
        "disk_bytes",
        "loads_queued_s",
        "peer_transfers",
        "prefix_bytes",
        "max_model_len",
        "kv_cache_bytes",
        "max_num_seqs",
    }
)
_ENGINE_NUMBERS = ("slots", "max_rank", "count", "max_model_len", "kv_cache_bytes", "max_num_seqs", "start_timeout_s")
_OUTSIDE_TABLES = frozenset({"state_dir", "store", "store_endpoint", "store_region"})


class RegistrarConfig(RegistrarTuning, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Empty endpoints mean socket files in the state folder; ``tcp://`` ones get CURVE keys.

    ``journal`` is the ``postgresql://`` address that the hosts of a fleet share; empty, this host is alone.
    """

    endpoint: str = ""
    feed_endpoint: str = ""


class GatewayConfig(GatewayTuning, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The front door.

    ``nodes`` are those of other hosts: ``[[gateway.nodes]]`` with ``name``, ``endpoint``, ``feed_endpoint`` and
    ``public``, the CURVE key that `roost keys curve` shows there for the sidecar. ``nodes_file`` lists more of them
    (``[[nodes]]``, the same fields), and is followed at run time; empty, it is ``nodes.toml`` in the state folder.
    ``[gateway.quotas.TENANT]`` and ``[gateway.default_quota]`` hold ``requests_per_minute`` and ``tokens_per_minute``,
    divided by ``gateways``, the number of gateways of the fleet.
    ``name`` has to be no other gateway's of the fleet; empty, it is one made for this state folder.
    """

    name: str = ""
    nodes: tuple[NodeAddress, ...] = ()
    nodes_file: str = ""


class EngineConfig(EngineSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine, or ``count`` alike. The fingerprint is the catalog's; ``model_path`` registers a base it lacks."""

    name: str = ""
    fingerprint: str = ""
    count: int = 1


class NodeConfig(NodeTuning, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """This host's sidecar and its engines. ``peers`` are the CURVE keys of gateways on other hosts, which may send
    requests here; engines then need a ``host`` that those reach.

    Other nodes take bytes at ``bytes_endpoint``; empty, that is a free port of the host of ``endpoint``.

    ``trainers`` are the training services of other hosts (``[[node.trainers]]``), whose revisions come straight from
    there: ``endpoint``, ``feed_endpoint`` and ``public``, the CURVE key that `roost keys curve` shows there for the
    gateway.
    """

    name: str = "local"
    endpoint: str = ""
    feed_endpoint: str = ""
    bytes_endpoint: str = ""
    trainers: tuple[TrainerAddress, ...] = ()
    engines: tuple[EngineConfig, ...] = ()
    peers: tuple[str, ...] = ()


class TrainerConfig(TrainerSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the base is trained. Without a ``model_path`` it is loaded from where an engine of the base loads it, and
    where its ``dtype`` is ``auto``, an engine's counts.
    """

    name: str = "trainer"
    model_path: str = ""


class TrainingConfig(TrainingTuning, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The training service and its trainer; without a ``base`` there are none.

    Revisions are offered to this host's sidecar while they are written, and at ``feed_endpoint`` to those of others,
    whose CURVE keys are ``peers`` and which get them at ``endpoint``. The journal is in PostgreSQL where the
    registrar's is, or at ``journal``, and there under ``name`` (else the node's), which one training service of a fleet
    may have.
    """

    base: str = ""
    trainer: TrainerConfig = TrainerConfig()
    journal: str = ""
    name: str = ""
    endpoint: str = ""
    feed_endpoint: str = ""
    peers: tuple[str, ...] = ()


class RoostConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A deployment on one host. Everything that it writes is under ``state_dir``, but for artifacts with a ``store``.

    ``store`` is ``s3://bucket/prefix``, ``gs://``, ``az://`` or ``file:///folder``; ``store_endpoint`` is for servers
    that speak S3 at an address of their own. Keys to it are read from the environment, never from here.
    """

    state_dir: str = ".roost"
    store: str = ""
    store_endpoint: str = ""
    store_region: str = ""
    registrar: RegistrarConfig = RegistrarConfig()
    gateway: GatewayConfig = GatewayConfig()
    node: NodeConfig = NodeConfig()
    training: TrainingConfig = TrainingConfig()

    @property
    def location(self) -> StoreLocation:
        """Where artifacts lie."""
        return StoreLocation(self.store, self.store_endpoint, self.store_region)


def load(
    file: Path | None, environment: Mapping[str, str], overrides: Mapping[str, object] | None = None
) -> RoostConfig:
    """The configuration in force. ``overrides`` are the flags, as ``{"gateway.port": 8080}``; None leaves alone.

    Paths in the file are relative to its folder, others to the current one.
    Raises InvalidRequest that names the field, the variable or the file.
    """
    tree = _anchored(read_file(file), file.absolute().parent) if file is not None else {}
    for variable, text in environment.items():
        path = _path_of_variable(variable)
        if path is not None:
            _place(tree, path, _parse_text(path, text, variable))
    for dotted, value in (overrides or {}).items():
        if value is not None:
            _place(tree, tuple(dotted.split(".")), value)
    return check(tree)


def read_file(file: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises InvalidRequest."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{file}: {error.strerror}", field="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file}: {error}", field="config") from None


def check(tree: Mapping[str, Any]) -> RoostConfig:
    """Type every field, then check what types can't say. Raises InvalidRequest that names the field."""
    try:
        config = msgspec.convert(tree, RoostConfig)
    except msgspec.ValidationError as error:
        raise _invalid(*_field_and_reason(str(error))) from None
    _check_meaning(config)
    return config


def with_engines(config: RoostConfig, engines: Sequence[EngineConfig]) -> RoostConfig:
    """``config`` with more engines. Raises InvalidRequest."""
    node = msgspec.structs.replace(config.node, engines=(*config.node.engines, *engines))
    whole = msgspec.structs.replace(config, node=node)
    _check_meaning(whole)
    return whole


def show(config: RoostConfig) -> dict[str, Any]:
    """``config`` as plain tables, engines' derived fields left out."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    for engine in tree["node"]["engines"]:
        del engine["fingerprint"]
    return tree


def _anchored(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """``tree`` with its paths made absolute. What is not of the right type is left for the check to name."""
    node = tree.get("node")
    engines = node.get("engines") if isinstance(node, dict) else None
    listed = engines if isinstance(engines, list) else []
    training = tree.get("training")
    trainer = training.get("trainer") if isinstance(training, dict) else None
    for table, name in (
        (tree, "state_dir"),
        (tree.get("gateway"), "nodes_file"),
        *((engine, "model_path") for engine in (*listed, trainer)),
    ):
        value = table.get(name) if isinstance(table, dict) else None
        if isinstance(value, str) and value:
            table[name] = str(folder / Path(value).expanduser())
    return tree


def _check_meaning(config: RoostConfig) -> None:
    check_location(config.location)
    _check_gateway(config.gateway)
    if config.registrar.journal:
        check_address(config.registrar.journal, "registrar.journal")
    check_part(config.node.name, "node.name")
    _check_endpoints(config)
    _check_fleet(config)
    _check_engines(config.node.engines)
    _check_training(config)
    _check_numbers(config)


def _check_gateway(gateway: GatewayConfig) -> None:
    if not is_port(gateway.port):
        raise _invalid("gateway.port", f"expected 1 to 65535, got {gateway.port}")
    if gateway.anonymous and not is_loopback(gateway.host):
        raise _invalid(
            "gateway.anonymous",
            f"requests without a key are for loopback only, and gateway.host is {gateway.host}: "
            "remove `anonymous`, and make keys with `roost keys create`",
        )
    if gateway.name:
        check_part(gateway.name, "gateway.name")


def _check_endpoints(config: RoostConfig) -> None:
    tables = (
        ("registrar", config.registrar),
        ("node", config.node),
        ("training", config.training),
        *((f"node.trainers[{index}]", trainer) for index, trainer in enumerate(config.node.trainers)),
    )
    for table, addresses in tables:
        for name in ("endpoint", "feed_endpoint", "bytes_endpoint"):
            path, endpoint = f"{table}.{name}", getattr(addresses, name, "")
            if endpoint and not re.fullmatch(r"ipc:///.+|tcp://[^:/]+:[0-9]{1,5}", endpoint):
                raise _invalid(path, f"expected ipc:///path/to/socket or tcp://host:port, got {endpoint!r}")
            if endpoint.startswith("tcp://"):
                _check_port(path, endpoint)


def _check_fleet(config: RoostConfig) -> None:
    check_nodes(config.gateway.nodes, curve=True, field="gateway.nodes")
    for index, other in enumerate(config.gateway.nodes):
        if other.name == config.node.name:
            raise _invalid(f"gateway.nodes[{index}].name", f"{other.name} is this host's own node: see node.name")
    for index, key in enumerate(config.node.peers):
        decode_key(key, f"node.peers[{index}]")
    if bool(config.training.endpoint) is not bool(config.training.feed_endpoint):
        missing = "feed_endpoint" if config.training.endpoint else "endpoint"
        raise _invalid(f"training.{missing}", "is missing: endpoint and feed_endpoint go together")
    for index, key in enumerate(config.training.peers):
        decode_key(key, f"training.peers[{index}]")
    for index, trainer in enumerate(config.node.trainers):
        if trainer.public or "tcp://" in (trainer.endpoint[:6], trainer.feed_endpoint[:6]):
            decode_key(trainer.public, f"node.trainers[{index}].public")
    for index, engine in enumerate(config.node.engines if config.node.peers else ()):
        field, host = ("attach", engine.attach.rpartition(":")[0]) if engine.attach else ("host", engine.host)
        if is_loopback(host) or is_everywhere(host):
            path = f"node.engines[{index}].{field}"
            raise _invalid(path, f"gateways on other hosts (node.peers) can't reach {host}: give this host's address")
    for tenant in config.gateway.quotas:
        if tenant != ALL_TENANTS:
            check_part(tenant, f"gateway.quotas.{tenant}")


def _check_training(config: RoostConfig) -> None:
    training = config.training
    if not training.base:
        return
    check_base(training.base, "training.base")
    check_part(training.tenant, "training.tenant")
    if training.journal:
        check_address(training.journal, "training.journal")
    if training.name:
        check_part(training.name, "training.name")
    if training.revision_dtype not in ("BF16", "F32"):
        raise _invalid("training.revision_dtype", f"expected BF16 or F32, got {training.revision_dtype!r}")
    _check_known(training.trainer.dtype, DTYPES, "training.trainer.dtype")
    trained_dtype(config)
    if not base_path(config):
        raise _invalid("training.trainer.model_path", f"is missing: no engine loads {training.base} from a folder")


def base_path(config: RoostConfig) -> str:
    """Where the trainer loads its base from; empty where nothing says so."""
    paths = (engine.model_path for engine in config.node.engines if engine.base == config.training.base)
    return config.training.trainer.model_path or next(filter(None, paths), "")


def trained_dtype(config: RoostConfig) -> str:
    """What the trainer is told to keep its base in: as engines of the base here compute, where it is left to us."""
    told = config.training.trainer.dtype
    if told != AUTO:
        return told
    engines = (engine for engine in config.node.engines if engine.base == config.training.base and not engine.attach)
    found = {NAMES.get(engine.dtype, engine.dtype) for engine in engines}
    if len(found) > 1:
        raise _invalid("training.trainer.dtype", f"must be set: engines of its base have {' and '.join(sorted(found))}")
    return next(iter(found), AUTO)


def _check_known(given: str, known: Sequence[str], path: str) -> None:
    if given not in known:
        raise _invalid(path, f"expected {', '.join(known[:-1])} or {known[-1]}, got {given!r}")


def _check_engines(engines: Sequence[EngineConfig]) -> None:
    names: set[str] = set()
    for index, engine in enumerate(engines):
        _check_engine(engine, f"node.engines[{index}]")
        if engine.name and engine.name in names:
            raise _invalid(f"node.engines[{index}].name", f"another engine is called {engine.name!r}")
        names.add(engine.name)


def _check_engine(engine: EngineConfig, path: str) -> None:
    check_base(engine.base, f"{path}.base")
    if engine.name:
        check_part(engine.name, f"{path}.name")
    for field, known in (("backend", BACKENDS), ("dtype", DTYPES), ("device", DEVICES)):
        _check_known(getattr(engine, field), known, f"{path}.{field}")
    if not engine.model_path and not engine.attach:
        raise _invalid(path, "needs `model_path` (an engine that we start) or `attach` (host:port of a running one)")
    if engine.attach and not re.fullmatch(r"[^:/]+:[0-9]{1,5}", engine.attach):
        raise _invalid(f"{path}.attach", f"expected host:port, got {engine.attach!r}")
    if engine.attach:
        _check_port(f"{path}.attach", engine.attach)
    if engine.port and not is_port(engine.port):
        raise _invalid(f"{path}.port", f"expected 1 to 65535, or 0 for a free one, got {engine.port}")
    if engine.attach_key_env and not engine.attach:
        raise _invalid(f"{path}.attach_key_env", "is for `attach`: an engine that we start gets a token of its own")
    if engine.count > 1 and (engine.attach or engine.port):
        raise _invalid(f"{path}.count", "several engines can't share one address: write a [[node.engines]] for each")
    if engine.fingerprint:
        raise _invalid(f"{path}.fingerprint", "is the catalog's to say: leave it out")


def _check_port(path: str, address: str) -> None:
    port = int(address.rpartition(":")[2])
    if not is_port(port):
        raise _invalid(path, f"expected a port of 1 to 65535, got {port}")


def _check_numbers(config: RoostConfig) -> None:
    for path, count in _numbers(config):
        may_be_zero = path.rpartition(".")[2] in _MAY_BE_ZERO
        # neither is infinity a number that any process could be told, nor is what is no number at all
        if not (0 < count < math.inf or (may_be_zero and count == 0)):
            raise _invalid(path, f"expected {'0 or ' if may_be_zero else ''}a positive number, got {count}")
    node = config.node
    if node.loads_in_flight_min > node.loads_in_flight:
        raise _invalid(
            "node.loads_in_flight_min",
            f"{node.loads_in_flight_min} is more than node.loads_in_flight, {node.loads_in_flight}",
        )


def _numbers(config: RoostConfig) -> list[tuple[str, float]]:
    """Every number that makes no sense below zero, nor at it unless it may be zero."""
    numbers: list[tuple[str, float]] = []
    for section in ("registrar", "gateway", "node", "training"):
        table = getattr(config, section)
        for field in msgspec.structs.fields(table):
            value = getattr(table, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers.append((f"{section}.{field.name}", value))
    for index, engine in enumerate(config.node.engines):
        numbers += [(f"node.engines[{index}].{name}", getattr(engine, name)) for name in _ENGINE_NUMBERS]
    return numbers


def _path_of_variable(variable: str) -> tuple[str, ...] | None:
    """``ROOST_GATEWAY__PORT`` -> ("gateway", "port"). Without ``__`` only what is in no table is a setting."""
    if not variable.startswith(ENVIRONMENT_PREFIX):
        return None
    path = tuple(variable.removeprefix(ENVIRONMENT_PREFIX).lower().split(NESTING))
    return path if len(path) > 1 or path[0] in _OUTSIDE_TABLES else None


def _parse_text(path: tuple[str, ...], text: str, variable: str) -> object:
    """``text`` as the type of the field at ``path``: lists and tables are JSON. Raises InvalidRequest."""
    kind: Any = RoostConfig
    for name in path:
        fields = {field.name: field for field in msgspec.structs.fields(kind)} if _is_struct(kind) else {}
        if name not in fields:
            raise InvalidRequest(f"{variable}: there is no setting {'.'.join(path)}", field=variable)
        kind = fields[name].type
    if _is_struct(kind) or get_origin(kind) is not None:
        try:
            return json.loads(text)
        except ValueError as error:
            raise InvalidRequest(f"{variable}: expected JSON: {error}", field=variable) from None
    try:
        value: object = msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        raise InvalidRequest(f"{variable}: expected {kind.__name__}, got {text!r}", field=variable) from None
    return value


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _place(tree: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    *tables, last = path
    for name in tables:
        below = tree.setdefault(name, {})
        if not isinstance(below, dict):
            raise _invalid(name, "expected a table")
        tree = below
    tree[last] = value


def _field_and_reason(message: str) -> tuple[str, str]:
    """msgspec's ``Expected `int`, got `str` - at `$.node.engines[0].slots``` taken apart."""
    reason, _, path = message.partition(" - at `$.")
    field = path.rstrip("`")
    named = re.search(r"(?:unknown|required) field `([^`]+)`", reason)
    if named is not None:
        field = f"{field}.{named[1]}" if field else named[1]
        reason = "no such setting" if "unknown" in reason else "is missing"
    return field, reason.replace("`", "").replace("Expected object", "expected a table").replace(
        "Expected", "expected", 1
    )


def _invalid(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {reason}", field=field)
