"""Who pulls revisions from whom, as the configuration says."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.training.settings import TransferAddress
from ops.config import check
from ops.deployment import derive, derive_training
from ops.layout import Layout
from wire.curve import make_keys
from wire.outcomes import InvalidRequest


def test_a_host_that_trains_gives_revisions_to_its_own_sidecar(tmp_path: Path) -> None:
    layout = Layout.of(str(tmp_path))
    config = check({"training": {"base": "tiny", "trainer": {"model_path": "/models/tiny"}}})
    training = derive_training(config, layout, {})
    assert training is not None
    (trainer,) = derive(config, layout, {}).sidecar.trainers
    assert training.transfers == (TransferAddress(trainer.endpoint, trainer.feed_endpoint),)
    assert trainer.endpoint.startswith("ipc://")
    assert training.nodes == ("local",)
    assert derive(check({}), layout, {}).sidecar.trainers == ()


def test_other_hosts_are_let_in_by_their_keys(tmp_path: Path) -> None:
    layout = Layout.of(str(tmp_path))
    layout.keys.mkdir(mode=0o700)
    stranger, far = make_keys()[0], {"endpoint": "tcp://a:1", "feed_endpoint": "tcp://a:2", "public": make_keys()[0]}
    trained = {"base": "tiny", "trainer": {"model_path": "/models/tiny"}}
    ours = trained | {"endpoint": "tcp://b:1", "feed_endpoint": "tcp://b:2", "peers": [stranger]}
    config = check({"training": ours, "node": {"trainers": [far]}})
    training = derive_training(config, layout, {})
    sidecar = derive(config, layout, {}).sidecar
    assert training is not None
    assert training.curve is not None
    assert sidecar.curve is not None
    assert training.transfers[1] == TransferAddress("tcp://b:1", "tcp://b:2")
    assert training.transfers[0].endpoint == sidecar.trainers[0].endpoint, "its own sidecar reads its files"
    assert sidecar.trainers[1].endpoint == "tcp://a:1"
    assert sidecar.trainers[0].public == training.curve.public
    assert {stranger, sidecar.curve.public} <= set(training.curve.peers)


@pytest.mark.parametrize(
    ("tree", "field"),
    [
        ({"training": {"endpoint": "http://b:1"}}, "training.endpoint"),
        ({"training": {"feed_endpoint": "tcp://b:0"}}, "training.feed_endpoint"),
        ({"training": {"endpoint": "tcp://b:1"}}, "training.feed_endpoint"),
        ({"training": {"peers": ["short"]}}, "training.peers[0]"),
        ({"training": {"announce_wait_s": -1.0}}, "training.announce_wait_s"),
        ({"node": {"trainers": [{"endpoint": "tcp://b:1", "feed_endpoint": "tcp://b:2"}]}}, "node.trainers[0].public"),
        ({"node": {"trainers": [{"endpoint": "b:1", "feed_endpoint": "tcp://b:2"}]}}, "node.trainers[0].endpoint"),
    ],
)
def test_what_can_t_be_is_named(tree: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(tree)
    assert field in refused.value.message
