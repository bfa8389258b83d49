"""Sampling sessions and samples."""

from __future__ import annotations

from aiohttp import web

from catalog.names import check_base
from gateway.training.completions import check_sample
from gateway.training.paths import SAMPLER_WEIGHTS, parse_path
from gateway.training.records import SamplerRecord, SessionRecord
from gateway.training.work import Sample
from wire.events import Scope
from wire.outcomes import InvalidRequest, NotFound, QuotaExceeded

from . import bodies
from .services import caller, own_session, services
from .sessions import answer
from .training import sampler_id

routes = web.RouteTableDef()


@routes.post("/api/v1/create_sampling_session")
async def create_sampling_session(request: web.Request) -> web.Response:
    asker = caller(request, Scope.INVOKE)
    shared = services(request)
    new = bodies.decode(await bodies.read_bytes(request, shared.settings.max_body_bytes), bodies.NewSampler)
    session = own_session(request, asker, new.session_id)
    record = _sampler_of(request, session, new)
    await shared.journal.open_sampler(record)
    shared.retention.bound(record)
    return answer({"type": "create_sampling_session", "sampling_session_id": record.sampler_id})


@routes.get("/api/v1/samplers/{sampler_id}")
async def get_sampler(request: web.Request) -> web.Response:
    record = _own_sampler(request, request.match_info["sampler_id"])
    return answer({"sampler_id": record.sampler_id, "base_model": record.base, "model_path": record.path or None})


@routes.post("/api/v1/asample")
async def asample(request: web.Request) -> web.Response:
    """Take a sample to do. 429 has the client come again after a second."""
    shared = services(request)
    body = await bodies.read_bytes(request, shared.settings.max_body_bytes)
    given = bodies.decode(body, bodies.Sampling)
    record = _own_sampler(request, given.sampling_session_id)
    ask = _sample_of(given)
    check_sample(ask, shared.settings)
    if shared.samples.pending >= shared.settings.max_pending_samples:
        raise QuotaExceeded("there are as many samples waiting as are taken", retry_after_s=1.0)
    accepted = await shared.journal.accept_sample(record.sampler_id, given.seq_id, record.tenant, ask)
    if accepted.new:
        shared.samples.admit(accepted.operation)
    shared.retention.used(record)
    request_id = accepted.operation.request_id
    names = [f"{request_id}-{number}" for number in range(ask.count)]
    return answer({"request_id": request_id, "sample_sequence_ids": names})


def _sampler_of(request: web.Request, session: SessionRecord, new: bodies.NewSampler) -> SamplerRecord:
    """Raises InvalidRequest and NotFound for what can't be sampled from."""
    shared = services(request)
    name = sampler_id(session.session_id, new.sampling_session_seq_id)
    if new.model_path is not None:
        parse_path(new.model_path, SAMPLER_WEIGHTS, "model_path")
        saved = shared.journal.saved(new.model_path)
        if saved is None or saved.tenant != session.tenant:
            raise NotFound(f"there are no sampler weights {new.model_path}", field="model_path")
        return SamplerRecord(name, session.tenant, saved.base, saved.policy, saved.revision, new.model_path)
    if new.base_model is None:
        raise InvalidRequest("give model_path or base_model", field="model_path")
    if shared.catalog.view().base(check_base(new.base_model, "base_model")) is None:
        raise NotFound(f"there is no base {new.base_model}", field="base_model")
    return SamplerRecord(name, session.tenant, new.base_model)


def _own_sampler(request: web.Request, name: str) -> SamplerRecord:
    asker = caller(request, Scope.INVOKE)
    record = services(request).journal.sampler(name)
    if record is None or not asker.reaches(record.tenant):
        raise NotFound(f"there is no sampling session {name[:120]!a}", field="sampling_session_id")
    return record


def _sample_of(given: bodies.Sampling) -> Sample:
    """Raises InvalidRequest for what is not done here."""
    if given.target_prompt_logprobs is not None or given.prompt_alt_tokens_k:
        raise InvalidRequest(
            "target_prompt_logprobs and prompt_alt_tokens_k are not supported", field="target_prompt_logprobs"
        )
    params = given.sampling_params
    return Sample(
        prompt=tuple(given.prompt.tokens("prompt")),
        count=given.num_samples,
        max_tokens=params.max_tokens,
        seed=params.seed,
        stop=_stops(params.stop),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        prompt_logprobs=bool(given.prompt_logprobs),
        last=given.prompt_logprobs_last_n or 0,
        topk_prompt=given.topk_prompt_logprobs,
        topk_sample=given.topk_sample_logprobs,
    )


def _stops(given: str | list[str | int] | None) -> tuple[str | int, ...] | None:
    if given is None:
        return None
    if isinstance(given, str):
        return (given,)
    texts = tuple(stop for stop in given if isinstance(stop, str))
    numbers = tuple(stop for stop in given if isinstance(stop, int))
    if texts and numbers:
        raise InvalidRequest("stop mixes text and token ids", field="stop")
    return texts or numbers
