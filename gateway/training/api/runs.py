"""Runs: how they begin, and what is known of them."""

from __future__ import annotations

import secrets
import time
from typing import Any

from aiohttp import web

from catalog.names import check_policy, shown
from gateway.auth import Caller
from gateway.training.paths import parse_saved
from gateway.training.records import RunRecord, SessionRecord
from gateway.training.work import CreateRun, ResumeRun, TrainingAsk
from wire.events import Scope
from wire.outcomes import InvalidRequest, NotFound

from . import bodies
from .services import caller, open_session, own_run, services
from .sessions import POLICY, answer, words
from .training import body_of, load_of, ordered, told

routes = web.RouteTableDef()


@routes.post("/api/v1/create_model")
async def create_model(request: web.Request) -> web.Response:
    """Begin a run: a new adapter."""
    asker = caller(request, Scope.PUBLISH)
    new = bodies.decode(await body_of(request), bodies.NewRun)
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
    body = await body_of(request)
    given = bodies.decode(body, bodies.LoadWeights)
    if given.session_id is None:
        return await ordered(request, body, bodies.LoadWeights, load_of)
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
    run = own_run(request, asker, bodies.decode(await body_of(request), bodies.OfRun).model_id)
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
    """What a run needs to be like to take a checkpoint, or was like that saved what is sampled from."""
    asker = caller(request, Scope.INVOKE)
    asked = bodies.decode(await body_of(request), bodies.WeightsInfo)
    path = str(parse_saved(asked.tinker_path))
    saved = services(request).journal.saved(path)
    if saved is None or not asker.reaches(saved.tenant):
        raise NotFound(f"there is no checkpoint {path}", field="path")
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


async def _begun(request: web.Request, run: RunRecord, ask: TrainingAsk) -> web.Response:
    return told(request, await services(request).journal.begin_run(run, ask), run.model_id)


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
