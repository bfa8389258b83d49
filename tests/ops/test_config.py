from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from backends.trainer import TrainerSettings
from gateway.settings import GatewaySettings
from gateway.training.settings import TrainingSettings
from ops.config import (
    EngineConfig,
    GatewayConfig,
    NodeConfig,
    TrainerConfig,
    TrainingConfig,
    check,
    load,
    show,
    with_engines,
)
from ops.deployment import engine_settings
from sidecar.settings import SidecarSettings
from wire.curve import make_keys
from wire.outcomes import InvalidRequest

KEY = make_keys()[0]
OTHER = {"name": "far", "endpoint": "tcp://10.0.0.2:7001", "feed_endpoint": "tcp://10.0.0.2:7002", "public": KEY}
ATTACHED = {"base": "smol", "attach": "localhost:8000"}
ENGINE = {"base": "smol", "model_path": "/models/smol"}


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"node": {"engines": [{**ENGINE, "slots": "many"}]}}, "node.engines[0].slots: expected int, got str"),
        ({"node": {"engines": [ENGINE, {"model_path": "/m"}]}}, "node.engines[1].base: is missing"),
        ({"node": {"engines": [{"base": "smol"}]}}, "node.engines[0]: needs `model_path`"),
        ({"node": {"engines": [{**ENGINE, "slots": 0}]}}, "node.engines[0].slots: expected a positive number, got 0"),
        ({"node": {"engines": [{**ENGINE, "name": "a"}] * 2}}, "node.engines[1].name: another engine is called 'a'"),
        ({"node": {"engines": [{"base": "a/b", "model_path": "/m"}]}}, "node.engines[0].base"),
        ({"node": {"engines": [{"base": "b", "attach": "nowhere"}]}}, "node.engines[0].attach: expected host:port"),
        ({"node": {"engines": [{**ENGINE, "attach_key_env": "K"}]}}, "node.engines[0].attach_key_env: is for `attach`"),
        ({"node": {"engines": [{**ENGINE, "count": 2, "port": 9}]}}, "node.engines[0].count"),
        ({"node": {"engines": [{**ENGINE, "fingerprint": "00"}]}}, "node.engines[0].fingerprint"),
        ({"node": {"engines": [{**ENGINE, "backend": "SGLang"}]}}, "node.engines[0].backend: expected vllm or sglang"),
        ({"node": {"engines": [{**ENGINE, "dtype": "zzz"}]}}, "node.engines[0].dtype: expected auto, half, float16"),
        ({"node": {"engines": [{**ENGINE, "device": "tpu"}]}}, "node.engines[0].device: expected auto, cpu or cuda"),
        ({"node": {"arena": 1}}, "node.arena: no such setting"),
        ({"node": {"arena_bytes": -1}}, "node.arena_bytes: expected a positive number, got -1"),
        ({"node": {"loads_queued_s": -1.0}}, "node.loads_queued_s: expected 0 or a positive number, got -1.0"),
        ({"node": {"disk_bytes": -1}}, "node.disk_bytes: expected 0 or a positive number, got -1"),
        ({"gateway": {"prefix_bytes": -5}}, "gateway.prefix_bytes: expected 0 or a positive number, got -5"),
        ({"gateway": {"placed_excess": math.nan}}, "gateway.placed_excess: expected a positive number, got nan"),
        ({"node": {"slot_share_s": math.inf}}, "node.slot_share_s: expected a positive number, got inf"),
        ({"node": {"loads_in_flight_min": 9}}, "node.loads_in_flight_min: 9 is more than node.loads_in_flight, 8"),
        ({"node": {"engines": [{**ENGINE, "start_timeout_s": math.nan}]}}, "node.engines[0].start_timeout_s: expected"),
        ({"node": {"engines": [{**ENGINE, "max_num_seqs": -1}]}}, "node.engines[0].max_num_seqs: expected 0 or"),
        ({"node": {"engines": [{**ENGINE, "port": 65536}]}}, "node.engines[0].port: expected 1 to 65535, or 0"),
        ({"node": {"engines": [{"base": "b", "attach": "a:0"}]}}, "node.engines[0].attach: expected a port"),
        ({"node": {"endpoint": "tcp://a:65536"}}, "node.endpoint: expected a port of 1 to 65535, got 65536"),
        ({"gateway": {"nodes": [{**OTHER, "endpoint": "tcp://a:0"}]}}, "gateway.nodes[0].endpoint: expected a port"),
        ({"gateway": {"name": "UPPER"}}, "gateway.name"),
        ({"node": {"cache_policy": "mru"}}, "node.cache_policy: Invalid enum value 'mru'"),
        ({"node": {"name": "UPPER"}}, "node.name"),
        ({"node": {"endpoint": "udp://x"}}, "node.endpoint: expected ipc:///path/to/socket or tcp://host:port"),
        ({"store": "ftp://x"}, "store: expected s3://"),
        ({"store": "s3://key:secret@bucket"}, "store: credentials and options have no place in the URL"),
        ({"store": "s3://bucket", "store_endpoint": "host"}, "store_endpoint: expected https://host:port"),
        ({"store_region": "here"}, "store: an endpoint and a region are for object stores"),
        ({"gatway": {}}, "gatway: no such setting"),
        ({"gateway": 8080}, "gateway: expected a table, got int"),
        ({"gateway": {"port": 70000}}, "gateway.port: expected 1 to 65535, got 70000"),
        ({"gateway": {"host": "0.0.0.0", "anonymous": True}}, "gateway.anonymous: requests without a key"),
        ({"gateway": {"nodes": [{"name": "a"}]}}, "gateway.nodes[0].endpoint: is missing"),
        ({"gateway": {"nodes": [{**OTHER, "name": "UPPER"}]}}, "gateway.nodes[0].name"),
        ({"gateway": {"nodes": [{**OTHER, "name": "local"}]}}, "gateway.nodes[0].name: local is this host's own node"),
        ({"gateway": {"nodes": [OTHER, OTHER]}}, "gateway.nodes[1].name: another node is called far"),
        ({"gateway": {"nodes": [{**OTHER, "public": ""}]}}, "gateway.nodes[0].endpoint: over TCP this needs"),
        ({"gateway": {"nodes": [{**OTHER, "public": "k"}]}}, "gateway.nodes[0].public is not a CURVE key"),
        ({"gateway": {"nodes": [{**OTHER, "endpoint": "far:1"}]}}, "gateway.nodes[0].endpoint: expected ipc:"),
        ({"node": {"peers": ["k"]}}, "node.peers[0] is not a CURVE key"),
        ({"node": {"peers": [KEY], "engines": [ENGINE]}}, "node.engines[0].host: gateways on other hosts"),
        ({"node": {"peers": [KEY], "engines": [ATTACHED]}}, "node.engines[0].attach: gateways on other hosts"),
        (
            {"node": {"peers": [KEY], "engines": [{**ENGINE, "host": "0.0.0.0"}]}},
            "node.engines[0].host: gateways on other hosts (node.peers) can't reach 0.0.0.0",
        ),
        ({"gateway": {"quotas": {"acme": {"tokens": 1}}}}, "gateway.quotas[...].tokens: no such setting"),
        ({"gateway": {"quotas": {"UPPER": {}}}}, "gateway.quotas.UPPER"),
        ({"gateway": {"default_quota": {"tokens_per_minute": -1}}}, "gateway.default_quota: tokens_per_minute"),
        ({"gateway": {"gateways": 0}}, "gateway.gateways: expected a positive number"),
    ],
)
def test_an_error_names_the_field_and_the_reason(tree: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check(tree)
    assert raised.value.message.startswith(told)


def test_a_queue_may_be_told_never_to_widen(tmp_path: Path) -> None:
    file = tmp_path / "roost.toml"
    file.write_text("[node]\nloads_queued_s = 0.0\n")
    assert load(file, {}).node.loads_queued_s == 0.0


def test_later_layers_win(tmp_path: Path) -> None:
    file = tmp_path / "roost.toml"
    file.write_text("[gateway]\nport = 1001\nmax_connections = 11\nkeep_alive_s = 5\n")
    environment = {"ROOST_GATEWAY__PORT": "1002", "ROOST_GATEWAY__MAX_CONNECTIONS": "12"}
    config = load(file, environment, {"gateway.port": 1003, "gateway.host": None})
    gateway = config.gateway
    assert (gateway.port, gateway.max_connections, gateway.keep_alive_s) == (1003, 12, 5.0)
    assert gateway.host == "127.0.0.1"


def test_the_environment_speaks_every_type() -> None:
    environment = {
        "ROOST_STATE_DIR": "/var/lib/roost",
        "ROOST_GATEWAY__ANONYMOUS": "true",
        "ROOST_NODE__LOAD_TIMEOUT_S": "2.5",
        "ROOST_NODE__ENGINES": '[{"base": "smol", "model_path": "/models/smol"}]',
        "ROOST_URL": "for the command, not for the mesh",
    }
    config = load(None, environment)
    assert config.state_dir == "/var/lib/roost"
    assert config.gateway.anonymous is True
    assert config.node.load_timeout_s == 2.5
    assert config.node.engines[0].base == "smol"


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("ROOST_GATEWAY__PORT", "x", "ROOST_GATEWAY__PORT: expected int, got 'x'"),
        ("ROOST_GATWAY__PORT", "1", "ROOST_GATWAY__PORT: there is no setting gatway.port"),
        ("ROOST_NODE__ENGINES", "[", "ROOST_NODE__ENGINES: expected JSON"),
        ("ROOST_NODE__ENGINES", '[{"base": 1}]', "node.engines[0].base: expected str, got int"),
    ],
)
def test_an_error_names_the_variable(variable: str, value: str, told: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        load(None, {variable: value})
    assert raised.value.message.startswith(told)


@pytest.mark.parametrize("content", ["[gateway\n", "port = \xff"])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "roost.toml"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidRequest, match=r"roost\.toml"):
        load(file, {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"absent\.toml: No such file"):
        load(tmp_path / "absent.toml", {})


def test_paths_in_the_file_are_relative_to_it(tmp_path: Path) -> None:
    file = tmp_path / "roost.toml"
    file.write_text('state_dir = "state"\n[[node.engines]]\nbase = "smol"\nmodel_path = "models/smol"\n')
    config = load(file, {})
    assert config.state_dir == str(tmp_path / "state")
    assert config.node.engines[0].model_path == str(tmp_path / "models/smol")


def test_what_is_shown_can_be_read_back() -> None:
    quotas = {"acme": {"requests_per_minute": 60, "tokens_per_minute": 1000}}
    config = check(
        {
            "gateway": {"port": 9, "nodes": [OTHER], "quotas": quotas},
            "node": {"engines": [{**ENGINE, "env": {"A": "b"}}]},
        }
    )
    assert check(show(config)) == config


def test_engines_of_flags_are_checked_too() -> None:
    with pytest.raises(InvalidRequest, match=r"node\.engines\[0\]\.base"):
        with_engines(check({}), [EngineConfig(base="no/slash", model_path="/m")])


def test_engines_are_named_one_by_one() -> None:
    node = check({"node": {"engines": [{**ENGINE, "count": 2}, ENGINE, {**ENGINE, "name": "own"}]}}).node
    engines = engine_settings(node, {"smol": "f1"})
    assert [engine.name for engine in engines] == ["smol-0", "smol-1", "smol", "own"]
    assert {engine.fingerprint for engine in engines} == {"f1"}


def test_defaults_are_those_of_the_processes() -> None:
    """Beside the tuning that they share, the tables of roost.toml and the processes' settings have fields in common."""
    for table, settings in (
        (NodeConfig, SidecarSettings),
        (GatewayConfig, GatewaySettings),
        (TrainingConfig, TrainingSettings),
    ):
        theirs = {field.name: field.default for field in msgspec.structs.fields(settings)}
        for field in msgspec.structs.fields(table):
            if theirs.get(field.name, msgspec.NODEFAULT) is not msgspec.NODEFAULT:
                assert field.default == theirs[field.name], f"{table.__name__}.{field.name}"


def test_every_tuning_of_a_process_can_be_configured() -> None:
    """What a process may be told has a place in roost.toml, or follows from it."""
    derived = {
        "catalog_dir", "store_dir", "run_dir", "log_dir", "registrar_endpoint", "registrar_feed", "nodes", "node",
        "curve", "store", "disk_dir", "training", "socket", "gateway_url", "key_file", "state_dir",
    }  # fmt: skip
    bounds = {"max_choices", "max_generated_tokens", "max_logprobs"}
    for table, settings, follows in (
        (NodeConfig, SidecarSettings, set()),
        (GatewayConfig, GatewaySettings, set()),
        # the gateway's
        (TrainingConfig, TrainingSettings, bounds | {"anonymous", "nodes_file", "transfers"}),
        (TrainerConfig, TrainerSettings, set()),
    ):
        offered = {field.name for field in msgspec.structs.fields(table)}
        needed = {field.name for field in msgspec.structs.fields(settings)}
        assert needed - derived - follows <= offered
