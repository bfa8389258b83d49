"""A load of all kinds of writes whose every effect is predicted, so that a lost or repeated one shows at once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from catalog.blobs import BlobStore
from catalog.checks import WriteCommand
from catalog.client import RegistrarClient
from catalog.view import CatalogView
from tests.catalog.harness import BASE, upload
from wire.events import Split
from wire.outcomes import JournalUnavailable
from wire.registrar import ChangeLabels, MoveChannel, PublishRevision, Rollback


class Writer:
    """One command after another on a policy of its own, each of which must change it by one version.

    A command that nobody answered is asked again, until somebody does. Under ids of theirs these may also be relative
    rollbacks, which go one step too far if they have their effect twice.
    """

    def __init__(self, name: str, store: BlobStore, *, ids: bool) -> None:
        self.policy = f"acme/{name}"
        self.acknowledged = 0
        self.last_seq = 0
        self._digests: list[str] = []
        self._version = 0
        self._canary = 0
        # what the canary served before
        self._before: list[int] = []
        self._store = store
        self._ids = ids
        self._random = random.Random(name)
        self._numbers = itertools.count()
        self._pending: WriteCommand | None = None

    async def run(self, connect: Callable[[], RegistrarClient]) -> None:
        """Until nobody answers."""
        client = connect()
        try:
            while True:
                self._pending = self._pending or self._next()
                answer = await client.run(self._pending)
                self._version += 1 if self._version else 2
                assert answer.version == self._version, (self._pending, answer)
                self._note(self._pending)
                self._pending = None
                self.acknowledged += 1
                self.last_seq = answer.seq
        except JournalUnavailable:
            return
        finally:
            client.close()

    def check(self, view: CatalogView) -> None:
        """Everything acknowledged is in ``view``, once, and at most the command that nobody answered besides."""
        record = view.policy(self.policy)
        if record is None:
            assert not self.acknowledged
            return
        published = [revision.artifact.digest for revision in view.revisions(self.policy, limit=1 << 20)]
        extra = record.version - self._version
        assert 0 <= extra <= (1 if self._version else 2)
        assert published[: len(self._digests)] == self._digests
        assert len(set(published)) == len(published) == record.latest
        assert len(view.history(self.policy)) == record.version
        if not extra:
            assert published == self._digests
            assert record.channels.get("canary", ()) == ((Split(self._canary),) if self._canary else ())

    def _next(self) -> WriteCommand:
        number = next(self._numbers)
        command_id = f"{self.policy.replace('/', '-')}-{number}" if self._ids else ""
        others = [revision for revision in range(1, len(self._digests) + 1) if revision != self._canary]
        chance = self._random.random() if others else 0.0
        if chance < 0.5:
            facts = upload(self._store, f"{self.policy} {number}".encode())
            return PublishRevision(policy=self.policy, artifact=facts, create_over=BASE, command_id=command_id)
        if chance < 0.65:
            return ChangeLabels(policy=self.policy, labels={"step": str(number)}, command_id=command_id)
        if chance < 0.8 and self._ids and (self._before or self._canary > 1):
            return Rollback(policy=self.policy, channel="canary", command_id=command_id)
        target = (Split(self._random.choice(others)),)
        return MoveChannel(policy=self.policy, channel="canary", target=target, command_id=command_id)

    def _note(self, command: WriteCommand) -> None:
        match command:
            case PublishRevision():
                self._digests.append(command.artifact.digest)
            case MoveChannel():
                if self._canary:
                    self._before = [*self._before, self._canary][-8:]
                self._canary = command.target[0].revision
            case Rollback():
                self._canary = self._before.pop() if self._before else self._canary - 1
