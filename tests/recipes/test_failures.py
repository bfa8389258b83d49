"""A recipe's end says whose fault it was."""

from __future__ import annotations

import pytest

pytest.importorskip("tinker")

import httpx
import tinker
from tinker.types import RequestErrorCategory

from recipes.failures import failure_of
from wire.outcomes import (
    EngineFailed,
    Forbidden,
    InvalidRequest,
    NotFound,
    RoostError,
    Unauthenticated,
    VersionConflict,
)

ANSWER = {"error": "rank is 999: the trainer takes at most 64", "category": "user"}


def answered(status: int, body: object = ANSWER) -> tinker.APIStatusError:
    request = httpx.Request("POST", "http://here/api/v1/create_model")
    return tinker.APIStatusError(f"Error code: {status}", httpx.Response(status, request=request), body)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequest), (401, Unauthenticated), (403, Forbidden), (404, NotFound), (409, VersionConflict),
        (422, InvalidRequest),
    ],
)  # fmt: skip
def test_the_caller_s_own_mistake_is_told_as_the_service_said_it(status: int, kind: type[RoostError]) -> None:
    told = failure_of(answered(status))
    assert (type(told), told.message) == (kind, ANSWER["error"])
    assert failure_of(answered(status, "no JSON")).message == f"Error code: {status}"


def test_an_operation_that_the_caller_got_wrong_is_not_gone_on_with() -> None:
    said = (
        "Request failed: datum 0 lacks target_tokens for self.request_id='1' and expected type self.model_cls=<class>"
    )
    told = failure_of(tinker.RequestFailedError(said, "1", RequestErrorCategory.User))
    assert (type(told), told.message) == (InvalidRequest, "Request failed: datum 0 lacks target_tokens")


@pytest.mark.parametrize(
    "error",
    [
        answered(408),
        answered(429),
        answered(503),
        tinker.RequestFailedError("no ranks", "1", RequestErrorCategory.Server),
        tinker.APIConnectionError(httpx.Request("GET", "http://here")),
    ],
)
def test_what_the_service_could_not_do_is_gone_on_with_by_the_same_command(error: tinker.TinkerError) -> None:
    told = failure_of(error)
    assert type(told) is EngineFailed
    assert told.message.endswith("; the same command goes on from the last checkpoint")
