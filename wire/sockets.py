"""The typed sockets that the other processes use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .codec import Codec, MalformedMessage
from .curve import CurveKeys, make_keys
from .feed import FeedPublisher, FeedSubscriber
from .requester import Requester
from .responder import Reply, Responder


class Sockets(NamedTuple):
    """What makes each kind of socket: ZeroMQ's, unless time and the network are simulated."""

    requester: Callable[..., Requester[Any, Any]] = Requester
    responder: Callable[..., Responder[Any, Any]] = Responder
    publisher: Callable[..., FeedPublisher[Any]] = FeedPublisher
    subscriber: Callable[..., FeedSubscriber[Any]] = FeedSubscriber


ZEROMQ = Sockets()

__all__ = [
    "ZEROMQ",
    "Codec",
    "CurveKeys",
    "FeedPublisher",
    "FeedSubscriber",
    "MalformedMessage",
    "Reply",
    "Requester",
    "Responder",
    "Sockets",
    "make_keys",
]
