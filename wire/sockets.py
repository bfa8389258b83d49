"""The typed sockets that the other processes use."""

from .codec import Codec, MalformedMessage
from .curve import CurveKeys, make_keys
from .feed import FeedPublisher, FeedSubscriber
from .requester import Requester
from .responder import Reply, Responder

__all__ = [
    "Codec",
    "CurveKeys",
    "FeedPublisher",
    "FeedSubscriber",
    "MalformedMessage",
    "Reply",
    "Requester",
    "Responder",
    "make_keys",
]
