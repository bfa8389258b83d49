"""The catalog as every process of the host reads it: by memory map, without asking anyone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from wire.events import Event
from wire.outcomes import JournalUnavailable, NotFound, Retired

from .environment import Environment
from .layout import Txn
from .names import LATEST, Reference
from .records import (
    Arm,
    ArtifactRecord,
    BaseRecord,
    KeyRecord,
    PolicyRecord,
    RetainedRecord,
    RevisionRecord,
    RouteRecord,
)
from .search import Found, FoundKeys, search, search_keys
from .snapshot import Snapshot
from .splits import choose

T = TypeVar("T")

_NONE: Mapping[str, str] = {}


class Resolution(msgspec.Struct, frozen=True):
    """What a reference stands for now. ``size`` in bytes of the revision file; ``targets`` are adapted modules."""

    policy: str
    tenant: str
    revision: int
    digest: str
    size: int
    rank: int
    base: str
    base_fingerprint: str
    targets: tuple[str, ...]

    @property
    def reference(self) -> str:
        """The concrete name, ``tenant/name@7``."""
        return f"{self.policy}@{self.revision}"


class CatalogView:
    """Reads of the catalog. Each sees every commit acknowledged before it began; none waits for the writer.

    May be used from several threads. What reads one or two records holds the others up for as long; what reads many
    (lists, pages, histories) only while its transaction begins and ends, so that ``resolve`` never waits for it. One
    process opens one catalog once and shares the view.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._tables = environment.tables
        # by base: a name never gets another
        self._fingerprints: dict[str, str] = {}
        # growing the map under a transaction of another thread would pull the pages from under it: whoever does has
        # the turn, and waits until no scan is open
        self._turn = threading.Lock()
        self._scan_ended = threading.Condition(self._turn)
        self._scans = 0

    @classmethod
    def open(cls, catalog_dir: Path) -> CatalogView:
        """Raises JournalUnavailable where the registrar has not made the catalog yet, or for another layout."""
        return cls(Environment.open(catalog_dir))

    def close(self) -> None:
        """Once no scan is open."""
        with self._turn:
            self._scan_ended.wait_for(lambda: not self._scans)
            self._environment.close()

    def resolve(self, ref: Reference, *, selector: bytes = b"") -> Resolution:
        """The revision that ``ref`` names now; a former name stands for the present one. Raises NotFound and Retired.

        In a weighted split the same ``selector`` always takes the same arm while the split stands.
        """
        with self._turn, self._begin() as txn:
            snapshot = Snapshot(txn, self._tables)
            found = self._find(snapshot, ref, selector)
            if found is None and (forwarded := snapshot.forward(ref.policy)) is not None:
                ref = Reference(forwarded, ref.revision, ref.channel)
                found = self._find(snapshot, ref, selector)
            if found is None:
                raise NotFound(f"there is no policy {ref.policy}", field="model")
            route, arm = found
            fingerprint = self._fingerprints.get(route.base) or self._fingerprint(snapshot, route.base)
        return Resolution(
            ref.policy, ref.tenant, arm.revision, arm.digest.hex(), arm.size, arm.rank, route.base, fingerprint,
            arm.targets,
        )  # fmt: skip

    def base(self, name: str) -> BaseRecord | None:
        return self._read(lambda snapshot: snapshot.base(name))

    def bases(self) -> list[BaseRecord]:
        return self._scan(lambda snapshot: snapshot.bases())

    def policy(self, name: str) -> PolicyRecord | None:
        """The policy of this name, present or former: the record has the present one."""
        return self._read(lambda snapshot: snapshot.followed(name))

    def policies(self, *, prefix: str = "", after: str = "", limit: int = 100) -> list[PolicyRecord]:
        """At most ``limit`` policies whose names begin with ``prefix``, in order, after the name ``after``."""
        return self._scan(lambda snapshot: snapshot.policies(prefix=prefix, after=after, limit=limit))

    def search(
        self, *, prefix: str = "", labels: Mapping[str, str] = _NONE, base: str = "", live: bool = False,
        after: str = "", limit: int = 100,
    ) -> Found:  # fmt: skip
        """A page of the policies with all of ``labels``, over ``base`` unless that is empty; ``live``: not retired."""
        return self._scan(
            lambda view: search(view, prefix=prefix, labels=labels, base=base, live=live, after=after, limit=limit)
        )

    def revision(self, policy: str, number: int) -> RevisionRecord | None:
        return self._read(lambda snapshot: snapshot.revision(policy, number))

    def revisions(self, policy: str, *, after: int = 0, limit: int = 100) -> list[RevisionRecord]:
        """At most ``limit`` revisions with numbers above ``after``, in order."""
        return self._scan(lambda snapshot: snapshot.revisions(policy, after=after, limit=limit))

    def retained(self, policy: str) -> list[RetainedRecord]:
        """The training records that the policy keeps hold of: checkpoints first, each kind oldest first."""
        return self._scan(lambda snapshot: snapshot.retained(policy))

    def unnamed(self, digests: Iterable[str]) -> list[str]:
        """Those of ``digests`` that are of artifacts which no revision names any more."""
        return self._scan(lambda snapshot: [digest for digest in digests if snapshot.is_unnamed(digest)])

    def artifact(self, digest: str) -> ArtifactRecord | None:
        return self._read(lambda snapshot: snapshot.artifact(digest))

    def key(self, key_hash: str) -> KeyRecord | None:
        """The key of a secret, by ``keys.hash_secret``; also one that is revoked, which its record says."""
        return self._read(lambda snapshot: snapshot.key(key_hash))

    def key_by_id(self, key_id: str) -> KeyRecord | None:
        return self._read(lambda snapshot: snapshot.key_by_id(key_id))

    def keys(self, tenant: str = "", *, after: str = "", limit: int = 100) -> FoundKeys:
        """A page of all keys, or of those of one tenant, by key id."""
        return self._scan(lambda snapshot: search_keys(snapshot, tenant=tenant, after=after, limit=limit))

    def position(self) -> int:
        """The newest sequence number of the journal; 0 while it is empty."""
        return self._read(lambda snapshot: snapshot.position())

    def history(self, policy: str, *, before: int = 0, limit: int | None = None) -> list[Event]:
        """The events of one policy, oldest first: the newest ``limit`` of those before the event numbered ``before``.

        Raises InvalidRequest where ``before`` is no event of the tenant's.
        """
        return self._scan(lambda snapshot: snapshot.history(policy, before=before, limit=limit))

    def _find(self, snapshot: Snapshot, ref: Reference, selector: bytes) -> tuple[RouteRecord, Arm] | None:
        """What ``ref`` stands for by its own name; None where no policy has that."""
        route = snapshot.route(ref.policy)
        if route is None:
            return None
        _must_live(ref, route)
        if not ref.revision:
            return route, _channel_arm(route, ref, selector)
        # what is asked for by number is most often the newest
        if route.latest is not None and route.latest.revision == ref.revision:
            return route, route.latest
        return route, _numbered_arm(snapshot, ref)

    def _fingerprint(self, snapshot: Snapshot, name: str) -> str:
        base = snapshot.base(name)
        if base is None:
            raise JournalUnavailable(f"the catalog has lost base {name}")
        self._fingerprints[name] = base.fingerprint
        return base.fingerprint

    def _read(self, look_up: Callable[[Snapshot], T]) -> T:
        """For a record or two: others wait."""
        with self._turn, self._begin() as txn:
            return look_up(Snapshot(txn, self._tables))

    def _scan(self, look_up: Callable[[Snapshot], T]) -> T:
        """For many: others go on."""
        with self._scanning() as snapshot:
            return look_up(snapshot)

    @contextlib.contextmanager
    def _scanning(self) -> Iterator[Snapshot]:
        with self._turn:
            txn = self._begin()
            self._scans += 1
        try:
            with txn:
                yield Snapshot(txn, self._tables)
        finally:
            with self._turn:
                self._scans -= 1
                self._scan_ended.notify_all()

    def _begin(self) -> Txn:
        """To be called with the turn, which is given up where a scan must end before a grown map can be adopted."""
        while (txn := self._environment.begin_mapped()) is None:
            if self._scans:
                self._scan_ended.wait()
            else:
                self._environment.adopt()
        return txn


def _must_live(ref: Reference, route: RouteRecord) -> None:
    if route.retired:
        raise Retired(f"policy {ref.policy} is retired", field="model")


def _numbered_arm(snapshot: Snapshot, ref: Reference) -> Arm:
    found = snapshot.arm(ref.policy, ref.revision)
    if found is None:
        raise NotFound(f"policy {ref.policy} has no revision {ref.revision}", field="model")
    arm, retired_ms = found
    if retired_ms:
        raise Retired(f"revision {ref.policy}@{ref.revision} is retired", field="model")
    return arm


def _channel_arm(route: RouteRecord, ref: Reference, selector: bytes) -> Arm:
    arms = () if ref.channel == LATEST else route.channels.get(ref.channel)
    if arms is None:
        raise NotFound(f"policy {ref.policy} has no channel {ref.channel}", field="model")
    if arms:
        if len(arms) == 1:
            return arms[0]
        return choose(arms, selector, channel=ref.channel, seed=route.seeds.get(ref.channel, 0))
    if route.latest is None:
        raise NotFound(f"policy {ref.policy} has no revision yet", field="model")
    return route.latest
