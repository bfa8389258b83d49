"""How revisions and their artifacts end: retired one by one, by rule, and removed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.catalog.harness import BASE, POLICY, Catalog, is_what_the_journal_makes, live, upload, with_revisions
from wire.events import (
    Retention,
    RetentionChanged,
    RevisionRestored,
    RevisionsRetired,
    Split,
)
from wire.outcomes import ArtifactUnavailable, InvalidRequest, NotFound, Retired, VersionConflict
from wire.registrar import (
    CollectOrphans,
    Committed,
    CondemnArtifacts,
    MoveChannel,
    Promote,
    PruneNext,
    PruneRevisions,
    PublishRevision,
    RemoveArtifacts,
    RestoreRevision,
    RetireRevision,
    Rollback,
    SetRetention,
)

CONTENTS = [b"one", b"two", b"three", b"four", b"five"]


@pytest.fixture
def published(catalog: Catalog) -> Catalog:
    return with_revisions(catalog, *CONTENTS)


def pass_time(catalog: Catalog, ms: int) -> None:
    clock: Any = catalog.ledger._now_ms
    catalog.ledger._now_ms = lambda: clock() + ms


class TestRetiringRevisions:
    def test_a_retired_revision_answers_so_and_can_come_back(self, published: Catalog) -> None:
        assert published.run(RetireRevision(policy=POLICY, revision=2)).changed
        assert not published.run(RetireRevision(policy=POLICY, revision=2)).changed
        with pytest.raises(Retired):
            published.resolve(f"{POLICY}@2")
        for command in (
            MoveChannel(policy=POLICY, channel="canary", target=(Split(2),)),
            Rollback(policy=POLICY, to=2),
            Promote(policy=POLICY, revision=2),
        ):
            with pytest.raises(Retired):
                published.run(command)
        assert published.run(RestoreRevision(policy=POLICY, revision=2)).changed
        assert not published.run(RestoreRevision(policy=POLICY, revision=2)).changed
        assert published.resolve(f"{POLICY}@2").revision == 2
        kinds = [type(event.body) for event in published.view.history(POLICY)][-2:]
        assert kinds == [RevisionsRetired, RevisionRestored]
        is_what_the_journal_makes(published)

    def test_what_a_channel_points_to_stays(self, published: Catalog) -> None:
        published.run(MoveChannel(policy=POLICY, channel="canary", target=(Split(2), Split(3))))
        for revision, channel in ((5, "latest"), (2, "canary"), (3, "canary")):
            with pytest.raises(VersionConflict, match=f":{channel} points to revision {revision}"):
                published.run(RetireRevision(policy=POLICY, revision=revision))
        with pytest.raises(NotFound):
            published.run(RetireRevision(policy=POLICY, revision=6))

    def test_rollback_steps_over_them(self, published: Catalog) -> None:
        for revision in (3, 4):
            published.run(RetireRevision(policy=POLICY, revision=revision))
        assert published.run(Rollback(policy=POLICY)).revision == 2


class TestRetention:
    def test_the_newest_and_what_is_pointed_to_are_kept(self, published: Catalog) -> None:
        published.run(MoveChannel(policy=POLICY, channel="canary", target=(Split(1),)))
        published.run(SetRetention(policy=POLICY, retention=Retention(2)))
        assert live(published) == [1, 2, 3, 4, 5]
        answer = published.run(PruneRevisions(policy=POLICY, actor="ann"))
        assert (answer.count, answer.changed) == (2, True)
        assert live(published) == [1, 4, 5]
        assert not published.run(PruneRevisions(policy=POLICY)).changed
        is_what_the_journal_makes(published)

    def test_what_a_node_holds_is_kept(self, published: Catalog) -> None:
        published.run(SetRetention(policy=POLICY, retention=Retention(1)))
        held = published.resolve(f"{POLICY}@2").digest
        published.run(PruneRevisions(policy=POLICY, in_use=(held,)))
        assert live(published) == [2, 5]

    def test_the_young_are_kept(self, published: Catalog) -> None:
        published.run(SetRetention(policy=POLICY, retention=Retention(1, keep_days=1)))
        assert published.run(PruneRevisions(policy=POLICY)).count == 0
        pass_time(published, 86_400_000)
        published.publish(POLICY, b"six")
        assert published.run(PruneRevisions(policy=POLICY)).count == 5
        assert live(published) == [6]

    def test_without_it_everything_is_kept(self, published: Catalog) -> None:
        assert published.run(PruneRevisions(policy=POLICY)).count == 0
        published.run(SetRetention(policy=POLICY, retention=Retention(1)))
        assert published.run(SetRetention(policy=POLICY)).changed
        assert published.run(PruneNext()).count == 0
        assert live(published) == [1, 2, 3, 4, 5]
        assert isinstance(published.view.history(POLICY)[-1].body, RetentionChanged)

    def test_all_policies_are_pruned_step_by_step(self, catalog: Catalog) -> None:
        for number in range(5):
            for content in CONTENTS[:3]:
                catalog.publish(f"acme/p{number}", content)
            if number != 2:
                catalog.run(SetRetention(policy=f"acme/p{number}", retention=Retention(1)))
        steps = [catalog.run(PruneNext(limit=2))]
        while steps[-1].policy:
            steps.append(catalog.run(PruneNext(limit=2, after=steps[-1].policy)))
        assert [step.count for step in steps] == [4, 4, 0]
        assert [live(catalog, f"acme/p{number}") for number in range(5)] == [[3], [3], [1, 2, 3], [3], [3]]
        is_what_the_journal_makes(catalog)

    def test_a_step_looks_at_a_bounded_number_of_revisions(
        self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("catalog.checks.retention._ROWS_A_STEP", 4)
        for number in range(3):
            for content in CONTENTS[:3]:
                catalog.publish(f"acme/p{number}", content)
            catalog.run(SetRetention(policy=f"acme/p{number}", retention=Retention(1)))
        assert [catalog.run(PruneNext(after=after)).policy for after in ("", "acme/p1", "acme/p2")] == [
            "acme/p1", "acme/p2", "",
        ]  # fmt: skip
        assert [live(catalog, f"acme/p{number}") for number in range(3)] == [[3]] * 3

    def test_two_in_one_batch_retire_each_revision_once(self, published: Catalog) -> None:
        published.run(SetRetention(policy=POLICY, retention=Retention(2)))
        answers = published.answers(PruneNext(), PruneNext(), PruneRevisions(policy=POLICY))
        assert [answer.count for answer in answers if isinstance(answer, Committed)] == [3, 0, 0]
        is_what_the_journal_makes(published)

    def test_what_it_would_retire_again_is_not_restored(self, published: Catalog) -> None:
        published.run(SetRetention(policy=POLICY, retention=Retention(2)))
        published.run(PruneRevisions(policy=POLICY))
        with pytest.raises(VersionConflict, match="would retire revision 2 again"):
            published.run(RestoreRevision(policy=POLICY, revision=2))
        published.run(SetRetention(policy=POLICY, retention=Retention(4)))
        for revision in (2, 3):
            assert published.run(RestoreRevision(policy=POLICY, revision=revision)).changed
        assert published.run(PruneRevisions(policy=POLICY)).count == 0
        published.run(SetRetention(policy=POLICY))
        assert published.run(RestoreRevision(policy=POLICY, revision=1)).changed

    @pytest.mark.parametrize(
        ("retention", "field"),
        [(Retention(0), "keep_last"), (Retention(-1), "keep_last"), (Retention(1, -1.0), "keep_days"),
         (Retention(1, float("nan")), "keep_days"), (Retention(1, 1e9), "keep_days")],
    )  # fmt: skip
    def test_refuses_one_that_is_none(self, published: Catalog, retention: Retention, field: str) -> None:
        with pytest.raises(InvalidRequest) as caught:
            published.run(SetRetention(policy=POLICY, retention=retention))
        assert caught.value.field == field


class TestArtifacts:
    GRACE_S = 1000.0

    def digest(self, catalog: Catalog, revision: int) -> str:
        record = catalog.view.revision(POLICY, revision)
        assert record is not None
        return record.artifact.digest

    def remove(self, catalog: Catalog, *in_use: str) -> int:
        count = catalog.run(RemoveArtifacts(grace_s=self.GRACE_S, in_use=in_use)).count
        for _ in catalog.ledger.sweep(CollectOrphans(older_than_s=0)):
            pass
        return count

    def test_go_in_two_steps_with_grace_between(self, published: Catalog) -> None:
        digest = self.digest(published, 2)
        assert published.run(CondemnArtifacts()).count == 0
        published.run(RetireRevision(policy=POLICY, revision=2))
        assert published.run(CondemnArtifacts(actor="gc")).count == 1
        assert published.run(CondemnArtifacts()).count == 0
        assert self.remove(published) == 0
        assert published.store.size(digest) is not None
        pass_time(published, 1_000_001)
        assert self.remove(published) == 1
        assert published.store.size(digest) is None
        assert published.view.artifact(digest) is None
        assert self.digest(published, 2) == digest
        assert [published.resolve(f"{POLICY}@{number}").revision for number in (1, 3, 4, 5)] == [1, 3, 4, 5]
        is_what_the_journal_makes(published)

    def test_one_that_another_revision_names_stays(self, published: Catalog) -> None:
        published.publish("acme/other", b"two")
        published.run(RetireRevision(policy=POLICY, revision=2))
        assert published.run(CondemnArtifacts()).count == 0

    def test_one_that_a_node_holds_stays(self, published: Catalog) -> None:
        digest = self.digest(published, 2)
        published.run(RetireRevision(policy=POLICY, revision=2))
        assert published.run(CondemnArtifacts(in_use=(digest,))).count == 0
        published.run(CondemnArtifacts())
        pass_time(published, 2_000_000)
        assert self.remove(published, digest) == 0
        assert self.remove(published) == 1

    @pytest.mark.parametrize("rescue", ["publish", "restore"])
    def test_naming_it_again_rescues_it(self, published: Catalog, rescue: str) -> None:
        published.run(RetireRevision(policy=POLICY, revision=2))
        published.run(CondemnArtifacts())
        pass_time(published, 2_000_000)
        if rescue == "restore":
            published.run(RestoreRevision(policy=POLICY, revision=2))
        else:
            published.publish("acme/other", b"two")
        assert self.remove(published) == 0
        assert published.store.size(self.digest(published, 2)) is not None
        is_what_the_journal_makes(published)

    def test_a_removed_one_must_be_uploaded_to_come_back(self, published: Catalog) -> None:
        published.run(RetireRevision(policy=POLICY, revision=2))
        published.run(CondemnArtifacts())
        pass_time(published, 2_000_000)
        self.remove(published)
        with pytest.raises(ArtifactUnavailable, match="upload it first"):
            published.run(RestoreRevision(policy=POLICY, revision=2))
        facts = upload(published.store, b"two")
        published.run(RestoreRevision(policy=POLICY, revision=2))
        assert published.resolve(f"{POLICY}@2").digest == facts.digest
        published.run(PublishRevision(policy="acme/other", artifact=facts, create_over=BASE))
        is_what_the_journal_makes(published)

    @pytest.mark.parametrize(
        "command", [CondemnArtifacts(in_use=("x",)), RemoveArtifacts(in_use=("x",)), RemoveArtifacts(grace_s=-1)]
    )
    def test_refuses_what_makes_no_sense(self, catalog: Catalog, command: CondemnArtifacts | RemoveArtifacts) -> None:
        with pytest.raises(InvalidRequest):
            catalog.run(command)
