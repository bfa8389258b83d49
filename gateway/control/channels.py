"""Channels: movable pointers to a revision, or to a weighted split of revisions."""

from __future__ import annotations

from aiohttp import web

from catalog.names import check_part
from wire.events import Scope, Split
from wire.registrar import MoveChannel, Promote, RemoveChannel, Rollback

from .bodies import Promotion, RollbackBody, Target
from .described import Description, described
from .documents import CommittedDocument
from .requests import EXPECTED_VERSION, POLICY, commit, expected_version, publisher_of, read_body

routes = web.RouteTableDef()


@routes.put(POLICY + "/channels/{channel}")
@described(Description(CommittedDocument, body=Target, scope=Scope.PUBLISH))
async def move_channel(request: web.Request) -> web.Response:
    """Point a channel at a revision or a weighted split."""
    policy, asker = publisher_of(request)
    channel = check_part(request.match_info["channel"], "channel")
    body = await read_body(request, Target)
    command = MoveChannel(
        actor=asker.key_id,
        policy=policy,
        channel=channel,
        target=tuple(Split(arm.revision, arm.weight) for arm in body.target),
        seed=body.seed,
        expected_version=body.expected_version,
    )
    return await commit(request, command)


@routes.delete(POLICY + "/channels/{channel}")
@described(Description(CommittedDocument, scope=Scope.PUBLISH, query=(EXPECTED_VERSION,)))
async def remove_channel(request: web.Request) -> web.Response:
    """Remove a channel."""
    policy, asker = publisher_of(request)
    channel = check_part(request.match_info["channel"], "channel")
    command = RemoveChannel(
        actor=asker.key_id, policy=policy, channel=channel, expected_version=expected_version(request)
    )
    return await commit(request, command)


@routes.post(POLICY + "/promote")
@described(Description(CommittedDocument, body=Promotion, scope=Scope.PUBLISH))
async def promote(request: web.Request) -> web.Response:
    """Give a channel the revision that another has, or one by its number."""
    policy, asker = publisher_of(request)
    body = await read_body(request, Promotion)
    command = Promote(
        actor=asker.key_id,
        policy=policy,
        channel=check_part(body.channel, "channel"),
        source=body.source,
        revision=body.revision,
        expected_version=body.expected_version,
    )
    return await commit(request, command)


@routes.post(POLICY + "/rollback")
@described(Description(CommittedDocument, body=RollbackBody, scope=Scope.PUBLISH))
async def roll_back(request: web.Request) -> web.Response:
    """Point a channel back at what it served before, or at an earlier revision."""
    policy, asker = publisher_of(request)
    body = await read_body(request, RollbackBody)
    command = Rollback(
        actor=asker.key_id,
        policy=policy,
        channel=check_part(body.channel, "channel"),
        to=body.to,
        expected_version=body.expected_version,
    )
    return await commit(request, command)
