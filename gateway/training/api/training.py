"""The operations of runs: each is logged before it is acknowledged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from catalog.names import shown
from gateway.training.answers import PROTOBUF
from gateway.training.data import JsonInput, open_protobuf, read_json, read_protobuf
from gateway.training.journal import Accepted
from gateway.training.paths import WEIGHTS, check_name, parse_path
from gateway.training.records import RunRecord
from gateway.training.work import (
    Load,
    Refused,
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
from .sessions import answer

routes = web.RouteTableDef()

T = TypeVar("T")

_MAX_SEQ = (1 << 31) - 1
_MAX_TTL_S = 10 * 366 * 86400


class _Addressed(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: int


@routes.post("/api/v1/forward_backward")
async def forward_backward(request: web.Request) -> web.Response:
    if request.content_type != PROTOBUF:
        return await ordered(request, await body_of(request), bodies.Training, _forward_backward)
    addressed = open_protobuf(await body_of(request))
    run = _open_run(request, addressed.model_id)
    return await _accepted(request, run, addressed.seq_id, _or_refused(read_protobuf, addressed.message))


@routes.post("/api/v1/forward")
async def forward(request: web.Request) -> web.Response:
    return await ordered(request, await body_of(request), bodies.Training, _forward)


@routes.post("/api/v1/optim_step")
async def optim_step(request: web.Request) -> web.Response:
    return await ordered(request, await body_of(request), bodies.OptimStep, _step)


@routes.post("/api/v1/save_weights")
async def save_weights(request: web.Request) -> web.Response:
    return await ordered(request, await body_of(request), bodies.SaveWeights, _save)


@routes.post("/api/v1/save_weights_for_sampler")
async def save_weights_for_sampler(request: web.Request) -> web.Response:
    return await ordered(request, await body_of(request), bodies.SaveForSampler, _save_for_sampler)


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
    return Save(name=name, ttl_s=ttl_of(given.ttl_seconds), overwrite=given.overwrite)


def load_of(given: bodies.LoadWeights) -> Load:
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
        ttl_s=ttl_of(given.ttl_seconds),
    )


def sampler_id(session_id: str, number: int) -> str:
    """A sampling session's name, which its client may derive."""
    return f"{session_id}:sample:{number}"


def ttl_of(seconds: int | None) -> int:
    """Seconds, 0 for ever. Raises InvalidRequest."""
    if seconds is not None and not 0 < seconds <= _MAX_TTL_S:
        raise InvalidRequest(f"ttl_seconds is {seconds}: expected 1 to {_MAX_TTL_S}", field="ttl_seconds")
    return seconds or 0


# how an operation is taken


async def ordered(request: web.Request, body: bytes, kind: type[T], make: Callable[[T], TrainingAsk]) -> web.Response:
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
    return told(request, await shared.journal.accept(run.model_id, seq, run.tenant, ask), run.model_id)


def told(request: web.Request, accepted: Accepted, model_id: str) -> web.Response:
    """The acknowledgement of an operation that is in the journal, which runs in its turn from now on."""
    if accepted.new:
        services(request).lines.admit(accepted.operation)
    return answer({"request_id": accepted.operation.request_id, "model_id": model_id})


async def body_of(request: web.Request) -> bytes:
    """Raises TooLarge."""
    return await bodies.read_bytes(request, services(request).settings.max_body_bytes)
