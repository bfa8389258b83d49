from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from catalog.artifacts import StoreLocation
from ops.config import check, load
from ops.deployment import curve_keys, derive, derive_training, gateway_url
from ops.layout import MAX_SOCKET_PATH, Layout
from wire.curve import make_keys
from wire.outcomes import InvalidRequest


def test_processes_find_each_other(tmp_path: Path) -> None:
    layout = Layout.of(str(tmp_path))
    registrar, sidecar, gateway = derive(check({}), layout, {})
    assert gateway.registrar_endpoint == registrar.endpoint
    assert sidecar.registrar_feed == registrar.feed_endpoint
    assert (gateway.nodes[0].endpoint, gateway.nodes[0].feed_endpoint) == (sidecar.endpoint, sidecar.feed_endpoint)
    assert gateway.catalog_dir == registrar.catalog_dir
    assert gateway.store_dir == registrar.store_dir == sidecar.store_dir
    assert gateway.curve is None


def test_every_process_is_told_of_the_same_store(tmp_path: Path) -> None:
    config = load(None, {"ROOST_STORE": "s3://bucket/roost", "ROOST_STORE_ENDPOINT": "https://s3.example:9000"})
    told = {settings.store for settings in derive(config, Layout.of(str(tmp_path)), {})}
    assert told == {StoreLocation("s3://bucket/roost", endpoint="https://s3.example:9000")}


def test_a_node_keeps_copies_under_the_state_folder(tmp_path: Path) -> None:
    config = load(None, {"ROOST_NODE__DISK_BYTES": "0", "ROOST_NODE__CACHE_POLICY": "lru", "ROOST_NODE__NAME": "east"})
    sidecar = derive(config, Layout.of(str(tmp_path)), {}).sidecar
    assert (sidecar.disk_dir, sidecar.disk_bytes, sidecar.cache_policy) == (str(tmp_path / "disk" / "east"), 0, "lru")


def test_by_default_nothing_is_open_to_other_machines(tmp_path: Path) -> None:
    registrar, sidecar, gateway = derive(check({}), Layout.of(str(tmp_path)), {})
    assert gateway.host == "127.0.0.1"
    assert gateway.anonymous is False
    for endpoint in (registrar.endpoint, registrar.feed_endpoint, sidecar.endpoint, sidecar.feed_endpoint):
        assert endpoint.startswith("ipc://")


def test_tcp_endpoints_get_curve_keys(tmp_path: Path) -> None:
    layout = Layout.of(str(tmp_path))
    layout.make()
    config = check({"node": {"endpoint": "tcp://127.0.0.1:7001", "feed_endpoint": "tcp://127.0.0.1:7002"}})
    registrar, sidecar, gateway = derive(config, layout, {})
    assert registrar.curve is not None and sidecar.curve is not None and gateway.curve is not None
    assert gateway.nodes[0].public == sidecar.curve.public
    assert gateway.curve.server_public == registrar.curve.public
    assert gateway.curve.public in sidecar.curve.peers
    assert derive(config, layout, {}) == (registrar, sidecar, gateway), "the keys stay the same"


def test_gateways_know_the_nodes_of_other_hosts_and_nodes_their_gateways(tmp_path: Path) -> None:
    layout = Layout.of(str(tmp_path))
    layout.make()
    there, gateway_there = make_keys()[0], make_keys()[0]
    other = {"name": "far", "endpoint": "tcp://10.0.0.2:7001", "feed_endpoint": "tcp://10.0.0.2:7002", "public": there}
    config = check({"gateway": {"nodes": [other]}, "node": {"peers": [gateway_there]}})
    registrar, sidecar, gateway = derive(config, layout, {})
    assert [node.name for node in gateway.nodes] == ["local", "far"]
    assert gateway.nodes[1].public == there
    assert gateway.curve is not None and sidecar.curve is not None and registrar.curve is not None
    assert gateway_there in sidecar.curve.peers
    assert gateway_there not in registrar.curve.peers
    assert gateway.nodes_file == str(tmp_path / "nodes.toml")


def test_each_host_has_a_gateway_of_another_name_which_stays(tmp_path: Path) -> None:
    layouts = [Layout.of(str(tmp_path / host)) for host in ("a", "b")]
    for layout in layouts:
        layout.make()
    names = [derive(check({}), layout, {}).gateway.name for layout in layouts]
    assert names[0] != names[1]
    assert [derive(check({}), layout, {}).gateway.name for layout in layouts] == names
    named = check({"gateway": {"name": "front"}})
    assert derive(named, layouts[0], {}).gateway.name == "front"


def test_a_nodes_file_is_where_it_is_said_to_be(tmp_path: Path) -> None:
    file = tmp_path / "roost.toml"
    file.write_text('[gateway]\nnodes_file = "fleet/nodes.toml"\n')
    gateway = derive(load(file, {}), Layout.of(str(tmp_path)), {}).gateway
    assert gateway.nodes_file == str(tmp_path / "fleet/nodes.toml")


def test_secrets_are_their_owners_alone(tmp_path: Path) -> None:
    layout = Layout.of(str(tmp_path / "state"))
    layout.make()
    curve_keys(layout)
    assert stat.S_IMODE(layout.root.stat().st_mode) == 0o700
    files = list(layout.keys.iterdir())
    assert len(files) == 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_a_folder_that_was_open_is_closed(tmp_path: Path) -> None:
    layout = Layout.of(str(tmp_path / "state"))
    for folder in (layout.root, layout.keys):
        folder.mkdir()
        folder.chmod(0o755)
    layout.make()
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (layout.root, layout.keys)} == {0o700}


@pytest.fixture
def long_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """One whose sockets don't fit into its own folder."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    layout = Layout.of(str(tmp_path / ("long" * 40) / "state"))
    assert layout.sockets.parent == shared
    return layout


def test_a_folder_for_sockets_is_its_owners_alone(long_layout: Layout) -> None:
    long_layout.make()
    long_layout.make()
    assert stat.S_IMODE(long_layout.sockets.stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["open", "link", "file", "another user's"])
def test_a_folder_for_sockets_that_somebody_made_first_is_refused(
    kind: str, long_layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = long_layout.sockets
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    if kind == "link":
        planted.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        planted.write_text("")
    else:
        planted.mkdir(mode=0o700)
    if kind == "open":
        planted.chmod(0o777)
    if kind == "another user's":
        genuine, planted_at = Path.stat, planted

        def stat_as_seen(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
            found = genuine(path, follow_symlinks=follow_symlinks)
            return os.stat_result((*found[:4], os.getuid() + 1, *found[5:])) if path == planted_at else found

        monkeypatch.setattr(Path, "stat", stat_as_seen)
    with pytest.raises(InvalidRequest, match=str(planted)):
        long_layout.make()


def test_a_damaged_key_file_is_named(tmp_path: Path) -> None:
    layout = Layout.of(str(tmp_path))
    layout.make()
    (layout.keys / "gateway.curve.json").write_text("{}")
    with pytest.raises(InvalidRequest, match=r"gateway\.curve\.json"):
        curve_keys(layout)


def test_socket_paths_fit_however_deep_the_state_folder_is(tmp_path: Path) -> None:
    shallow = Layout(Path("/srv/roost"))
    assert shallow.socket("node") == "ipc:///srv/roost/run/node.sock"
    deep = Layout(tmp_path / ("d" * 100))
    other = Layout(tmp_path / ("e" * 100))
    assert len(deep.socket("registrar-feed").removeprefix("ipc://")) <= MAX_SOCKET_PATH
    assert deep.socket("node") != other.socket("node")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("10.0.0.7", "http://10.0.0.7:80"),
    ],
)
def test_the_gateway_is_reached_from_its_own_host(host: str, url: str) -> None:
    assert gateway_url(check({"gateway": {"host": host, "port": 80}}).gateway) == url


def test_a_trained_base_has_a_service_behind_the_gateway(tmp_path: Path) -> None:
    layout = Layout.of(str(tmp_path))
    engines = [{"base": "tiny", "model_path": "/models/tiny"}]
    training_table = {"base": "tiny", "trainer": {"tensor": 2}}
    config = check(
        {
            "node": {"engines": engines},
            "gateway": {"max_generated_tokens": 900, "max_choices": 3},
            "training": training_table,
        }
    )
    training = derive_training(config, layout, {"tiny": "f" * 64})
    assert training is not None
    gateway = derive(config, layout, {"tiny": "f" * 64}).gateway
    assert training.socket == gateway.training
    assert training.catalog_dir == gateway.catalog_dir
    assert training.max_generated_tokens == gateway.max_generated_tokens == 900
    assert training.max_choices == gateway.max_choices == 3
    assert training.max_logprobs == gateway.max_logprobs
    assert training.gateway_url == "http://127.0.0.1:8080"
    assert (training.trainer.model_path, training.trainer.tensor) == ("/models/tiny", 2)
    assert training.trainer.fingerprint == "f" * 64
    assert (training.journal, training.name) == ("", "local")
    assert training.key_file == str(layout.training_key)
    assert training.tokenizer == ""
    assert derive_training(check({}), layout, {}) is None


def test_a_training_journal_is_where_the_registrars_is(tmp_path: Path) -> None:
    layout = Layout.of(str(tmp_path))
    fleet = {"registrar": {"journal": "postgresql://roost@db/roost"}, "node": {"name": "n1"}}
    trained = {"base": "tiny", "trainer": {"model_path": "/models/tiny"}}
    training = derive_training(check(fleet | {"training": trained}), layout, {})
    assert training is not None
    assert (training.journal, training.name) == ("postgresql://roost@db/roost", "n1")
    own = trained | {"journal": "postgresql://roost@other/training", "name": "east"}
    training = derive_training(check(fleet | {"training": own}), layout, {})
    assert training is not None
    assert (training.journal, training.name) == ("postgresql://roost@other/training", "east")
    for field, value in (("journal", "postgresql://roost:secret@db/roost"), ("name", "A b")):
        with pytest.raises(InvalidRequest, match=rf"training\.{field}"):
            check({"training": trained | {field: value}})


@pytest.mark.parametrize(
    ("trainer", "engines", "expected"),
    [
        ("auto", (), "auto"),
        ("auto", (("tiny", "auto"),), "auto"),
        ("auto", (("other", "float16"), ("tiny", "float"), ("tiny", "float32")), "float32"),
        ("bfloat16", (("tiny", "float32"),), "bfloat16"),
    ],
)
def test_a_base_is_trained_in_what_its_engines_are_told(
    trainer: str, engines: tuple[tuple[str, str], ...], expected: str, tmp_path: Path
) -> None:
    told = [{"base": base, "dtype": dtype, "model_path": f"/models/{base}"} for base, dtype in engines]
    training = {"base": "tiny", "trainer": {"dtype": trainer, "model_path": "/models/tiny"}}
    settings = derive_training(check({"node": {"engines": told}, "training": training}), Layout.of(str(tmp_path)), {})
    assert settings is not None
    assert settings.trainer.dtype == expected


def test_engines_that_differ_leave_the_choice_to_the_user(tmp_path: Path) -> None:
    engines = [{"base": "tiny", "dtype": dtype, "model_path": "/models/tiny"} for dtype in ("auto", "float32")]
    with pytest.raises(InvalidRequest, match="engines of its base have auto and float32") as refused:
        check({"node": {"engines": engines}, "training": {"base": "tiny"}})
    assert refused.value.field == "training.trainer.dtype"
    # of a server that we only attach to, the setting says nothing
    engines[1] |= {"attach": "127.0.0.1:8000"}
    found = check({"node": {"engines": engines}, "training": {"base": "tiny"}})
    settings = derive_training(found, Layout.of(str(tmp_path)), {})
    assert settings is not None
    assert settings.trainer.dtype == "auto"


@pytest.mark.parametrize(
    ("training", "field"),
    [
        ({"base": "tiny"}, "training.trainer.model_path"),
        ({"base": "tiny", "trainer": {"model_path": "m", "dtype": "int3"}}, "training.trainer.dtype"),
        ({"base": "a/b", "trainer": {"model_path": "m"}}, "training.base"),
        ({"base": "tiny", "trainer": {"model_path": "m"}, "tenant": "A"}, "training.tenant"),
        ({"base": "tiny", "trainer": {"model_path": "m"}, "revision_dtype": "FP8"}, "training.revision_dtype"),
        ({"base": "tiny", "trainer": {"tensors": 2}}, "training.trainer.tensors"),
        ({"poll_s": 0.0}, "training.poll_s"),
    ],
)
def test_training_that_can_t_be_is_named(training: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check({"training": training})
    assert field in refused.value.message
