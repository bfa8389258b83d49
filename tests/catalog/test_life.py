"""A policy's life after publishing: promotion, names, labels, training records, retention, and its end."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from catalog.names import parse_reference
from catalog.replay import check_environment
from tests.catalog.harness import BASE, Catalog, add_base, upload
from wire.events import (
    ForwardDropped,
    LabelsChanged,
    PolicyRenamed,
    PolicyRestored,
    RecordKind,
    RecordReleased,
    RecordRetained,
    Retention,
    RetentionChanged,
    RevisionRestored,
    RevisionsRetired,
    Split,
    TrainingRecord,
)
from wire.outcomes import ArtifactUnavailable, InvalidRequest, NotFound, Retired, RoostError, VersionConflict
from wire.registrar import (
    ChangeLabels,
    CollectOrphans,
    Committed,
    CondemnArtifacts,
    CreatePolicy,
    DropForward,
    MoveChannel,
    Promote,
    PruneNext,
    PruneRevisions,
    PublishRevision,
    ReleaseRecord,
    RemoveArtifacts,
    RenamePolicy,
    RestorePolicy,
    RestoreRevision,
    RetainRecord,
    RetirePolicy,
    RetireRevision,
    Rollback,
    SetRetention,
)

POLICY = "acme/support"
RENAMED = "acme/helper"
CONTENTS = [b"one", b"two", b"three", b"four", b"five"]


@pytest.fixture
def published(catalog: Catalog) -> Catalog:
    """A catalog with five revisions of one policy."""
    for content in CONTENTS:
        catalog.publish(POLICY, content)
    return catalog


def pass_time(catalog: Catalog, ms: int) -> None:
    clock: Any = catalog.ledger._now_ms
    catalog.ledger._now_ms = lambda: clock() + ms


def live(catalog: Catalog, policy: str = POLICY) -> list[int]:
    return [record.revision for record in catalog.view.revisions(policy) if not record.retired_ms]


def is_what_the_journal_makes(catalog: Catalog) -> None:
    assert check_environment(catalog.environment).differences == ()


class TestPromote:
    def test_from_channel_to_channel(self, published: Catalog) -> None:
        published.run(MoveChannel(policy=POLICY, channel="canary", target=(Split(2),)))
        answer = published.run(Promote(policy=POLICY, source="canary"))
        assert (answer.revision, answer.changed) == (2, True)
        assert published.resolve(POLICY).revision == 2
        assert not published.run(Promote(policy=POLICY, source="canary")).changed

    def test_of_latest_stays_where_latest_was(self, published: Catalog) -> None:
        published.run(Promote(policy=POLICY, source="latest", channel="stable"))
        published.publish(POLICY, b"six")
        assert published.resolve(POLICY).revision == 5

    def test_of_a_revision(self, published: Catalog) -> None:
        assert published.run(Promote(policy=POLICY, revision=3, channel="prod")).revision == 3
        assert published.resolve(f"{POLICY}:prod").revision == 3

    def test_of_a_split_must_say_which(self, published: Catalog) -> None:
        published.run(MoveChannel(policy=POLICY, channel="canary", target=(Split(2), Split(3))))
        with pytest.raises(InvalidRequest, match="split between 2 and 3"):
            published.run(Promote(policy=POLICY, source="canary"))
        assert published.run(Promote(policy=POLICY, revision=3)).revision == 3

    @pytest.mark.parametrize(
        ("command", "error", "field"),
        [
            (Promote(policy=POLICY), InvalidRequest, "source"),
            (Promote(policy=POLICY, source="canary", revision=1), InvalidRequest, "source"),
            (Promote(policy=POLICY, source="canary"), NotFound, "source"),
            (Promote(policy=POLICY, revision=9), NotFound, "revision"),
            (Promote(policy=POLICY, revision=1, channel="latest"), InvalidRequest, "channel"),
            (Promote(policy=POLICY, revision=1, expected_version=1), VersionConflict, "expected_version"),
        ],
    )
    def test_refuses_what_names_nothing(
        self, published: Catalog, command: Promote, error: type[RoostError], field: str
    ) -> None:
        with pytest.raises(error) as caught:
            published.run(command)
        assert caught.value.field == field


class TestRestore:
    def test_a_restored_policy_is_as_it_was(self, published: Catalog) -> None:
        published.run(Rollback(policy=POLICY, to=2))
        published.run(RetirePolicy(policy=POLICY))
        assert published.run(RestorePolicy(policy=POLICY)).changed
        assert not published.run(RestorePolicy(policy=POLICY)).changed
        assert published.resolve(POLICY).revision == 2
        assert isinstance(published.view.history(POLICY)[-1].body, PolicyRestored)

    def test_needs_the_version_that_is_expected(self, published: Catalog) -> None:
        version = published.run(RetirePolicy(policy=POLICY)).version
        with pytest.raises(VersionConflict):
            published.run(RestorePolicy(policy=POLICY, expected_version=version - 1))
        published.run(RestorePolicy(policy=POLICY, expected_version=version))

    def test_of_what_never_was_is_told(self, catalog: Catalog) -> None:
        with pytest.raises(NotFound):
            catalog.run(RestorePolicy(policy=POLICY))


class TestRename:
    def test_both_names_stand_for_all_of_it(self, published: Catalog) -> None:
        digests = [published.resolve(f"{POLICY}@{number}").digest for number in range(1, 6)]
        answer = published.run(RenamePolicy(policy=POLICY, to=RENAMED))
        assert (answer.policy, answer.revision) == (RENAMED, 5)
        for name in (POLICY, RENAMED):
            found = published.resolve(name)
            assert (found.policy, found.reference, found.tenant) == (RENAMED, f"{RENAMED}@5", "acme")
            assert [published.resolve(f"{name}@{number}").digest for number in range(1, 6)] == digests
            with pytest.raises(NotFound):
                published.resolve(f"{name}@6")
        record = published.view.policy(POLICY)
        assert record is not None
        assert (record.policy, record.former) == (RENAMED, (POLICY,))
        assert [record.policy for record in published.view.policies()] == [RENAMED]
        is_what_the_journal_makes(published)

    def test_its_history_goes_with_it(self, published: Catalog) -> None:
        before = published.view.history(POLICY)
        published.run(RenamePolicy(policy=POLICY, to=RENAMED, actor="ann"))
        published.publish(RENAMED, b"six")
        *told, renamed, last = published.view.history(RENAMED)
        assert told == before
        assert (renamed.body, renamed.actor) == (PolicyRenamed(POLICY, RENAMED), "ann")
        assert last.seq == published.view.position()

    def test_work_under_the_former_name_goes_on(self, published: Catalog) -> None:
        published.run(RenamePolicy(policy=POLICY, to=RENAMED))
        answer = published.publish(POLICY, b"six")
        assert (answer.policy, answer.revision) == (RENAMED, 6)
        assert published.run(Rollback(policy=POLICY)).policy == RENAMED
        assert published.resolve(RENAMED).revision == 5

    def test_a_name_that_forwards_is_taken(self, published: Catalog) -> None:
        published.run(CreatePolicy(policy="acme/other", base=BASE))
        published.run(RenamePolicy(policy=POLICY, to=RENAMED))
        for command in (CreatePolicy(policy=POLICY, base=BASE), RenamePolicy(policy="acme/other", to=POLICY)):
            with pytest.raises(VersionConflict, match="forwards to acme/helper"):
                published.run(command)
        published.run(DropForward(policy=RENAMED, name=POLICY))
        with pytest.raises(NotFound):
            published.resolve(POLICY)
        published.run(RenamePolicy(policy="acme/other", to=POLICY))
        assert isinstance(published.view.history(RENAMED)[-1].body, ForwardDropped)
        is_what_the_journal_makes(published)

    def test_a_chain_of_names_is_one_step(self, published: Catalog) -> None:
        for old, new in itertools.pairwise([POLICY, "acme/b", "acme/c"]):
            published.run(RenamePolicy(policy=old, to=new))
        assert {published.resolve(name).policy for name in (POLICY, "acme/b", "acme/c")} == {"acme/c"}
        published.run(DropForward(policy="acme/c", name="acme/b"))
        assert published.resolve(POLICY).policy == "acme/c"

    def test_back_again(self, published: Catalog) -> None:
        published.run(RenamePolicy(policy=POLICY, to=RENAMED))
        published.run(RenamePolicy(policy=RENAMED, to=POLICY))
        assert {published.resolve(name).policy for name in (POLICY, RENAMED)} == {POLICY}
        is_what_the_journal_makes(published)

    @pytest.mark.parametrize(
        ("to", "error"),
        [("rival/support", InvalidRequest), ("acme", InvalidRequest), ("acme/taken", VersionConflict)],
    )
    def test_refuses_names_that_it_can_not_have(self, published: Catalog, to: str, error: type[RoostError]) -> None:
        published.run(CreatePolicy(policy="acme/taken", base=BASE))
        with pytest.raises(error) as caught:
            published.run(RenamePolicy(policy=POLICY, to=to))
        assert caught.value.field == "to"

    def test_to_its_own_name_changes_nothing(self, published: Catalog) -> None:
        assert not published.run(RenamePolicy(policy=POLICY, to=POLICY)).changed

    def test_the_number_of_former_names_is_bounded(self, published: Catalog) -> None:
        names = [POLICY, *(f"acme/n{number}" for number in range(16))]
        for old, new in itertools.pairwise(names):
            published.run(RenamePolicy(policy=old, to=new))
        with pytest.raises(InvalidRequest, match="drop one first"):
            published.run(RenamePolicy(policy=names[-1], to="acme/one-more"))


class TestLabels:
    def names(self, catalog: Catalog, **conditions: Any) -> list[str]:
        return [record.policy for record in catalog.view.search(**conditions).policies]

    def test_are_set_changed_and_removed(self, published: Catalog) -> None:
        published.run(ChangeLabels(policy=POLICY, labels={"team": "search", "stage": "beta"}))
        published.run(ChangeLabels(policy=POLICY, labels={"stage": "live"}, remove=("team",)))
        record = published.view.policy(POLICY)
        assert record is not None
        assert record.labels == {"stage": "live"}
        assert not published.run(ChangeLabels(policy=POLICY, labels={"stage": "live"}, remove=("team",))).changed
        assert isinstance(published.view.history(POLICY)[-1].body, LabelsChanged)
        assert self.names(published, labels={"team": "search"}) == []
        assert self.names(published, labels={"stage": "live"}) == [POLICY]
        is_what_the_journal_makes(published)

    def test_policies_are_found_by_prefix_label_and_base(self, catalog: Catalog) -> None:
        catalog.run(add_base("other", fingerprint="c" * 64))
        for tenant, number in itertools.product(("acme", "zeta"), range(6)):
            name = f"{tenant}/p{number}"
            catalog.run(CreatePolicy(policy=name, base=BASE if number % 2 else "other"))
            catalog.run(ChangeLabels(policy=name, labels={"team": "abc"[number % 3], "kind": "bot"}))
        assert self.names(catalog, labels={"team": "a"}) == ["acme/p0", "acme/p3", "zeta/p0", "zeta/p3"]
        assert self.names(catalog, labels={"team": "a"}, prefix="zeta/") == ["zeta/p0", "zeta/p3"]
        assert self.names(catalog, labels={"team": "a"}, base=BASE) == ["acme/p3", "zeta/p3"]
        assert self.names(catalog, labels={"kind": "bot", "team": "b"}, prefix="acme/") == ["acme/p1", "acme/p4"]
        assert self.names(catalog, base="other", prefix="acme/") == ["acme/p0", "acme/p2", "acme/p4"]
        assert self.names(catalog, base="none") == []
        assert self.names(catalog, labels={"team": "d"}) == []

    @pytest.mark.parametrize("conditions", [{}, {"base": BASE}, {"labels": {"kind": "bot"}}])
    def test_are_searched_in_pages(self, catalog: Catalog, conditions: dict[str, Any]) -> None:
        names = sorted(f"acme/p{number}" for number in range(10))
        for name in names:
            catalog.run(CreatePolicy(policy=name, base=BASE))
            catalog.run(ChangeLabels(policy=name, labels={"kind": "bot"}))
        seen: list[str] = []
        after = ""
        while True:
            page = catalog.view.search(after=after, limit=3, **conditions)
            seen += [record.policy for record in page.policies]
            if not (after := page.after):
                break
        assert seen == names

    def test_go_along_with_a_renaming(self, published: Catalog) -> None:
        published.run(ChangeLabels(policy=POLICY, labels={"team": "a"}))
        published.run(SetRetention(policy=POLICY, retention=Retention(2)))
        published.run(RenamePolicy(policy=POLICY, to=RENAMED))
        assert self.names(published, labels={"team": "a"}) == self.names(published, base=BASE) == [RENAMED]
        published.run(PruneNext())
        assert live(published, RENAMED) == [4, 5]

    @pytest.mark.parametrize(
        ("labels", "remove", "field"),
        [
            ({}, (), "labels"),
            ({"Team": "a"}, (), "labels"),
            ({"a=b": "c"}, (), "labels"),
            ({"team": "a b"}, (), "labels"),
            ({"team": "x" * 64}, (), "labels"),
            ({"team": "a\0"}, (), "labels"),
            ({f"l{number}": "" for number in range(33)}, (), "labels"),
            ({}, ("Team",), "remove"),
            ({"team": "a"}, ("team",), "remove"),
        ],
    )
    def test_refuses_labels_that_are_none(
        self, published: Catalog, labels: dict[str, str], remove: tuple[str, ...], field: str
    ) -> None:
        with pytest.raises(InvalidRequest) as caught:
            published.run(ChangeLabels(policy=POLICY, labels=labels, remove=remove))
        assert caught.value.field == field

    def test_their_number_is_bounded(self, published: Catalog) -> None:
        published.run(ChangeLabels(policy=POLICY, labels={f"l{number}": "" for number in range(32)}))
        with pytest.raises(InvalidRequest, match="32 labels"):
            published.run(ChangeLabels(policy=POLICY, labels={"more": ""}))
        published.run(ChangeLabels(policy=POLICY, labels={"more": ""}, remove=("l0",)))


CHECKPOINT = TrainingRecord(RecordKind.CHECKPOINT, "s3://runs/7/step-40", "ab", 40, 2)
ROLLOUT = TrainingRecord(RecordKind.ROLLOUT, "file:///rollouts/1", step=41, revision=3)


class TestTrainingRecords:
    def test_are_kept_until_released(self, published: Catalog) -> None:
        for record in (ROLLOUT, CHECKPOINT):
            assert published.run(RetainRecord(policy=POLICY, record=record, actor="run-7")).changed
            assert not published.run(RetainRecord(policy=POLICY, record=record)).changed
        assert [row.record for row in published.view.retained(POLICY)] == [CHECKPOINT, ROLLOUT]
        assert {row.actor for row in published.view.retained(POLICY)} == {"run-7"}
        published.run(ReleaseRecord(policy=POLICY, kind=RecordKind.CHECKPOINT, uri=CHECKPOINT.uri))
        assert [row.record for row in published.view.retained(POLICY)] == [ROLLOUT]
        with pytest.raises(NotFound):
            published.run(ReleaseRecord(policy=POLICY, kind=RecordKind.CHECKPOINT, uri=CHECKPOINT.uri))
        kinds = [type(event.body) for event in published.view.history(POLICY)][-3:]
        assert kinds == [RecordRetained, RecordRetained, RecordReleased]
        is_what_the_journal_makes(published)

    def test_the_same_place_may_be_written_again(self, published: Catalog) -> None:
        published.run(RetainRecord(policy=POLICY, record=CHECKPOINT))
        again = TrainingRecord(RecordKind.CHECKPOINT, CHECKPOINT.uri, "cd", 80)
        published.run(RetainRecord(policy=POLICY, record=again))
        assert [row.record for row in published.view.retained(POLICY)] == [again]

    def test_hold_their_revision(self, published: Catalog) -> None:
        published.run(RetainRecord(policy=POLICY, record=CHECKPOINT))
        published.run(SetRetention(policy=POLICY, retention=Retention(1)))
        with pytest.raises(VersionConflict, match="release it first"):
            published.run(RetireRevision(policy=POLICY, revision=2))
        published.run(PruneRevisions(policy=POLICY))
        assert live(published) == [2, 5]

    def test_follow_a_renaming(self, published: Catalog) -> None:
        published.run(RetainRecord(policy=POLICY, record=CHECKPOINT))
        published.run(RenamePolicy(policy=POLICY, to=RENAMED))
        assert [row.record for row in published.view.retained(RENAMED)] == [CHECKPOINT]
        assert published.view.retained(POLICY) == []
        is_what_the_journal_makes(published)

    @pytest.mark.parametrize(
        ("record", "error", "field"),
        [
            (TrainingRecord(RecordKind.ROLLOUT, ""), InvalidRequest, "uri"),
            (TrainingRecord(RecordKind.ROLLOUT, "u" * 1025), InvalidRequest, "uri"),
            (TrainingRecord(RecordKind.ROLLOUT, "a\nb"), InvalidRequest, "uri"),
            (TrainingRecord(RecordKind.ROLLOUT, "u", step=-1), InvalidRequest, "step"),
            (TrainingRecord(RecordKind.ROLLOUT, "u", revision=9), NotFound, "revision"),
        ],
    )
    def test_refuses_what_is_none(
        self, published: Catalog, record: TrainingRecord, error: type[RoostError], field: str
    ) -> None:
        with pytest.raises(error) as caught:
            published.run(RetainRecord(policy=POLICY, record=record))
        assert caught.value.field == field


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


def test_a_former_name_costs_one_look_more_and_others_none(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog.publish(POLICY, b"one")
    catalog.publish("acme/old", b"one")
    catalog.run(RenamePolicy(policy="acme/old", to="acme/new"))
    looks: list[str] = []
    kind = type(catalog.environment.tables.forwards)
    get = kind.get

    def counted(table: Any, txn: Any, key: bytes) -> Any:
        looks.append(table.name)
        return get(table, txn, key)

    monkeypatch.setattr(kind, "get", counted)
    catalog.view.resolve(parse_reference(POLICY))
    assert "forwards" not in looks
    looks.clear()
    assert catalog.view.resolve(parse_reference("acme/old")).policy == "acme/new"
    assert looks.count("forwards") == 1
