"""The data plane: authenticate, parse, resolve, place, lease, forward and stream, release, account.

Who owns a request: ``DataPlane.handle`` from the first to the last byte. A lease is given back on every path out of
``_attempt``; the engine's work ends with its response, which the relay closes on every path out of it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import zlib
from collections.abc import Iterable

import msgspec

from backends.dialect import Dialect
from backends.registry import dialect_of
from wire.events import Scope
from wire.outcomes import ClientGone, DeadlinePassed, EngineFailed, InvalidRequest, NoHealthyNode, Outcome, RoostError

from .accesslog import AccessLog
from .answer import AnswerFilter, RequestRefused, error_code, is_clients_fault, rename
from .auth import ALL_TENANTS, Authenticator, Caller
from .body import Body, encode, parse_body
from .bounds import GenerationBounds
from .catalog_source import CatalogSource
from .copies import Copies
from .http import Exchange, UpstreamFailed, UpstreamPool, UpstreamResponse, error_answer
from .leases import Lease, LeaseDesk, TryElsewhere
from .metrics import Metrics
from .nodes import Node
from .placement import Placer
from .quotas import Quotas
from .resolve import Target, resolve
from .stickiness import selector
from .trace import Trace, request_id
from .usage import UsageMeter, ask_for_usage

_log = logging.getLogger(__name__)

ROUTES = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
DATA_ROUTES = frozenset(("POST", path) for path in ROUTES)

_MAX_ERROR_BYTES = 1 << 20
_JSON = (b"content-type", b"application/json")
# a plain number: neither an exponent nor what Python takes for one besides
_SECONDS_RE = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")
_OUTCOME_OK = (b"x-roost-outcome", Outcome.OK.value.encode())

Header = tuple[bytes, bytes]


class Timeouts(msgspec.Struct, frozen=True):
    """Seconds: the longest a request may take, and the longest it may wait for a lease."""

    request_s: float
    acquire_s: float


class Job(msgspec.Struct, frozen=True):
    """A request that was understood: what it asks for, where, and until when (the loop's time).

    ``metered``: its tokens are counted; ``hides_usage``: the client does not get to see the event that tells them.
    """

    body: Body
    target: Target
    deadline: float
    metered: bool = False
    hides_usage: bool = False


class DataPlane:
    """Answers the data routes. One ``handle`` runs for each request, in the task that the HTTP front made for it."""

    def __init__(
        self,
        *,
        catalog: CatalogSource,
        authenticator: Authenticator,
        placer: Placer,
        leases: LeaseDesk,
        upstream: UpstreamPool,
        metrics: Metrics,
        access_log: AccessLog | None,
        timeouts: Timeouts,
        bounds: GenerationBounds,
        quotas: Quotas | None = None,
        prefix_bytes: int = 0,
    ) -> None:
        self._catalog = catalog
        self._authenticator = authenticator
        self._placer = placer
        self._leases = leases
        self._copies = Copies(leases, timeouts.acquire_s)
        self._upstream = upstream
        self._metrics = metrics
        self._access_log = access_log
        self._timeouts = timeouts
        self._bounds = bounds
        self._quotas = quotas or None
        self._prefix_bytes = prefix_bytes
        self._turn = 0
        self._loop = asyncio.get_running_loop()

    async def handle(self, exchange: Exchange) -> None:
        """Answer one request, with exactly one outcome."""
        headers = exchange.headers
        trace = Trace(ROUTES[exchange.path], request_id(headers.get(b"x-request-id")), exchange.received_at)
        self._metrics.in_flight += 1
        try:
            job = self._understand(exchange, trace)
            await self._serve(exchange, trace, job)
        except RoostError as error:
            trace.fail(error)
            self._refuse(exchange, trace, error)
        except asyncio.CancelledError:
            self._end_cancelled(exchange, trace)
            raise
        except Exception:
            _log.exception("request %s failed inside of the gateway", trace.request_id.decode())
            failure = EngineFailed("the gateway failed on this request")
            trace.fail(failure)
            self._refuse(exchange, trace, failure)
        finally:
            self._account(exchange, trace)

    def _understand(self, exchange: Exchange, trace: Trace) -> Job:
        view = self._catalog.view()
        headers = exchange.headers
        caller: Caller = self._authenticator.caller(
            view,
            headers.get(b"authorization"),
            headers.get(b"x-api-key"),
            headers.get(b"host"),
            headers.get(b"origin"),
        )
        trace.key_id = caller.key_id
        caller.require(Scope.INVOKE)
        seconds = parse_timeout(headers, self._timeouts.request_s)
        body = parse_body(exchange.body)
        trace.body_bytes = len(exchange.body)
        self._bounds.check(body.fields)
        target = resolve(view, caller, body.model, selector=selector(headers, body.fields, trace.request_id))
        trace.model = target.shown
        job = Job(body, target, exchange.received_at + seconds)
        return job if self._quotas is None else self._admitted(self._quotas, caller, job, trace)

    def _admitted(self, quotas: Quotas, caller: Caller, job: Job, trace: Trace) -> Job:
        """Count the request against its tenant's quota. Raises QuotaExceeded."""
        trace.admission = quotas.admit(caller.tenant, everywhere=caller.tenant == ALL_TENANTS)
        if trace.admission is None or not trace.admission.metered:
            return job
        hides = job.body.stream and ask_for_usage(job.body.fields)
        return msgspec.structs.replace(job, metered=True, hides_usage=hides)

    async def _serve(self, exchange: Exchange, trace: Trace, job: Job) -> None:
        """Place and try; once more, elsewhere where there is an elsewhere, as long as no byte went to the client."""
        spread = self._spread(job)
        wanted: list[Node] = []
        node = self._placer.place(job.target.demand, spread=spread, wanted=wanted)
        if wanted:
            self._copies.make(wanted, job.target)
        try:
            await self._attempt(exchange, trace, job, node)
            return
        except TryElsewhere as missed:
            first = missed
        if exchange.started:
            raise first.error
        if first.not_by:
            job = _asked_of_others(job, first.not_by)
        other = self._second_choice(job, node, first, spread)
        self._metrics.retries += 1
        try:
            await self._attempt(exchange, trace, job, other, first.engine if other is node else "")
        except TryElsewhere as missed:
            # the engine's own words name the field
            unasked = first.not_by and isinstance(missed.error, InvalidRequest)
            raise (first.error if unasked else missed.error) from None

    def _spread(self, job: Job) -> int:
        """Which of several copies: by turns, or one for all prompts that begin alike, which its cache may have."""
        if self._prefix_bytes:
            fields = job.body.fields
            prompt = fields.get("messages") or fields.get("prompt") or b""
            return zlib.crc32(bytes(prompt)[: self._prefix_bytes])
        self._turn += 1
        return self._turn

    def _second_choice(self, job: Job, node: Node, missed: TryElsewhere, spread: int) -> Node:
        """Another node, or the same one where something broke that may be mended by now, or other engines can be asked.

        Raises what went wrong, or that engines which could be asked are not there now.
        """
        excluded = () if missed.not_by else (node.name,)
        try:
            other = self._placer.place(job.target.demand, excluded=excluded, spread=spread)
        except RoostError as error:
            passes = missed.not_by and isinstance(error, NoHealthyNode)
            raise (error if passes else missed.error) from None
        if other is node and missed.refused and not missed.not_by:
            raise missed.error
        return other

    async def _attempt(self, exchange: Exchange, trace: Trace, job: Job, node: Node, failed_engine: str = "") -> None:
        """Lease, forward and stream on one node, not on its ``failed_engine`` if it has another. Raises TryElsewhere
        where another attempt may do better."""
        trace.attempts += 1
        trace.node = node.name
        lease = await self._acquire(trace, job, node, failed_engine)
        trace.engine = lease.engine
        engine_failed = False
        try:
            engine_failed = await self._forward(exchange, trace, job, lease)
        except EngineFailed as error:
            engine_failed = True
            lost = isinstance(error, UpstreamFailed)
            raise TryElsewhere(error, engine=lease.engine if lost else "") from error
        finally:
            lease.release(engine_failed=engine_failed)

    async def _acquire(self, trace: Trace, job: Job, node: Node, failed_engine: str) -> Lease:
        asked_at = self._loop.time()
        left_s = job.deadline - asked_at
        if left_s <= 0:
            raise DeadlinePassed("the request's deadline passed before it reached an engine")
        target = job.target
        try:
            lease = await self._leases.acquire(
                node, target.demand, size=target.size, timeout_s=min(self._timeouts.acquire_s, left_s), use_s=left_s,
                failed_engine=failed_engine,
            )  # fmt: skip
        finally:
            trace.waited_s += self._loop.time() - asked_at
        trace.waited = trace.waited or lease.waited
        return lease

    async def _forward(self, exchange: Exchange, trace: Trace, job: Job, lease: Lease) -> bool:
        """Send the request to the leased engine and its answer to the client.

        True where the engine told of its failure inside of an answer that had begun. Raises EngineFailed.
        """
        target = job.target
        dialect = dialect_of(lease.backend)
        called = dialect.model(target.demand.base, lease.adapter)
        try:
            ask = dialect.ask(exchange.path, job.body.fields_for(called, salt=target.salt))
        except InvalidRequest as error:
            raise TryElsewhere(error, refused=True, not_by=lease.backend) from error
        # its own id for each attempt: an engine that is told to abort an id ends every request of that id
        engine_id = b"%s-%x" % (trace.request_id, lease.number)
        trace.forwarded_at = self._loop.time()
        trace.meter = None
        response = await self._upstream.request(
            lease.host,
            lease.port,
            method=b"POST",
            target=ask.path.encode(),
            headers=[_JSON, (b"x-request-id", engine_id), *_credentials(lease)],
            body=encode(ask.fields),
            deadline=job.deadline,
        )
        headers = answer_headers(trace, lease)
        try:
            if response.status != 200:
                await self._engine_refusal(response, lease, target, dialect)
            if job.metered:
                trace.meter = UsageMeter(stream=job.body.stream, hides=job.hides_usage)
            answer = AnswerFilter(called, target.shown, trace.meter, ask.answer)
            return await self._relay(exchange, trace, response, headers, answer)
        except RequestRefused as refused:
            trace.status = refused.status
            trace.outcome = refused.outcome
            outcome = (b"x-roost-outcome", trace.outcome.value.encode())
            exchange.respond(refused.status, [*headers, _JSON, outcome], refused.body)
            return False
        finally:
            response.abort()

    async def _relay(
        self, exchange: Exchange, trace: Trace, response: UpstreamResponse, headers: list[Header], answer: AnswerFilter
    ) -> bool:
        is_stream = (response.headers.get(b"content-type") or b"").startswith(b"text/event-stream")
        try:
            await exchange.relay(response, [*headers, _OUTCOME_OK], answer)
        except (EngineFailed, DeadlinePassed) as error:
            if exchange.started and is_stream:
                exchange.write(answer.closing_event(error_answer(error)[2]))
            raise
        if answer.engine_error:
            trace.fail(EngineFailed(f"engine {trace.engine} failed while it generated"))
        return answer.engine_error

    async def _engine_refusal(self, response: UpstreamResponse, lease: Lease, target: Target, dialect: Dialect) -> None:
        """Raise what an answer other than 200 means.

        404 too is a failure of the engine: the lease promised that it has the adapter.
        """
        status, body = dialect.refusal(response.status, await response.read(_MAX_ERROR_BYTES))
        if is_clients_fault(status):
            called = dialect.model(target.demand.base, lease.adapter)
            for name in (called, lease.adapter):
                body = rename(body, name.encode(), target.shown.encode())
            raise RequestRefused(status, body)
        detail = error_code(body) or status
        raise EngineFailed(f"engine {lease.engine} on node {lease.node.name} answered {detail}")

    def _refuse(self, exchange: Exchange, trace: Trace, error: RoostError) -> None:
        """Tell the client, or where an answer has begun break it off so that it can't pass for a whole one."""
        if exchange.is_gone:
            return
        if exchange.started:
            exchange.abort()
            return
        status, headers, body = error_answer(error)
        exchange.respond(status, [*headers, (b"x-request-id", trace.request_id)], body)

    def _end_cancelled(self, exchange: Exchange, trace: Trace) -> None:
        if exchange.is_gone:
            trace.fail(ClientGone("the client went away"))
            return
        stopping = NoHealthyNode("this gateway is stopping", retry_after_s=1.0)
        trace.fail(stopping)
        self._refuse(exchange, trace, stopping)

    def _account(self, exchange: Exchange, trace: Trace) -> None:
        now = self._loop.time()
        metrics = self._metrics
        metrics.in_flight -= 1
        trace.settle()
        route = metrics.routes[trace.route]
        route.outcomes[trace.outcome] += 1
        route.latency.observe(now - trace.received_at)
        if exchange.answered_at:
            route.first_byte.observe(exchange.answered_at - trace.received_at)
        if trace.attempts == 1 and trace.forwarded_at:
            route.added.observe(trace.forwarded_at - trace.received_at - trace.waited_s)
        if trace.waited:
            metrics.cold_waits.observe(trace.waited_s)
        if self._access_log is not None:
            self._access_log.add(
                trace.record(at=time.time(), now=now, answered_at=exchange.answered_at, bytes_out=exchange.sent_bytes)
            )


def _asked_of_others(job: Job, not_by: str) -> Job:
    """The same of engines of other backends than ``not_by``."""
    replace = msgspec.structs.replace
    return replace(job, target=replace(job.target, demand=replace(job.target.demand, not_by=not_by)))


def _credentials(lease: Lease) -> tuple[Header, ...]:
    """What lets a request into an engine that takes none without its token."""
    return ((b"authorization", b"Bearer " + lease.token.encode()),) if lease.token else ()


def answer_headers(trace: Trace, lease: Lease) -> list[Header]:
    """The headers that say who answered."""
    return [
        (b"x-roost-revision", trace.model.encode()),
        (b"x-roost-node", lease.node.name.encode()),
        (b"x-request-id", trace.request_id),
    ]


def parse_timeout(headers: Iterable[Header], longest_s: float) -> float:
    """Seconds of ``X-Request-Timeout``, at most ``longest_s``, which also stands where there is none.

    Raises InvalidRequest.
    """
    values = [value for name, value in headers if name == b"x-request-timeout"]
    if not values:
        return longest_s
    if len(values) > 1:
        raise InvalidRequest("X-Request-Timeout is there more than once", field="x-request-timeout")
    seconds = float(values[0]) if _SECONDS_RE.fullmatch(values[0].strip()) else 0.0
    if not seconds > 0:
        raise InvalidRequest(
            "X-Request-Timeout must be a positive number of seconds such as 2.5, of at most 9 digits and 9 decimals",
            field="x-request-timeout",
        )
    return min(seconds, longest_s)
