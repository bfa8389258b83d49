"""Which processes make up the mesh, when each is ready, and what has to be in the catalog before an engine starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec

from catalog.client import RegistrarClient
from catalog.inputs import ALL_TENANTS
from catalog.keys import hash_secret, key_id, make_secret
from catalog.view import CatalogView
from wire.events import Scope
from wire.node import AnswerOfNode, AskOfNode, AskState, NodeReport
from wire.outcomes import InvalidRequest, NoHealthyNode
from wire.registrar import AddBase, AwaitPosition, CreateKey
from wire.sockets import Requester

from ..config import RoostConfig, base_path
from ..deployment import (
    GATEWAY,
    REGISTRAR,
    SIDECAR,
    TRAINING,
    check_trained,
    derive,
    derive_training,
    gateway_url,
    without_engines,
)
from ..fingerprints import fingerprint_of
from ..layout import Layout, absolute, write_private
from .child import ChildSpec
from .state import EngineState

PROBE_TIMEOUT_S = 2.0
COMMAND_TIMEOUT_S = 30.0
# its trainer saves what is not saved yet
TRAINING_GRACE_S = 30.0
ACTOR = "roost-up"


class Mesh:
    """The registrar, the sidecar, the gateway and the training service of one host, as ``config`` describes them.

    Made on an event loop; ``note`` gets a sentence for each longer piece of work.
    """

    def __init__(self, config: RoostConfig, layout: Layout, note: Callable[[str], None]) -> None:
        self._config = config
        self._layout = layout
        self._note = note
        self.url = gateway_url(config.gateway)
        # the bases' fingerprints are known only once the registrar runs; the registrar's own settings need none
        self._deployment = derive(without_engines(config), layout, {})
        self._curve = self._deployment.gateway.curve
        self._registrar = RegistrarClient(self._deployment.registrar.endpoint, curve=self._curve)
        self._node: Requester[AskOfNode, AnswerOfNode] | None = None

    async def steps(self) -> AsyncIterator[ChildSpec]:
        """The processes in the order in which they start."""
        # before anything runs: a base whose training is refused is not registered for it
        check_trained(self._config, self._layout)
        yield self._spec(REGISTRAR, "catalog", self._deployment.registrar, self._registrar_answers)
        fingerprints = await self._register_bases()
        if not self._config.gateway.anonymous:
            await self._ensure_admin_key()
        self._deployment = derive(self._config, self._layout, fingerprints)
        yield self._spec(SIDECAR, "sidecar", self._deployment.sidecar, self._sidecar_answers)
        yield self._spec(GATEWAY, "gateway", self._deployment.gateway, self._gateway_answers, grace_s=10.0)
        training = derive_training(self._config, self._layout, fingerprints)
        if training is not None:
            if training.key_file:
                await self._ensure_key(self._layout.training_key, (Scope.INVOKE,), "the training service's")
            yield self._spec(
                TRAINING, "gateway.training", training, lambda: _answers(training.socket), grace_s=TRAINING_GRACE_S
            )

    async def engines(self) -> tuple[EngineState, ...]:
        """The engines as the sidecar sees them. Raises RoostError where it does not answer."""
        report = await self._ask_node()
        return tuple(
            EngineState(
                engine.engine, engine.base, engine.health, engine.detail, engine.pid, engine.since, engine.restarts
            )
            for engine in report.engines
        )

    def close(self) -> None:
        self._registrar.close()
        if self._node is not None:
            self._node.close()

    async def _register_bases(self) -> dict[str, str]:
        """Fingerprint of each base that is served or trained, registered where the catalog does not know it yet."""
        fingerprints: dict[str, str] = {}
        for index, engine in enumerate(self._config.node.engines):
            if engine.base in fingerprints:
                continue
            if engine.model_path:
                fingerprints[engine.base] = await self._register(engine.base, engine.model_path)
            else:
                fingerprints[engine.base] = self._known_fingerprint(engine.base, f"node.engines[{index}].base")
        trained = self._config.training.base
        if trained and trained not in fingerprints:
            fingerprints[trained] = await self._register(trained, base_path(self._config))
        return fingerprints

    async def _register(self, base: str, model_path: str) -> str:
        """The fingerprint of a base, which the catalog knows from now on."""
        self._note(f"reading the weights of {base}")
        path = absolute(model_path)
        found = await asyncio.to_thread(fingerprint_of, path, self._layout.run / "fingerprints.json")
        if not self._registered(base, found.value, str(path), found.config):
            command = AddBase(actor=ACTOR, name=base, fingerprint=found.value, path=str(path), config=found.config)
            await self._registrar.run(command, timeout_s=COMMAND_TIMEOUT_S)
        return found.value

    def _registered(self, name: str, fingerprint: str, path: str, config: bytes) -> bool:
        """Whether the catalog has the base as it is: a start must not need a journal that may be away."""
        view = CatalogView.open(self._layout.catalog)
        try:
            known = view.base(name)
        finally:
            view.close()
        return known is not None and (known.fingerprint, known.path, known.config) == (fingerprint, path, config)

    def _known_fingerprint(self, base: str, field: str) -> str:
        view = CatalogView.open(self._layout.catalog)
        try:
            record = view.base(base)
        finally:
            view.close()
        if record is None:
            raise InvalidRequest(
                f"{field}: base {base} is not registered: give `model_path` too, so that it can be", field=field
            )
        return record.fingerprint

    async def _ensure_admin_key(self) -> None:
        """On a first start without any key, make one that may do everything, for the commands on this host.

        The secret is written before the key exists, so that a start cut short in between is simply done again.
        """
        view = CatalogView.open(self._layout.catalog)
        try:
            first_start = not view.keys(limit=1).keys
        finally:
            view.close()
        if first_start:
            await self._ensure_key(self._layout.admin_key, (Scope.ADMIN,), "made by roost up")

    async def _ensure_key(self, path: Path, scopes: tuple[Scope, ...], label: str) -> None:
        """The key in ``path``, for all tenants, is in the catalog; it is made where there is none."""
        secret = _secret_in(path)
        view = CatalogView.open(self._layout.catalog)
        try:
            known = view.key(hash_secret(secret))
        finally:
            view.close()
        if known is None:
            command = CreateKey(
                actor=ACTOR,
                key_id=key_id(secret),
                key_hash=hash_secret(secret),
                tenant=ALL_TENANTS,
                scopes=scopes,
                label=label,
            )
            await self._registrar.run(command, timeout_s=COMMAND_TIMEOUT_S)

    async def _registrar_answers(self) -> None:
        # whatever the journal begins with: what a snapshot stands for is not in it
        await self._registrar.run(AwaitPosition(seq=0), timeout_s=PROBE_TIMEOUT_S)

    async def _sidecar_answers(self) -> None:
        await self._ask_node()

    async def _ask_node(self) -> NodeReport:
        if self._node is None:
            address = self._deployment.gateway.nodes[0]
            self._node = Requester(
                address.endpoint, AskOfNode, AnswerOfNode, curve=self._curve, server_public=address.public
            )
        answer = await self._node.request(AskState(), timeout_s=PROBE_TIMEOUT_S)
        if not isinstance(answer, NodeReport):
            raise NoHealthyNode(f"the sidecar answered {type(answer).__name__} to a question for its state")
        return answer

    async def _gateway_answers(self) -> None:
        await _probe("gateway", f"{self.url}/healthz")

    def _spec(
        self,
        name: str,
        module: str,
        settings: msgspec.Struct,
        ready: Callable[[], Awaitable[None]],
        *,
        grace_s: float = 5.0,
    ) -> ChildSpec:
        file = self._layout.settings_file(name)
        write_private(file, msgspec.json.format(msgspec.json.encode(settings)))
        return ChildSpec(
            name, module, ("--settings", str(file)), self._layout.log_file(name), ready, stop_grace_s=grace_s
        )


def _secret_in(path: Path) -> str:
    """The secret that lies there; a new one where there is none."""
    if not path.exists():
        write_private(path, make_secret().encode() + b"\n")
    return path.read_text().strip()


async def _answers(socket: str) -> None:
    await _probe("training service", "http://training/api/v1/healthz", aiohttp.UnixConnector(socket))


async def _probe(name: str, url: str, connector: aiohttp.BaseConnector | None = None) -> None:
    """Raises NoHealthyNode unless it answers that it is well."""
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            session.get(url) as answer,
        ):
            if answer.status != 200:
                raise NoHealthyNode(f"the {name}'s health is {answer.status}")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise NoHealthyNode(f"the {name} does not answer: {error}") from error
