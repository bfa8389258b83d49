"""Which users take which arm of a split, and how few of them a change moves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog.records import Arm
from catalog.splits import choose
from tests.catalog.harness import BASE, Catalog
from wire.events import Split
from wire.outcomes import InvalidRequest
from wire.registrar import MoveChannel, RemoveChannel, RenamePolicy

POLICY = "acme/support"
USERS = [b"user-%d" % number for number in range(4000)]


def arms(*weights: int) -> list[Arm]:
    return [Arm(number, bytes([number]) * 32, 1, 8, ("q",), weight) for number, weight in enumerate(weights, start=1)]


def dealt(split: list[Arm], *, seed: int = 0, channel: str = "canary") -> list[int]:
    return [choose(split, user, channel=channel, seed=seed).revision for user in USERS]


def moved(before: list[int], after: list[int]) -> list[tuple[int, int]]:
    return [(was, now) for was, now in zip(before, after, strict=True) if was != now]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=2, max_size=5), st.integers(0, 1 << 63))
def test_each_arm_gets_its_share(weights: list[int], seed: int) -> None:
    shares = Counter(dealt(arms(*weights), seed=seed))
    for number, weight in enumerate(weights, start=1):
        share = weight / sum(weights)
        # five standard deviations of a binomial
        assert abs(shares[number] / len(USERS) - share) < 5 * (share * (1 - share) / len(USERS)) ** 0.5


def test_a_change_of_weight_moves_users_to_or_from_that_arm_alone() -> None:
    before, after = dealt(arms(80, 15, 5)), dealt(arms(80, 15, 20))
    steps = moved(before, after)
    assert {now for _, now in steps} == {3}
    # from 5 of 100 to 20 of 115 is 12 of 100 users, and no more of them may move
    assert 0.10 < len(steps) / len(USERS) < 0.15


def test_an_arm_more_takes_its_share_and_moves_nobody_between_the_others() -> None:
    assert {now for _, now in moved(dealt(arms(50, 50)), dealt(arms(50, 50, 25)))} == {3}


def test_the_same_weights_on_another_scale_move_nobody() -> None:
    assert dealt(arms(95, 5)) == dealt(arms(950, 50))


def test_the_order_of_the_arms_does_not_matter() -> None:
    assert dealt(arms(3, 2, 1)) == dealt(arms(3, 2, 1)[::-1])


def test_another_seed_deals_everyone_anew() -> None:
    stayed = len(USERS) - len(moved(dealt(arms(50, 50), seed=1), dealt(arms(50, 50), seed=2)))
    assert 0.45 < stayed / len(USERS) < 0.55


def test_channels_deal_independently() -> None:
    stayed = len(USERS) - len(moved(dealt(arms(50, 50), channel="a"), dealt(arms(50, 50), channel="b")))
    assert 0.45 < stayed / len(USERS) < 0.55


@pytest.fixture
def published(catalog: Catalog) -> Catalog:
    for content in (b"one", b"two", b"three"):
        catalog.publish(POLICY, content, create_over=BASE)
    return catalog


def taken(catalog: Catalog, name: str = POLICY) -> list[int]:
    return [catalog.resolve(f"{name}:canary", selector=user).revision for user in USERS[:300]]


def split(*weights: tuple[int, int], seed: int | None = None) -> MoveChannel:
    target = tuple(Split(revision, weight) for revision, weight in weights)
    return MoveChannel(policy=POLICY, channel="canary", target=target, seed=seed)


def test_a_seed_is_kept_with_the_split_until_another_is_given(published: Catalog) -> None:
    published.run(split((1, 50), (2, 50), seed=7))
    first = taken(published)
    assert not published.run(split((1, 50), (2, 50))).changed
    published.run(split((1, 50), (2, 60)))
    assert {now for _, now in moved(first, taken(published))} <= {2}
    assert published.run(split((1, 50), (2, 50), seed=8)).changed
    assert moved(first, taken(published))
    record = published.view.policy(POLICY)
    assert record is not None
    assert record.seeds == {"canary": 8}


def test_a_split_that_ended_and_comes_again_deals_as_before(published: Catalog) -> None:
    published.run(split((1, 50), (2, 50), seed=7))
    before = taken(published)
    published.run(split((2, 1)))
    assert set(taken(published)) == {2}
    published.run(split((1, 50), (2, 50)))
    assert taken(published) == before
    published.run(RemoveChannel(policy=POLICY, channel="canary"))
    record = published.view.policy(POLICY)
    assert record is not None
    assert record.seeds == {}


def test_a_renaming_moves_nobody(published: Catalog) -> None:
    published.run(split((1, 50), (2, 50), seed=7))
    before = taken(published)
    published.run(RenamePolicy(policy=POLICY, to="acme/helper"))
    assert taken(published) == taken(published, "acme/helper") == before


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_refuses_a_seed_that_is_none(published: Catalog, seed: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        published.run(split((1, 1), (2, 1), seed=seed))
    assert caught.value.field == "seed"


def test_a_seed_is_for_splits(published: Catalog) -> None:
    with pytest.raises(InvalidRequest, match="has none"):
        published.run(split((1, 1), seed=3))
