"""Policies: creating, finding and looking at them, and ending and restoring them."""

from __future__ import annotations

from aiohttp import web

from catalog.inputs import check_label
from catalog.names import check_base, check_policy
from catalog.records import RevisionRecord
from gateway.auth import ALL_TENANTS
from wire.events import RecordKind, Scope
from wire.outcomes import InvalidRequest
from wire.registrar import ChangeLabels, CreatePolicy, DropForward, RenamePolicy, RestorePolicy, RetirePolicy

from .bodies import Labels, NewName, NewPolicy, Versioned
from .described import AFTER, LIMIT, Description, Query, described
from .documents import (
    CommittedDocument,
    HistoryDocument,
    PolicyDocument,
    PolicyPage,
    PolicyWithRevisions,
    TrainingDocument,
)
from .requests import (
    EXPECTED_VERSION,
    POLICY,
    answer,
    caller,
    commit,
    expected_version,
    own_policy,
    page,
    publisher_of,
    read_body,
    require,
    whole_number,
)
from .services import services

routes = web.RouteTableDef()

_SHOWN_CHECKPOINTS = 20

_SEARCH = (
    Query("prefix", "Only names that begin with this."),
    Query("label", "Only with this label: key=value. May be given more than once.", repeated=True),
    Query("base", "Only over this base."),
    AFTER,
    LIMIT,
)


@routes.post("/roost/v1/policies")
@described(Description(CommittedDocument, body=NewPolicy, scope=Scope.PUBLISH))
async def create_policy(request: web.Request) -> web.Response:
    """Create a policy over a base."""
    asker = require(request, Scope.PUBLISH)
    new = await read_body(request, NewPolicy)
    policy = check_policy(new.policy)
    asker.require(Scope.PUBLISH, policy.partition("/")[0])
    return await commit(request, CreatePolicy(actor=asker.key_id, policy=policy, base=check_base(new.base)))


@routes.get("/roost/v1/policies")
@described(Description(PolicyPage, query=_SEARCH))
async def list_policies(request: web.Request) -> web.Response:
    """Find policies by name, label and base, a page at a time."""
    asker = caller(request)
    asked = page(request)
    prefix = request.query.get("prefix", "")
    own = "" if asker.tenant == ALL_TENANTS else f"{asker.tenant}/"
    if own and not prefix.startswith(own):
        # a shorter prefix asks for everything that begins with it, of which only the tenant's own is shown
        prefix = own if own.startswith(prefix) else own + prefix
    base = request.query.get("base", "")
    if base:
        check_base(base)
    shared = services(request)
    found = await shared.scans.run(
        shared.view.search, prefix=prefix, labels=_labels(request), base=base, after=asked.after, limit=asked.limit
    )
    shown = [PolicyDocument.of(record) for record in found.policies]
    return answer(PolicyPage(shown, bool(found.after), found.after))


@routes.get(POLICY)
@described(Description(PolicyWithRevisions, query=(AFTER._replace(numeric=True), LIMIT)))
async def show_policy(request: web.Request) -> web.Response:
    """Show a policy with a page of its revisions, and its newest checkpoints."""
    record = own_policy(request)
    revisions, after = await revisions_page(request, record.policy)
    shared = services(request)
    retained = await shared.scans.run(shared.view.retained, record.policy)
    checkpoints = [TrainingDocument.told(row) for row in retained if row.record.kind is RecordKind.CHECKPOINT]
    newest = sorted(checkpoints, key=lambda told: told.retained_ms, reverse=True)[:_SHOWN_CHECKPOINTS]
    return answer(PolicyWithRevisions.told(record, revisions, after, newest))


@routes.get(POLICY + "/history")
@described(Description(HistoryDocument, query=(AFTER._replace(numeric=True), LIMIT)))
async def history(request: web.Request) -> web.Response:
    """What happened to a policy, with who and when, a page at a time from the newest on."""
    record = own_policy(request)
    limit = page(request).limit
    shared = services(request)
    found = await shared.scans.run(
        shared.view.history, record.policy, before=whole_number(request, "after", 0), limit=limit + 1
    )
    events = found[::-1][:limit]
    has_more = len(found) > limit
    return answer(HistoryDocument(events, has_more, events[-1].seq if has_more else 0))


@routes.post(POLICY + "/retire")
@described(Description(CommittedDocument, body=Versioned, scope=Scope.PUBLISH))
async def retire(request: web.Request) -> web.Response:
    """Retire a policy: it is served no more, and its name stays taken."""
    policy, asker = publisher_of(request)
    body = await read_body(request, Versioned)
    command = RetirePolicy(actor=asker.key_id, policy=policy, expected_version=body.expected_version)
    return await commit(request, command)


@routes.post(POLICY + "/restore")
@described(Description(CommittedDocument, body=Versioned, scope=Scope.PUBLISH))
async def restore(request: web.Request) -> web.Response:
    """Serve a retired policy again, as it was."""
    policy, asker = publisher_of(request)
    body = await read_body(request, Versioned)
    command = RestorePolicy(actor=asker.key_id, policy=policy, expected_version=body.expected_version)
    return await commit(request, command)


@routes.post(POLICY + "/rename")
@described(Description(CommittedDocument, body=NewName, scope=Scope.PUBLISH))
async def rename(request: web.Request) -> web.Response:
    """Give a policy another name within its tenant; the former name forwards to it."""
    policy, asker = publisher_of(request)
    body = await read_body(request, NewName)
    command = RenamePolicy(actor=asker.key_id, policy=policy, to=body.to, expected_version=body.expected_version)
    return await commit(request, command)


@routes.delete(POLICY + "/forwards/{former}")
@described(Description(CommittedDocument, scope=Scope.PUBLISH, query=(EXPECTED_VERSION,)))
async def drop_forward(request: web.Request) -> web.Response:
    """Free a former name, given without its tenant."""
    policy, asker = publisher_of(request)
    name = check_policy(f"{request.match_info['tenant']}/{request.match_info['former']}", "former")
    command = DropForward(actor=asker.key_id, policy=policy, name=name, expected_version=expected_version(request))
    return await commit(request, command)


@routes.post(POLICY + "/labels")
@described(Description(CommittedDocument, body=Labels, scope=Scope.PUBLISH))
async def change_labels(request: web.Request) -> web.Response:
    """Set labels and remove others."""
    policy, asker = publisher_of(request)
    body = await read_body(request, Labels)
    command = ChangeLabels(
        actor=asker.key_id, policy=policy, labels=body.labels, remove=body.remove,
        expected_version=body.expected_version,
    )  # fmt: skip
    return await commit(request, command)


async def revisions_page(request: web.Request, policy: str) -> tuple[list[RevisionRecord], int]:
    """The revisions that the query's ``after`` and ``limit`` ask for, and where the next page begins; 0: nowhere."""
    limit = page(request).limit
    after = whole_number(request, "after", 0)
    shared = services(request)
    found = await shared.scans.run(shared.view.revisions, policy, after=after, limit=limit + 1)
    return found[:limit], found[limit - 1].revision if len(found) > limit else 0


def _labels(request: web.Request) -> dict[str, str]:
    labels: dict[str, str] = {}
    for text in request.query.getall("label", ()):
        key, equals, value = text.partition("=")
        if not equals:
            raise InvalidRequest(f"label {text[:80]!a}: expected key=value", field="label")
        check_label(key, value, "label")
        if labels.setdefault(key, value) != value:
            raise InvalidRequest(f"label {key} can't have two values", field="label")
    return labels
