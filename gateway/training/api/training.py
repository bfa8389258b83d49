"""Runs and their operations: each is logged before it is acknowledged."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from catalog.names import check_policy, shown
from gateway.auth import Caller
from gateway.training.data import JsonInput, open_protobuf, read_json, read_protobuf
from gateway.training.journal import Accepted
from gateway.training.paths import WEIGHTS, check_name, parse_path
from gateway.training.records import RunRecord, SessionRecord
from gateway.training.work import (
    CreateRun,
    Load,
    Refused,
    ResumeRun,
    Save,
    SaveForSampler,
    Step,
    Train,
    TrainingAsk,
)
from wire.events import Scope
from wire.outcomes import InvalidRequest, NoHealthyNode
from wire.trainer import Adam

from . import bodies
from .services import caller, open_session, own_run, services
from .sessions import POLICY, answer, words

routes = web.RouteTableDef()

T = TypeVar("T")

_PROTOBUF = "application/x-protobuf"
_MAX_SEQ = (1 << 31) - 1
_MAX_TTL_S = 10 * 366 * 86400


class _Addressed(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: int


@routes.post("/api/v1/create_model")
async def create_model(request: web.Request) -> web.Response:
    """Begin a run: a new adapter."""
    asker = caller(request, Scope.PUBLISH)
    new = bodies.decode(await _body(request), bodies.NewRun)
    session = open_session(request, asker, new.session_id)
    settings = services(request).settings
    if new.base_model != settings.base:
        raise InvalidRequest(
            f"base_model {shown(new.base_model)} is not trained here, only {settings.base}", field="base_model"
        )
    if new.lora_config is None:
        raise InvalidRequest("lora_config is missing: only adapters are trained here", field="lora_config")
    _check_optimizer(new.optimizer_config)
    lora = new.lora_config
    _check_unembed(lora, refused=settings.refuse_unembed)
    policy = _policy_of(asker, session, new.model_seq_id, new.user_metadata)
    ask = CreateRun(
        base=new.base_model, rank=lora.rank, seed=lora.seed, attention=lora.train_attn, mlp=lora.train_mlp,
        policy=policy,
    )  # fmt: skip
    run = _new_run(
        asker, session, new.model_seq_id, policy=policy, base=settings.base, rank=lora.rank, alpha=settings.alpha,
        seed=secrets.randbits(31) if lora.seed is None else lora.seed, attention=lora.train_attn, mlp=lora.train_mlp,
    )  # fmt: skip
    return await _begun(request, run, ask)


@routes.post("/api/v1/load_weights")
async def load_weights(request: web.Request) -> web.Response:
    """Load a checkpoint into a run, or begin a run as it is."""
    body = await _body(request)
    given = bodies.decode(body, bodies.LoadWeights)
    if given.session_id is None:
        return await _ordered(request, body, bodies.LoadWeights, _load)
    asker = caller(request, Scope.PUBLISH)
    session = open_session(request, asker, given.session_id)
    if given.model_seq_id is None:
        raise InvalidRequest("model_seq_id is missing", field="model_seq_id")
    _check_optimizer(given.optimizer_config)
    shared = services(request)
    saved = shared.executor.checkpoint(given.path, session.tenant)
    if given.base_model not in (None, saved.base):
        raise InvalidRequest(f"the checkpoint is of base {saved.base}", field="base_model")
    if saved.base != shared.settings.base:
        raise InvalidRequest(f"{saved.base} is not trained here, only {shared.settings.base}", field="path")
    policy = _policy_of(asker, session, given.model_seq_id, given.user_metadata)
    run = _new_run(
        asker, session, given.model_seq_id, policy=policy, base=saved.base, rank=saved.rank, alpha=saved.alpha,
        seed=saved.seed, attention=saved.attention, mlp=saved.mlp, targets=saved.targets,
    )  # fmt: skip
    return await _begun(request, run, ResumeRun(path=given.path, optimizer=given.optimizer, policy=policy))


@routes.post("/api/v1/get_info")
async def get_info(request: web.Request) -> web.Response:
    asker = caller(request, Scope.INVOKE)
    run = own_run(request, asker, bodies.decode(await _body(request), bodies.OfRun).model_id)
    tokenizer = services(request).settings.tokenizer or run.base
    return answer(
        {
            "type": "get_info",
            "model_id": run.model_id,
            "model_data": {"model_name": run.base, "tokenizer_id": tokenizer},
            "model_name": run.base,
            "is_lora": True,
            "lora_rank": run.rank,
        }
    )


@routes.post("/api/v1/weights_info")
async def weights_info(request: web.Request) -> web.Response:
    """What a run needs to be like to take a checkpoint."""
    asker = caller(request, Scope.INVOKE)
    asked = bodies.decode(await _body(request), bodies.WeightsInfo)
    shared = services(request)
    saved = shared.executor.checkpoint(asked.tinker_path, shared.tenant_of(asker))
    return answer(
        {
            "base_model": saved.base,
            "is_lora": True,
            "lora_rank": saved.rank,
            "train_attn": saved.attention,
            "train_mlp": saved.mlp,
            "train_unembed": False,
        }
    )


@routes.post("/api/v1/forward_backward")
async def forward_backward(request: web.Request) -> web.Response:
    if request.content_type != _PROTOBUF:
        return await _ordered(request, await _body(request), bodies.Training, _forward_backward)
    addressed = open_protobuf(await _body(request))
    run = _open_run(request, addressed.model_id)
    return await _accepted(request, run, addressed.seq_id, _or_refused(read_protobuf, addressed.message))


@routes.post("/api/v1/forward")
async def forward(request: web.Request) -> web.Response:
    return await _ordered(request, await _body(request), bodies.Training, _forward)


@routes.post("/api/v1/optim_step")
async def optim_step(request: web.Request) -> web.Response:
    return await _ordered(request, await _body(request), bodies.OptimStep, _step)


@routes.post("/api/v1/save_weights")
async def save_weights(request: web.Request) -> web.Response:
    return await _ordered(request, await _body(request), bodies.SaveWeights, _save)


@routes.post("/api/v1/save_weights_for_sampler")
async def save_weights_for_sampler(request: web.Request) -> web.Response:
    return await _ordered(request, await _body(request), bodies.SaveForSampler, _save_for_sampler)


# what an operation's body asks for; each raises InvalidRequest


def _forward_backward(given: bodies.Training) -> Train:
    return read_json(_present(given.forward_backward_input, "forward_backward_input"), forward_only=False)


def _forward(given: bodies.Training) -> Train:
    return read_json(_present(given.forward_input, "forward_input"), forward_only=True)


def _present(given: JsonInput | None, field: str) -> JsonInput:
    if given is None:
        raise InvalidRequest(f"{field} is missing", field=field)
    return given


def _step(given: bodies.OptimStep) -> Step:
    if given.adam_params is None:
        raise InvalidRequest("adam_params is missing: the optimizer is AdamW", field="adam_params")
    return Step(adam=msgspec.convert(given.adam_params, Adam, from_attributes=True))


def _save(given: bodies.SaveWeights) -> Save:
    name = check_name(given.path or f"{given.seq_id:06d}")
    return Save(name=name, ttl_s=_ttl(given.ttl_seconds), overwrite=given.overwrite)


def _load(given: bodies.LoadWeights) -> Load:
    parse_path(given.path, WEIGHTS)
    return Load(path=given.path, optimizer=given.optimizer)


def _save_for_sampler(given: bodies.SaveForSampler) -> SaveForSampler:
    if given.kind not in ("snapshot", "inflight"):
        raise InvalidRequest(f"kind {shown(given.kind)} is not snapshot or inflight", field="kind")
    name = check_name(given.path) if given.path is not None else ""
    number = given.sampling_session_seq_id
    if (number is None) is not bool(name):
        raise InvalidRequest("give path or sampling_session_seq_id, and one only", field="path")
    session_id = given.model_id.partition(":")[0]
    return SaveForSampler(
        name=name,
        sampler="" if number is None else sampler_id(session_id, number),
        follows=given.kind == "inflight",
        ttl_s=_ttl(given.ttl_seconds),
    )


def sampler_id(session_id: str, number: int) -> str:
    """A sampling session's name, which its client may derive."""
    return f"{session_id}:sample:{number}"


def _ttl(seconds: int | None) -> int:
    if seconds is not None and not 0 < seconds <= _MAX_TTL_S:
        raise InvalidRequest(f"ttl_seconds is {seconds}: expected 1 to {_MAX_TTL_S}", field="ttl_seconds")
    return seconds or 0


# how an operation is taken


async def _ordered(request: web.Request, body: bytes, kind: type[T], make: Callable[[T], TrainingAsk]) -> web.Response:
    """Take an operation of a run. One that is malformed has its place in the order, and fails there."""
    addressed = bodies.decode(body, _Addressed)
    run = _open_run(request, addressed.model_id)
    return await _accepted(request, run, addressed.seq_id, _or_refused(lambda: make(bodies.decode(body, kind))))


def _open_run(request: web.Request, model_id: str) -> RunRecord:
    """A run that the caller may train. Raises NotFound, and InvalidRequest for one whose session is finished."""
    asker = caller(request, Scope.PUBLISH)
    run = own_run(request, asker, model_id)
    open_session(request, asker, run.session_id)
    return run


def _or_refused(make: Callable[..., TrainingAsk], *arguments: Any) -> TrainingAsk:
    try:
        return make(*arguments)
    except InvalidRequest as error:
        return Refused(message=error.message)


async def _accepted(request: web.Request, run: RunRecord, seq: int, ask: TrainingAsk) -> web.Response:
    if not 1 <= seq <= _MAX_SEQ:
        raise InvalidRequest(f"seq_id is {seq}: a run's operations are numbered from 1 to {_MAX_SEQ}", field="seq_id")
    shared = services(request)
    # what the others wait for is always let in
    if seq != run.next_seq and shared.lines.pending_bytes > shared.settings.max_pending_bytes:
        raise NoHealthyNode("the trainer has as many operations waiting as it takes")
    return _told(request, await shared.journal.accept(run.model_id, seq, run.tenant, ask), run.model_id)


async def _begun(request: web.Request, run: RunRecord, ask: TrainingAsk) -> web.Response:
    return _told(request, await services(request).journal.begin_run(run, ask), run.model_id)


def _told(request: web.Request, accepted: Accepted, model_id: str) -> web.Response:
    if accepted.new:
        services(request).lines.admit(accepted.operation)
    return answer({"request_id": accepted.operation.request_id, "model_id": model_id})


async def _body(request: web.Request) -> bytes:
    return await bodies.read_bytes(request, services(request).settings.max_body_bytes)


def _new_run(
    asker: Caller,
    session: SessionRecord,
    number: int,
    *,
    policy: str,
    base: str,
    rank: int,
    alpha: float,
    seed: int,
    attention: bool,
    mlp: bool,
    targets: tuple[str, ...] = (),
) -> RunRecord:
    """The session's run of this number, at its beginning, for whoever asks now."""
    return RunRecord(
        model_id=f"{session.session_id}:train:{number}",
        session_id=session.session_id,
        tenant=session.tenant,
        key_id=asker.key_id,
        policy=policy,
        base=base,
        rank=rank,
        alpha=alpha,
        seed=seed,
        attention=attention,
        mlp=mlp,
        created_ms=time.time_ns() // 1_000_000,
        targets=targets,
    )


def _policy_of(asker: Caller, session: SessionRecord, number: int, metadata: dict[str, Any] | None) -> str:
    """The policy that a run is: as the metadata names it, else after the session."""
    wanted = words(metadata).get(POLICY) or session.metadata.get(POLICY) or f"run-{session.session_id}-{number}"
    policy = check_policy(wanted if "/" in wanted else f"{session.tenant}/{wanted}")
    tenant = policy.partition("/")[0]
    if tenant != session.tenant:
        raise InvalidRequest(f"the policy {policy} is not of tenant {session.tenant}", field="user_metadata")
    asker.require(Scope.PUBLISH, tenant)
    return policy


def _check_unembed(lora: bodies.LoraConfig, *, refused: bool) -> None:
    """Every SDK wants the unembedding trained unless it is told otherwise, and it is left out then."""
    if lora.train_unembed and (refused or not (lora.train_attn or lora.train_mlp)):
        raise InvalidRequest(
            "train_unembed is true, and the unembedding is not trained here: create the run with train_unembed=False",
            field="train_unembed",
        )


def _check_optimizer(config: bodies.OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise InvalidRequest(f"optimizer {shown(config.type)} is not there, only adamw", field="optimizer_config")
