"""Channels: movable pointers to a revision, or to a weighted split of revisions."""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web

from catalog.names import check_part
from wire.events import Scope, Split
from wire.registrar import MoveChannel, RemoveChannel

from .policies import POLICY, policy_name
from .requests import commit, read_body, require, whole_number

routes = web.RouteTableDef()

_Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]


class Arm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    revision: _Positive
    weight: _Positive = 1


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a channel shall point; an empty ``target`` follows ``latest``."""

    target: tuple[Arm, ...]
    expected_version: int | None = None


@routes.put(POLICY + "/channels/{channel}")
async def move_channel(request: web.Request) -> web.Response:
    policy = policy_name(request)
    channel = check_part(request.match_info["channel"], "channel")
    asker = require(request, Scope.PUBLISH, request.match_info["tenant"])
    body = await read_body(request, Target)
    command = MoveChannel(
        actor=asker.key_id,
        policy=policy,
        channel=channel,
        target=tuple(Split(arm.revision, arm.weight) for arm in body.target),
        expected_version=body.expected_version,
    )
    return await commit(request, command)


@routes.delete(POLICY + "/channels/{channel}")
async def remove_channel(request: web.Request) -> web.Response:
    policy = policy_name(request)
    channel = check_part(request.match_info["channel"], "channel")
    asker = require(request, Scope.PUBLISH, request.match_info["tenant"])
    expected = whole_number(request, "expected_version", -1)
    command = RemoveChannel(
        actor=asker.key_id, policy=policy, channel=channel, expected_version=expected if expected >= 0 else None
    )
    return await commit(request, command)
