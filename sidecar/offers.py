"""What is published while this node runs, as the registrar's feed tells it.

Nothing depends on hearing all of it: a lost message is a revision that is fetched when it is asked for, or a copy of
removed bytes that stays until it leaves for others.
"""

from __future__ import annotations

from collections.abc import Callable

from wire.curve import CurveKeys
from wire.events import ArtifactsRemoved, ChannelMoved, Event, RevisionPublished
from wire.sockets import FeedSubscriber, Sockets

from .events import RevisionOffered

# the channel that a bare name means
_STABLE = "stable"
_MAX_KNOWN = 1 << 14


class OfferFeed:
    """Calls ``on_offer`` with what becomes ``latest`` or ``stable`` of policies that are ``held``.

    And ``on_removed`` with each digest whose bytes go for good.
    """

    def __init__(
        self,
        endpoint: str,
        on_offer: Callable[[RevisionOffered], None],
        held: Callable[[str], bool],
        on_removed: Callable[[str], None],
        *,
        curve: CurveKeys | None,
        sockets: Sockets,
    ) -> None:
        self._on_offer = on_offer
        self._held = held
        self._on_removed = on_removed
        # a moved channel names revisions by number only
        self._published: dict[tuple[str, int], RevisionOffered] = {}
        self._feed: FeedSubscriber[Event] = sockets.subscriber(
            endpoint,
            Event,
            on_message=self._on_message,
            on_gap=_nothing,
            curve=curve,
            server_public=curve.server_public if curve else "",
        )

    @property
    def silent(self) -> bool:
        """Whether the registrar is not heard."""
        return self._feed.silent

    def close(self) -> None:
        self._feed.close()

    def _on_message(self, number: int, event: Event) -> None:
        body = event.body
        if isinstance(body, ArtifactsRemoved):
            for digest in body.digests:
                self._on_removed(digest)
        if not isinstance(body, RevisionPublished | ChannelMoved) or not self._held(body.policy):
            return
        if isinstance(body, RevisionPublished):
            offer = RevisionOffered(policy=body.policy, digest=body.artifact.digest, size=body.artifact.size)
            self._published[body.policy, body.revision] = offer
            if len(self._published) > _MAX_KNOWN:
                del self._published[next(iter(self._published))]
            self._on_offer(offer)
        elif body.channel == _STABLE:
            for arm in body.target:
                moved_to = self._published.get((body.policy, arm.revision))
                if moved_to is not None:
                    self._on_offer(moved_to)


def _nothing(expected: int, got: int) -> None:
    """What was lost is not made up for."""
