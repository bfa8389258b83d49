"""A policy's life after publishing: promotion, names, labels, and training records."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from catalog.names import parse_reference
from tests.catalog.harness import BASE, POLICY, Catalog, add_base, is_what_the_journal_makes, live, with_revisions
from wire.events import (
    ForwardDropped,
    LabelsChanged,
    PolicyRenamed,
    PolicyRestored,
    RecordKind,
    RecordReleased,
    RecordRetained,
    Retention,
    Split,
    TrainingRecord,
)
from wire.outcomes import InvalidRequest, NotFound, RoostError, VersionConflict
from wire.registrar import (
    ChangeLabels,
    ClaimPolicy,
    CreatePolicy,
    DropForward,
    MoveChannel,
    Promote,
    PruneNext,
    PruneRevisions,
    ReleaseRecord,
    RenamePolicy,
    RestorePolicy,
    RetainRecord,
    RetirePolicy,
    RetireRevision,
    Rollback,
    SetRetention,
)

RENAMED = "acme/helper"
CONTENTS = [b"one", b"two", b"three", b"four", b"five"]


@pytest.fixture
def published(catalog: Catalog) -> Catalog:
    return with_revisions(catalog, *CONTENTS)


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


class TestWriter:
    def test_the_run_that_claimed_a_policy_last_publishes_to_it(self, published: Catalog) -> None:
        assert published.publish(POLICY, b"before any claim", writer="a").revision == 6
        published.run(ClaimPolicy(policy=POLICY, writer="a"))
        assert published.publish(POLICY, b"of a", writer="a").revision == 7
        published.run(ClaimPolicy(policy=POLICY, writer="b"))
        assert not published.run(ClaimPolicy(policy=POLICY, writer="b")).changed
        with pytest.raises(VersionConflict, match=f"{POLICY} is written by b since: a can't") as caught:
            published.publish(POLICY, b"of a again", writer="a")
        assert caught.value.field == "writer"
        assert not published.publish(POLICY, b"of a", writer="a").changed, "what is published already is acknowledged"
        assert published.publish(POLICY, b"of nobody's run").revision == 8
        is_what_the_journal_makes(published)

    @pytest.mark.parametrize(
        ("command", "field"),
        [(ClaimPolicy(policy=POLICY, writer=""), "writer"), (ClaimPolicy(policy="acme/none", writer="a"), "policy")],
    )
    def test_refuses_what_names_nothing(self, published: Catalog, command: ClaimPolicy, field: str) -> None:
        with pytest.raises(RoostError) as caught:
            published.run(command)
        assert caught.value.field == field


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
