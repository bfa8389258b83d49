"""The registrar's ledger, real, on a catalog of its own; its process dies before or after a commit at times."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import lmdb
import msgspec

from catalog.artifacts import RegistrarStore
from catalog.environment import Environment
from catalog.layout import Txn
from catalog.ledger import Ledger
from catalog.names import parse_reference
from catalog.view import CatalogView
from wire.events import ArtifactFacts
from wire.outcomes import RoostError
from wire.registrar import AddBase, Committed, PublishRevision

from .catalog import BASE, FINGERPRINT, digest_of

_MAP_BYTES = 1 << 30


class Killed(Exception):
    """The process ended here."""


class Acknowledged(msgspec.Struct, frozen=True):
    """What a publisher was told to be durable."""

    policy: str
    revision: int
    digest: str


class _Everything:
    """As ``catalog.artifacts.RegistrarStore``: whatever was announced has been uploaded."""

    look = None

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self, digest: str) -> int:
        return self._size

    def removing(self, digest: str) -> bool:
        return False

    def missed(self) -> frozenset[str]:
        return frozenset()

    def forget(self, digests: Iterable[str]) -> None:
        """Nothing is remembered."""

    def sweep_by_folder(self, orphans: Any, older_than_s: float) -> Iterator[Any]:
        return iter(())


class RegistrarProcess:
    """Publishes into the catalog at ``folder``, which ``view`` reads. ``acknowledged`` is what must never be lost."""

    def __init__(self, folder: Path, adapter_bytes: int) -> None:
        self._size = adapter_bytes
        self._environment = Environment.create(folder, map_bytes=_MAP_BYTES, durable=False)
        self._ticks = itertools.count(1_000)
        self._dies: Callable[[Txn], None] | None = None
        self._ledger: Ledger
        self._published: dict[str, int] = {}
        self.view = CatalogView(self._environment)
        self.acknowledged: list[Acknowledged] = []
        self.died = asyncio.Event()
        self.restart()
        self._run(AddBase(name=BASE, fingerprint=FINGERPRINT, path="/nowhere", config=b"{}"))

    def restart(self) -> None:
        """A new process over what the last one left."""
        store = cast(RegistrarStore, _Everything(self._size))
        self._dies = None
        self.died.clear()
        self._ledger = Ledger(self._environment, store, now_ms=lambda: next(self._ticks), commit=self._commit)

    @property
    def up(self) -> bool:
        return not self.died.is_set()

    def die_at_next_commit(self, *, after: bool) -> None:
        """The next publish is not acknowledged; ``after``: it is durable nevertheless."""

        def die(txn: Txn) -> None:
            if after:
                lmdb.Transaction.commit(txn)
            raise Killed

        self._dies = die

    def publish(self, policy: str) -> bool:
        """The policy's next revision, of new bytes; false where nobody acknowledged it."""
        if not self.up:
            return False
        number = self._published[policy] = self._published.get(policy, 0) + 1
        digest = digest_of(policy, number)
        facts = ArtifactFacts(digest, self._size, 1, ("q",), "bf16", 1, 1)
        try:
            answer = self._run(PublishRevision(policy=policy, artifact=facts, create_over=BASE))
        except Killed:
            self.died.set()
            return False
        self.acknowledged.append(Acknowledged(policy, answer.revision, digest))
        return True

    def lost(self) -> list[Acknowledged]:
        """What was acknowledged and is not there."""
        return [one for one in self.acknowledged if self._digest(one) != one.digest]

    def close(self) -> None:
        self.view.close()

    def _run(self, command: AddBase | PublishRevision) -> Committed:
        answer = self._ledger.run([command]).answers[0]
        if not isinstance(answer, Committed):
            raise RuntimeError(f"the registrar refused what nobody could refuse: {answer}")
        return answer

    def _digest(self, one: Acknowledged) -> str | None:
        try:
            return self.view.resolve(parse_reference(f"{one.policy}@{one.revision}")).digest
        except RoostError:
            return None

    def _commit(self, txn: Txn) -> None:
        (self._dies or lmdb.Transaction.commit)(txn)
