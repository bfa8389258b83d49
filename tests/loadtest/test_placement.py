from __future__ import annotations

import pytest

from loadtest.placement import Fleet, _demands, _moved_in_a_living_fleet, _moved_in_order, _summary


def test_a_leaving_node_moves_its_own_policies_and_a_joining_one_none_that_serve() -> None:
    moved = _moved_in_a_living_fleet(8, seed=1)
    assert moved == {"leaves": 1.0, "joins": 0.0}


def test_in_the_order_itself_only_the_new_nodes_share_moves() -> None:
    moved = _moved_in_order(8, policies=2000, changes=4, seed=1)
    assert moved["joins"] == pytest.approx(1.0, abs=0.15)
    assert moved["moved_between_others"] == 1.0


def test_no_policy_is_placed_twice_and_slots_are_used_evenly() -> None:
    fleet = Fleet(8)
    demands = _demands(fleet.room, seed=3)
    assert fleet.fill(demands) == fleet.fill(list(reversed(demands)))
    used = [len(serving) / fleet.slots[name] for name, serving in fleet.serving.items()]
    assert max(used) <= 1.12 * sum(used) / len(used)


def test_the_dearest_kind_and_the_worst_change_are_told() -> None:
    costs = {"serving": [1.0, 2.0, 9.0], "base": [3.0, 3.0, 3.0]}
    moved = {"joins": 0.98, "leaves": 1.04}
    samples = {f"decide_{nodes}_nodes": costs for nodes in (40, 1000)}
    samples |= dict.fromkeys(("orders_40_nodes", "orders_1000_nodes", "living_40_nodes"), moved)  # type: ignore[arg-type]
    assert _summary(samples) == {"decide_40_nodes_us": 3.0, "decide_1000_nodes_us": 3.0, "moved_over_minimum": 1.04}
