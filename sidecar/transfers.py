"""Revisions that come straight from a trainer, while they are being written and before any event names them.

Until its digest is known a transfer's extent is kept under the transfer's own id, and nobody can ask for it. Once it
is, the extent is the digest's: whoever asks for that waits for the bytes that are on their way, and fetches none. A
pull that fails frees its extent; who waited for it has the bytes fetched from the store, as ever.
"""

from __future__ import annotations

import msgspec

from catalog.names import adapter_name
from wire.transfer import Offered

from .admission import Load, Stage
from .effects import CancelPull, ClearExtent, StartPull
from .events import PullDone, PullFailed, RevisionOffered, TransferBound, TransferOffered, TransferWithdrawn
from .known import KnownRevisions
from .loads import Loads
from .state import NodeState

# pulls at once: each takes the trainer's and this process's time
_MAX_PULLS = 8
_MAX_KNOWN = 1024
# how long after an install its policy's older revisions are looked at: those who wait for the new one come first
_TIDY_S = 3.0


class _Transfer(msgspec.Struct):
    """``digest`` is empty until it is bound; ``ours`` says that the digest's extent is the one that we pull into."""

    offer: Offered
    generation: int
    digest: str = ""
    ours: bool = False
    pulling: bool = True
    cancelled: bool = False
    announced: bool = False

    @property
    def tenant(self) -> str:
        return self.offer.policy.partition("/")[0]

    @property
    def adapter(self) -> str:
        return adapter_name(self.tenant, self.digest)


class Transfers:
    """What is pulled, and what becomes of it. A revision is installed once it is announced, and not before."""

    def __init__(self, state: NodeState, loads: Loads, known: KnownRevisions) -> None:
        self._state = state
        self._loads = loads
        self._known = known
        self._transfers: dict[str, _Transfer] = {}
        # by digest and policy: two policies may come to the very same bytes
        self._bound: dict[str, dict[str, _Transfer]] = {}
        # by policy, when and for what a slot is to be made free for its next revision
        self._untidy: dict[str, tuple[float, _Transfer]] = {}

    def offered(self, event: TransferOffered, now: float) -> None:
        """Pull what this node has use for, if nothing that is in use must go for it."""
        offer = event.offer
        if offer.transfer in self._transfers or not self._wanted(offer):
            return
        extent = self._loads.reserve(_key(offer.transfer), offer.size, now, spare_leased=True)
        if extent is None:
            return
        self._state.cache.mark_pulled(_key(offer.transfer))
        self._transfers[offer.transfer] = _Transfer(offer, extent.generation)
        self._state.counts["pulls"] += 1
        self._state.effects.append(StartPull(trainer=event.trainer, transfer=offer.transfer, extent=extent))

    def bound(self, event: TransferBound, now: float) -> None:
        """From now on the bytes are the digest's; those that are here already, or on their way, are enough."""
        transfer = self._transfers.get(event.transfer)
        if transfer is None or transfer.digest:
            return
        self._bind(event.transfer, transfer, event.digest)
        if not transfer.ours and transfer.pulling:
            self._cancel(event.transfer, transfer)

    def withdrawn(self, event: TransferWithdrawn, now: float) -> None:
        transfer = self._transfers.get(event.transfer)
        if transfer is not None and transfer.pulling:
            self._cancel(event.transfer, transfer)

    def announced(self, event: RevisionOffered, now: float) -> bool:
        """An event names a digest: whether it came, or comes, by a transfer."""
        transfer = self._bound.get(event.digest, {}).get(event.policy)
        if transfer is None:
            return False
        transfer.announced = True
        self._install(transfer, now)
        return True

    def pull_done(self, event: PullDone, now: float) -> None:
        """The extent holds the whole file, verified and sealed."""
        transfer = self._ended(event.transfer, event.generation)
        if not transfer.digest:
            self._bind(event.transfer, transfer, event.digest)
        if not transfer.ours:
            key = _key(event.transfer)
            self._state.effects.append(ClearExtent(digest=key, extent=self._state.cache.extent(key)))
            self._state.cache.discard(key)
            self._install(transfer, now)
            return
        self._state.cache.completed(event.digest, now)
        self._state.counts["pulled"] += 1
        self._state.arrived_bytes["trainer"] += transfer.offer.size
        self._state.digest_changed(event.digest)
        self._seat(event.digest, now)
        for bound in tuple(self._bound.get(event.digest, {}).values()):
            self._install(bound, now)

    def pull_failed(self, event: PullFailed, now: float) -> None:
        """Nobody writes to the extent any more, and its bytes are worth nothing."""
        transfer = self._ended(event.transfer, event.generation)
        key = transfer.digest if transfer.ours else _key(event.transfer)
        self._state.counts["pulls_failed"] += not transfer.cancelled
        if transfer.ours:
            # nor did they come for another policy that had waited for them
            self._bound.pop(transfer.digest, None)
            self._state.digest_changed(transfer.digest)
            for load in self._state.queue.still(self._fetching(transfer.digest)):
                self._loads.bounce(load, now)
        self._state.cache.discard(key)
        if not transfer.digest or transfer.ours:
            del self._transfers[event.transfer]

    def tick(self, now: float) -> None:
        """A policy that gets revision after revision finds a free slot for the next: its oldest leaves before."""
        for policy, (due, transfer) in list(self._untidy.items()):
            if due <= now:
                del self._untidy[policy]
                self._loads.vacate_one(transfer.offer.base, self._known.older(policy, transfer.adapter), now)

    def _wanted(self, offer: Offered) -> bool:
        engines = self._state.by_base.get(offer.base, ())
        return (
            not self._state.cordoned
            and sum(transfer.pulling for transfer in self._transfers.values()) < _MAX_PULLS
            and any(engine.ready and engine.misfit(offer.rank) is None for engine in engines)
            and offer.size > 0
            and self._state.cache.fits(offer.size)
            and (self._known.holds(offer.policy) or self._chosen(offer))
        )

    def _chosen(self, offer: Offered) -> bool:
        return self._state.settings.node in offer.nodes

    def _bind(self, name: str, transfer: _Transfer, digest: str) -> None:
        transfer.digest = digest
        transfer.ours = self._state.cache.get(digest) is None
        if transfer.ours:
            self._state.cache.rename(_key(name), digest)
            self._state.digest_changed(digest)
        self._known.note(transfer.offer.policy, transfer.tenant, digest)
        self._bound.setdefault(digest, {})[transfer.offer.policy] = transfer
        self._forget_old()

    def _cancel(self, name: str, transfer: _Transfer) -> None:
        if not transfer.cancelled:
            transfer.cancelled = True
            self._state.effects.append(CancelPull(transfer=name))

    def _ended(self, name: str, generation: int) -> _Transfer:
        transfer = self._transfers.get(name)
        if transfer is None or transfer.generation != generation or not transfer.pulling:
            raise RuntimeError(f"a pull into extent {generation} ended, but the extent is not that of {name}")
        transfer.pulling = False
        return transfer

    def _install(self, transfer: _Transfer, now: float) -> None:
        """Have it serve where an older revision does, or where it is expected first, if it may."""
        resident = self._state.cache.resident(transfer.digest)
        if not transfer.announced or not resident or self._state.cordoned:
            return
        policy = transfer.offer.policy
        if self._known.serves(policy) or self._chosen(transfer.offer):
            due, _ = self._untidy.get(policy, (now + _TIDY_S, transfer))
            self._untidy[policy] = due, transfer
            self._loads.warm(
                transfer.offer.base,
                transfer.adapter,
                transfer.digest,
                transfer.offer.size,
                transfer.offer.rank,
                now,
                replaces=self._known.older(policy, transfer.adapter),
            )

    def _seat(self, digest: str, now: float) -> None:
        for load in self._state.queue.still(self._fetching(digest)):
            self._loads.seat(load, now)

    def _fetching(self, digest: str) -> list[Load]:
        return [load for load in self._state.queue if load.digest == digest and load.stage is Stage.FETCHING]

    def _forget_old(self) -> None:
        """Those that ended longest ago: what is asked for later is in the arena, or fetched."""
        for name in [name for name, transfer in self._transfers.items() if not transfer.pulling]:
            if len(self._transfers) <= _MAX_KNOWN:
                return
            self._unbind(self._transfers.pop(name))

    def _unbind(self, transfer: _Transfer) -> None:
        bound = self._bound.get(transfer.digest, {})
        if bound.get(transfer.offer.policy) is transfer:
            del bound[transfer.offer.policy]
            if not bound:
                del self._bound[transfer.digest]


def _key(transfer: str) -> str:
    """What its extent is kept under before its digest is known: nothing that could be a digest."""
    return f"transfer {transfer}"
