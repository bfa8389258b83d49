"""From the one configuration to what each process is told."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from backends.interface import EngineSettings
from backends.registry import check_trainer
from backends.trainer import TrainerSettings
from catalog.settings import CurveSettings, RegistrarSettings, RegistrarTuning
from gateway.settings import GatewaySettings, GatewayTuning, NodeAddress
from gateway.training.settings import TrainingSettings, TrainingTuning, TransferAddress
from sidecar.settings import NodeTuning, SidecarSettings, TrainerAddress
from wire.curve import make_keys
from wire.outcomes import InvalidRequest, RoostError

from .config import GatewayConfig, NodeConfig, RoostConfig, TrainingConfig, base_path, trained_dtype
from .layout import Layout, absolute, write_private

REGISTRAR, SIDECAR, GATEWAY, TRAINING = "registrar", "sidecar", "gateway", "training"
# those with CURVE keys of their own: the training service is the gateway's other half, and has the gateway's
PROCESSES = (REGISTRAR, SIDECAR, GATEWAY)


class KeyPair(msgspec.Struct, frozen=True):
    """A process's CURVE keys (Z85) as they lie in the state folder."""

    public: str
    secret: str


class Deployment(NamedTuple):
    """The settings of every process of this host."""

    registrar: RegistrarSettings
    sidecar: SidecarSettings
    gateway: GatewaySettings


def needs_curve(config: RoostConfig) -> bool:
    """Whether anything is served or reached over TCP, where CURVE is never optional."""
    endpoints = (
        config.registrar.endpoint, config.registrar.feed_endpoint, config.node.endpoint, config.node.feed_endpoint,
        config.node.bytes_endpoint, config.training.endpoint, config.training.feed_endpoint,
        *(endpoint for node in config.gateway.nodes for endpoint in (node.endpoint, node.feed_endpoint)),
        *(endpoint for trainer in config.node.trainers for endpoint in (trainer.endpoint, trainer.feed_endpoint)),
    )  # fmt: skip
    return bool(config.node.peers or config.training.peers) or any(
        endpoint.startswith("tcp://") for endpoint in endpoints
    )


def curve_keys(layout: Layout, *, make: bool = True) -> dict[str, KeyPair]:
    """The key pair of each process, made on first use. Raises InvalidRequest for a damaged key file."""
    pairs: dict[str, KeyPair] = {}
    for process in PROCESSES:
        path = layout.keys / f"{process}.curve.json"
        if not path.exists() and make:
            write_private(path, msgspec.json.encode(KeyPair(*make_keys())))
        try:
            pairs[process] = msgspec.json.decode(path.read_bytes(), type=KeyPair)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"{path} is no key file ({error}): remove it, and it is made anew") from None
    return pairs


def gateway_name(layout: Layout) -> str:
    """A name that no other gateway has, made on first use: nodes tell gateways, and lives of one, apart by it."""
    path = layout.gateway_name
    if not path.exists():
        write_private(path, f"gateway-{secrets.token_hex(6)}\n".encode())
    return path.read_text().strip()


def engine_settings(node: NodeConfig, fingerprints: Mapping[str, str]) -> tuple[EngineSettings, ...]:
    """Every engine of the node, one by one and named. ``fingerprints`` maps each base to the catalog's."""
    engines: list[EngineSettings] = []
    for config in node.engines:
        fields = _fields(EngineSettings, config)
        for _ in range(config.count):
            taken = {engine.name for engine in engines}
            fields["name"] = _free_name(config.name or config.base.lower(), taken, numbered=config.count > 1)
            fields["model_path"] = str(absolute(config.model_path)) if config.model_path else ""
            fields["fingerprint"] = fingerprints[config.base]
            engines.append(EngineSettings(**fields))
    return tuple(engines)


def derive(config: RoostConfig, layout: Layout, fingerprints: Mapping[str, str]) -> Deployment:
    """What each process is told. Makes CURVE keys where an endpoint needs them."""
    keys = curve_keys(layout) if needs_curve(config) else {}
    node = NodeAddress(
        name=config.node.name,
        endpoint=config.node.endpoint or layout.socket("node"),
        feed_endpoint=config.node.feed_endpoint or layout.socket("node-feed"),
        public=keys[SIDECAR].public if keys else "",
    )
    registrar = _registrar(config, layout, keys)
    return Deployment(
        registrar,
        _sidecar(config, layout, keys, node, registrar.feed_endpoint, engine_settings(config.node, fingerprints)),
        _gateway(config, layout, keys, node, registrar.endpoint),
    )


def _registrar(config: RoostConfig, layout: Layout, keys: Mapping[str, KeyPair]) -> RegistrarSettings:
    return RegistrarSettings(
        catalog_dir=str(layout.catalog),
        store_dir=str(layout.store),
        store=config.location,
        endpoint=config.registrar.endpoint or layout.socket("registrar"),
        feed_endpoint=config.registrar.feed_endpoint or layout.socket("registrar-feed"),
        curve=_curve(REGISTRAR, keys),
        **_fields(RegistrarTuning, config.registrar),
    )


def _sidecar(
    config: RoostConfig,
    layout: Layout,
    keys: Mapping[str, KeyPair],
    node: NodeAddress,
    registrar_feed: str,
    engines: tuple[EngineSettings, ...],
) -> SidecarSettings:
    trainer = TrainerAddress(
        endpoint=layout.socket("revisions"),
        feed_endpoint=layout.socket("revisions-feed"),
        public=keys[GATEWAY].public if keys else "",
    )
    return SidecarSettings(
        node=node.name,
        endpoint=node.endpoint,
        feed_endpoint=node.feed_endpoint,
        bytes_endpoint=config.node.bytes_endpoint or _beside(node.endpoint, layout),
        store_dir=str(layout.store),
        store=config.location,
        run_dir=str(layout.run),
        log_dir=str(layout.logs),
        engines=engines,
        registrar_feed=registrar_feed,
        trainers=(*((trainer,) if config.training.base else ()), *config.node.trainers),
        disk_dir=str(layout.disk / node.name),
        curve=_curve(SIDECAR, keys, config.node.peers),
        **_fields(NodeTuning, config.node),
    )


def _gateway(
    config: RoostConfig, layout: Layout, keys: Mapping[str, KeyPair], node: NodeAddress, registrar_endpoint: str
) -> GatewaySettings:
    return GatewaySettings(
        name=config.gateway.name or gateway_name(layout),
        catalog_dir=str(layout.catalog),
        store_dir=str(layout.store),
        store=config.location,
        registrar_endpoint=registrar_endpoint,
        nodes=(node, *config.gateway.nodes),
        nodes_file=str(absolute(config.gateway.nodes_file) if config.gateway.nodes_file else layout.nodes_file),
        training=layout.socket_file(TRAINING) if config.training.base else "",
        curve=_curve(GATEWAY, keys),
        **_fields(GatewayTuning, config.gateway),
    )


def derive_training(config: RoostConfig, layout: Layout, fingerprints: Mapping[str, str]) -> TrainingSettings | None:
    """What the training service is told, where there is to be one. ``fingerprints`` as in ``derive``."""
    training = config.training
    if not training.base:
        return None
    deployment = derive(without_engines(config), layout, {})
    path = str(absolute(base_path(config)))
    anonymous = config.gateway.anonymous
    # only clients of this host are anonymous: they can read the base's own files
    tokenizer = training.tokenizer or (path if anonymous else "")
    trainer = _fields(TrainerSettings, training.trainer)
    trainer |= {"model_path": path, "dtype": trained_dtype(config), "fingerprint": fingerprints.get(training.base, "")}
    return TrainingSettings(
        base=training.base,
        trainer=TrainerSettings(**trainer),
        journal=training.journal or config.registrar.journal,
        name=training.name or config.node.name,
        socket=layout.socket_file(TRAINING),
        gateway_url=gateway_url(config.gateway),
        key_file="" if anonymous else str(layout.training_key),
        anonymous=anonymous,
        catalog_dir=deployment.gateway.catalog_dir,
        store_dir=deployment.gateway.store_dir,
        store=deployment.gateway.store,
        registrar_endpoint=deployment.gateway.registrar_endpoint,
        transfers=_transfers(training, deployment.sidecar.trainers[0]),
        nodes=tuple(node.name for node in deployment.gateway.nodes),
        nodes_file=deployment.gateway.nodes_file,
        state_dir=str(layout.training),
        log_dir=str(layout.logs),
        max_choices=config.gateway.max_choices,
        max_generated_tokens=config.gateway.max_generated_tokens,
        max_logprobs=config.gateway.max_logprobs,
        curve=_with_peers(deployment.gateway.curve, training.peers),
        **_fields(TrainingTuning, training) | {"tokenizer": tokenizer},
    )


def check_trained(config: RoostConfig, layout: Layout) -> None:
    """Whether the base can be trained as it is configured, where its folder is on this host. Raises RoostError."""
    training = derive_training(config, layout, {})
    if training is None or not Path(training.trainer.model_path).is_dir():
        return
    try:
        check_trainer(training.trainer)
    except RoostError as error:
        path = ".".join(filter(None, ("training.trainer", error.field)))
        raise type(error)(f"{path}: {error.message}", field=path) from error


def without_engines(config: RoostConfig) -> RoostConfig:
    """What is known before the catalog says which bases there are."""
    node: NodeConfig = msgspec.structs.replace(config.node, engines=())
    return msgspec.structs.replace(config, node=node)


def gateway_url(gateway: GatewayConfig) -> str:
    """Where this host reaches the gateway."""
    host = "127.0.0.1" if gateway.host in {"0.0.0.0", ""} else gateway.host  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{gateway.port}" if ":" in host else f"http://{host}:{gateway.port}"


def _beside(endpoint: str, layout: Layout) -> str:
    """Where a node that takes requests at ``endpoint`` gives bytes to others, if nothing else is said."""
    return f"{endpoint.rpartition(':')[0]}:*" if endpoint.startswith("tcp://") else layout.socket("node-bytes")


def _curve(process: str, keys: Mapping[str, KeyPair], peers: tuple[str, ...] = ()) -> CurveSettings | None:
    """``peers``: keys of other hosts that may connect too."""
    if not keys:
        return None
    return CurveSettings(
        public=keys[process].public,
        secret=keys[process].secret,
        server_public=keys[REGISTRAR].public,
        peers=(*(pair.public for pair in keys.values()), *peers),
    )


def _transfers(training: TrainingConfig, here: TrainerAddress) -> tuple[TransferAddress, ...]:
    """For this host's sidecar, which can read our files, and for those of others."""
    ours = TransferAddress(here.endpoint, here.feed_endpoint)
    return (ours, TransferAddress(training.endpoint, training.feed_endpoint)) if training.endpoint else (ours,)


def _with_peers(curve: CurveSettings | None, peers: tuple[str, ...]) -> CurveSettings | None:
    return curve and msgspec.structs.replace(curve, peers=(*curve.peers, *peers))


def _fields(kind: type[msgspec.Struct], section: msgspec.Struct) -> dict[str, Any]:
    """What ``section`` has of the fields of ``kind``."""
    return {field.name: getattr(section, field.name) for field in msgspec.structs.fields(kind)}


def _free_name(wanted: str, taken: set[str], *, numbered: bool) -> str:
    if not numbered and wanted not in taken:
        return wanted
    number = 0
    while f"{wanted}-{number}" in taken:
        number += 1
    return f"{wanted}-{number}"
