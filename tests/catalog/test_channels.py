"""Where channels point, and how they go back."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.catalog.harness import (
    BASE,
    POLICY,
    Catalog,
    is_what_the_journal_makes,
    with_revisions,
)
from wire.events import Split
from wire.outcomes import (
    InvalidRequest,
    NotFound,
    RoostError,
)
from wire.registrar import (
    CreatePolicy,
    MoveChannel,
    Promote,
    RemoveChannel,
    RetireRevision,
    Rollback,
)


def move(channel: str, *revisions: int) -> MoveChannel:
    return MoveChannel(policy=POLICY, channel=channel, target=tuple(Split(revision) for revision in revisions))


def rolled_back(catalog: Catalog, times: int) -> list[int]:
    return [catalog.run(Rollback(policy=POLICY)).revision for _ in range(times)]


@pytest.fixture
def published(catalog: Catalog) -> Catalog:
    return with_revisions(catalog, b"one", b"two", b"three")


class TestChannels:
    def test_a_moved_channel_stays_where_it_is(self, published: Catalog) -> None:
        answer = published.run(MoveChannel(policy=POLICY, channel="canary", target=(Split(2),)))
        assert (answer.revision, answer.digest) == (2, published.resolve(f"{POLICY}@2").digest)
        published.publish(POLICY, b"four")
        assert published.resolve(f"{POLICY}:canary").revision == 2
        assert published.resolve(POLICY).revision == 4

    def test_an_empty_target_follows_latest(self, published: Catalog) -> None:
        published.run(MoveChannel(policy=POLICY, channel="stable", target=(Split(1),)))
        published.publish(POLICY, b"four")
        assert published.resolve(POLICY).revision == 1
        published.run(MoveChannel(policy=POLICY, channel="stable"))
        assert published.resolve(POLICY).revision == 4
        published.publish(POLICY, b"five")
        assert published.resolve(POLICY).revision == 5

    def test_moving_it_to_where_it_is_changes_nothing(self, published: Catalog) -> None:
        move = MoveChannel(policy=POLICY, channel="canary", target=(Split(2),))
        assert published.run(move).changed
        assert not published.run(move).changed
        assert not published.run(MoveChannel(policy=POLICY, channel="stable")).changed

    def test_a_split_follows_its_weights_and_keeps_a_selector_on_its_arm(self, published: Catalog) -> None:
        target = (Split(2, weight=9), Split(3, weight=1))
        answer = published.run(MoveChannel(policy=POLICY, channel="stable", target=target))
        assert (answer.changed, answer.revision) == (True, 0)
        selectors = [b"user-%d" % number for number in range(2000)]
        arms = [published.resolve(POLICY, selector=selector).revision for selector in selectors]
        # a tenth of 2,000 is 200, and three standard deviations are 40
        assert 150 < Counter(arms)[3] < 250
        assert arms == [published.resolve(POLICY, selector=selector).revision for selector in selectors]

    @pytest.mark.parametrize(
        ("channel", "target", "error", "field"),
        [
            ("latest", (Split(1),), InvalidRequest, "channel"),
            ("Canary", (Split(1),), InvalidRequest, "channel"),
            ("", (Split(1),), InvalidRequest, "channel"),
            ("canary", (Split(4),), NotFound, "target"),
            ("canary", (Split(0),), NotFound, "target"),
            ("canary", (Split(-1),), NotFound, "target"),
            ("canary", (Split(1, weight=0),), InvalidRequest, "target"),
            ("canary", (Split(1, weight=1 << 40),), InvalidRequest, "target"),
            ("canary", (Split(1), Split(1)), InvalidRequest, "target"),
            ("canary", tuple(Split(n) for n in range(1, 30)), InvalidRequest, "target"),
        ],
    )
    def test_refuses_targets_that_are_none(
        self, published: Catalog, channel: str, target: tuple[Split, ...], error: type[RoostError], field: str
    ) -> None:
        with pytest.raises(error) as caught:
            published.run(MoveChannel(policy=POLICY, channel=channel, target=target))
        assert caught.value.field == field
        with pytest.raises(NotFound):
            published.resolve(f"{POLICY}:canary")

    def test_their_number_is_bounded(self, published: Catalog) -> None:
        for number in range(63):
            published.run(MoveChannel(policy=POLICY, channel=f"c{number}", target=(Split(1),)))
        with pytest.raises(InvalidRequest, match="64 channels already"):
            published.run(MoveChannel(policy=POLICY, channel="one-more", target=(Split(1),)))
        published.run(MoveChannel(policy=POLICY, channel="c0", target=(Split(2),)))

    def test_a_removed_channel_is_gone(self, published: Catalog) -> None:
        published.run(MoveChannel(policy=POLICY, channel="canary", target=(Split(2),)))
        assert published.run(RemoveChannel(policy=POLICY, channel="canary")).changed
        for ask in (
            lambda: published.resolve(f"{POLICY}:canary"),
            lambda: published.run(RemoveChannel(policy=POLICY, channel="canary")),
        ):
            with pytest.raises(NotFound, match="no channel canary"):
                ask()

    @pytest.mark.parametrize("channel", ["stable", "latest"])
    def test_stable_and_latest_are_always_there(self, published: Catalog, channel: str) -> None:
        with pytest.raises(InvalidRequest):
            published.run(RemoveChannel(policy=POLICY, channel=channel))
        assert published.resolve(f"{POLICY}:{channel}").revision == 3


class TestRollback:
    def test_goes_to_the_revision_before_and_stays_there(self, published: Catalog) -> None:
        answer = published.run(Rollback(policy=POLICY))
        assert (answer.revision, answer.changed) == (2, True)
        assert published.resolve(POLICY).revision == 2
        published.publish(POLICY, b"four")
        assert published.resolve(POLICY).revision == 2
        assert published.resolve(f"{POLICY}:latest").revision == 4

    def test_again_goes_further_until_there_is_nothing_before(self, published: Catalog) -> None:
        assert [published.run(Rollback(policy=POLICY)).revision for _ in range(2)] == [2, 1]
        with pytest.raises(NotFound, match="no revision before 1"):
            published.run(Rollback(policy=POLICY))
        assert published.resolve(POLICY).revision == 1

    def test_goes_to_a_given_revision(self, published: Catalog) -> None:
        assert published.run(Rollback(policy=POLICY, to=1)).revision == 1
        assert not published.run(Rollback(policy=POLICY, to=1)).changed
        assert published.run(Rollback(policy=POLICY, to=3)).revision == 3
        for missing in (4, -1):
            with pytest.raises(NotFound) as caught:
                published.run(Rollback(policy=POLICY, to=missing))
            assert caught.value.field == "to"

    def test_of_a_split_that_had_nothing_before_must_say_where_to(self, published: Catalog) -> None:
        published.run(move("canary", 2, 3))
        with pytest.raises(InvalidRequest, match="split between 2 and 3"):
            published.run(Rollback(policy=POLICY, channel="canary"))
        assert published.run(Rollback(policy=POLICY, channel="canary", to=2)).revision == 2
        assert published.resolve(f"{POLICY}:canary").revision == 2

    def test_goes_back_to_what_the_channel_served_and_then_further(self, published: Catalog) -> None:
        published.publish(POLICY, b"four")
        published.run(move("stable", 1))
        published.run(move("canary", 3))
        published.run(Promote(policy=POLICY, source="canary"))
        # 4 was served before the first move, and where that is used up, lower numbers follow
        assert rolled_back(published, 3) == [1, 4, 3]
        assert rolled_back(published, 2) == [2, 1]
        with pytest.raises(NotFound, match="no revision before 1"):
            published.run(Rollback(policy=POLICY))
        is_what_the_journal_makes(published)

    def test_goes_back_to_a_split_with_its_seed(self, published: Catalog) -> None:
        split = (Split(1, 9), Split(2, 1))
        published.run(MoveChannel(policy=POLICY, channel="stable", target=split, seed=7))
        published.run(move("stable", 3))
        assert published.run(Rollback(policy=POLICY)).revision == 0
        record = published.view.policy(POLICY)
        assert record is not None
        assert (record.channels["stable"], record.seeds) == (split, {"stable": 7})
        assert rolled_back(published, 1) == [3]

    def test_of_a_channel_that_was_moved_and_follows_latest_again(self, published: Catalog) -> None:
        published.run(move("stable", 1))
        published.run(move("stable"))
        published.publish(POLICY, b"four")
        published.publish(POLICY, b"five")
        assert rolled_back(published, 5) == [4, 3, 1, 3, 2]

    def test_what_serves_the_same_is_nothing_to_go_back_to(self, published: Catalog) -> None:
        published.run(move("stable", 3))
        published.run(move("stable"))
        published.run(MoveChannel(policy=POLICY, channel="stable", target=(Split(3, 5),)))
        record = published.view.policy(POLICY)
        assert record is not None
        assert record.before == {}
        assert rolled_back(published, 1) == [2]

    def test_passes_over_what_is_retired(self, published: Catalog) -> None:
        for content in (b"four", b"five"):
            published.publish(POLICY, content)
        for arms in ((2,), (1, 3), (4,)):
            published.run(move("stable", *arms))
        published.run(RetireRevision(policy=POLICY, revision=3))
        assert rolled_back(published, 1) == [2]
        published.run(move("stable", 4))
        for revision in (2, 3):
            published.run(RetireRevision(policy=POLICY, revision=revision))
        assert rolled_back(published, 2) == [5, 4]
        is_what_the_journal_makes(published)

    def test_to_a_revision_goes_no_way_forward_afterwards(self, published: Catalog) -> None:
        for revision in (1, 2, 3):
            published.run(move("stable", revision))
        assert published.run(Rollback(policy=POLICY, to=1)).revision == 1
        assert rolled_back(published, 1) == [3]
        published.publish(POLICY, b"four")
        published.run(move("stable", 4))
        # not among what was served before: that stays as it is
        assert published.run(Rollback(policy=POLICY, to=2)).revision == 2
        assert rolled_back(published, 1) == [3]

    def test_a_channel_remembers_a_few_targets_until_it_is_removed(self, published: Catalog) -> None:
        for _ in range(6):
            published.run(move("canary", 1))
            published.run(move("canary", 3))
        record = published.view.policy(POLICY)
        assert record is not None
        assert len(record.before["canary"]) == 8
        published.run(RemoveChannel(policy=POLICY, channel="canary"))
        published.run(move("canary", 3))
        assert published.run(Rollback(policy=POLICY, channel="canary")).revision == 2
        is_what_the_journal_makes(published)

    def test_moves_the_channel_that_is_named_alone(self, published: Catalog) -> None:
        published.run(MoveChannel(policy=POLICY, channel="canary", target=(Split(3),)))
        assert published.run(Rollback(policy=POLICY, channel="canary")).revision == 2
        assert published.resolve(POLICY).revision == 3
        with pytest.raises(NotFound, match="no channel other"):
            published.run(Rollback(policy=POLICY, channel="other"))
        with pytest.raises(InvalidRequest):
            published.run(Rollback(policy=POLICY, channel="latest"))

    def test_of_a_policy_without_revisions_is_refused(self, catalog: Catalog) -> None:
        catalog.run(CreatePolicy(policy=POLICY, base=BASE))
        with pytest.raises(NotFound):
            catalog.run(Rollback(policy=POLICY))
