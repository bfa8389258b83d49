"""Retention in the background."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from catalog.in_use import InUse
from catalog.pruner import ACTOR, Pruner
from catalog.registrar import Registrar
from tests.catalog.harness import Catalog, add_base
from wire.events import Retention
from wire.outcomes import Outcome
from wire.registrar import AnyAnswer, Noted, Refusal, ReportInUse, SetRetention

POLICY = "acme/support"


@pytest.fixture
def catalog_lmdb(tmp_path: Path) -> Iterator[Catalog]:
    made = Catalog(tmp_path)
    made.run(add_base())
    yield made
    made.close()


class Answer:
    """Keeps what came."""

    expired = False
    came: AnyAnswer | None = None

    def __call__(self, answer: AnyAnswer, /) -> None:
        self.came = answer


def live(catalog: Catalog, policy: str) -> list[int]:
    return [record.revision for record in catalog.view.revisions(policy) if not record.retired_ms]


async def test_a_pass_goes_through_all_policies_and_keeps_what_is_in_use(catalog_lmdb: Catalog) -> None:
    catalog = catalog_lmdb
    names = [f"acme/p{number:03}" for number in range(205)]
    for name in names:
        for content in (b"one", b"two", b"three"):
            catalog.publish(name, name.encode() + content)
        catalog.run(SetRetention(policy=name, retention=Retention(1)))
    registrar = Registrar(catalog.ledger, publish=lambda event: None, batch_max=64)
    try:
        held = catalog.resolve(f"{names[7]}@2").digest
        answer = Answer()
        registrar.take(ReportInUse(gateway="g0", digests=(held,)), answer)
        assert isinstance(answer.came, Noted)
        pruner = Pruner(registrar.take, registrar.in_use.digests, every_s=1.0)
        assert await pruner.prune_all() == 2 * 205 - 1
        assert await pruner.prune_all() == 0
        assert live(catalog, names[7]) == [2, 3]
        assert {tuple(live(catalog, name)) for name in names if name != names[7]} == {(3,)}
        assert catalog.view.history(names[0])[-1].actor == ACTOR
    finally:
        await registrar.stop()
    assert await pruner.prune_all() == 0


async def test_a_report_that_makes_no_sense_is_refused(catalog_lmdb: Catalog) -> None:
    registrar = Registrar(catalog_lmdb.ledger, publish=lambda event: None, batch_max=64)
    try:
        for report in (
            ReportInUse(gateway="", digests=()), ReportInUse(gateway="g", digests=("x",)),
            ReportInUse(gateway="g", digests=(), part=2, parts=2), ReportInUse(gateway="g", digests=(), parts=1 << 30),
        ):  # fmt: skip
            answer = Answer()
            registrar.take(report, answer)
            assert isinstance(answer.came, Refusal)
            assert answer.came.outcome is Outcome.INVALID_REQUEST
    finally:
        await registrar.stop()


@pytest.mark.parametrize("silence_s", [10.0, 4000.0])
def test_the_last_report_of_each_gateway_counts_for_a_while(silence_s: float) -> None:
    now = 0.0
    in_use = InUse(now=lambda: now)
    in_use.note(ReportInUse(gateway="g0", digests=("a", "b")))
    in_use.note(ReportInUse(gateway="g1", digests=("b", "c")))
    assert in_use.digests() == ("a", "b", "c")
    in_use.note(ReportInUse(gateway="g0", digests=()))
    assert in_use.digests() == ("b", "c")
    now = silence_s
    assert in_use.digests() == (("b", "c") if silence_s < 3600 else ())


def test_what_is_in_use_is_known_while_a_gateway_hears_all_of_its_nodes() -> None:
    now = 0.0
    in_use = InUse(now=lambda: now)
    assert not in_use.known()
    in_use.note(ReportInUse(gateway="g0", digests=("a",), complete=False))
    assert (in_use.known(), in_use.digests()) == (False, ("a",))
    in_use.note(ReportInUse(gateway="g0", digests=("a",)))
    assert in_use.known()
    now = 200.0
    in_use.note(ReportInUse(gateway="g0", digests=("a",), complete=False))
    assert not in_use.known()


def test_a_report_in_parts_counts_once_it_is_whole() -> None:
    in_use = InUse()

    def note(part: int, *digests: str) -> None:
        in_use.note(ReportInUse(gateway="g0", digests=digests, part=part, parts=3))

    note(0, "a")
    note(1, "b")
    assert (in_use.known(), in_use.digests()) == (False, ())
    note(2, "c")
    assert (in_use.known(), in_use.digests()) == (True, ("a", "b", "c"))
    note(0, "d")
    note(2, "e")
    assert in_use.digests() == ("a", "b", "c")
    note(1, "e")
    note(2, "f")
    assert in_use.digests() == ("a", "b", "c")


async def test_nothing_is_retired_while_nobody_knows_what_is_in_use(catalog_lmdb: Catalog) -> None:
    for content in (b"one", b"two"):
        catalog_lmdb.publish(POLICY, content)
    catalog_lmdb.run(SetRetention(policy=POLICY, retention=Retention(1)))
    registrar = Registrar(catalog_lmdb.ledger, publish=lambda event: None, batch_max=64)
    try:
        assert await Pruner(registrar.take, lambda: None, every_s=1.0).prune_all() == 0
        assert live(catalog_lmdb, POLICY) == [1, 2]
    finally:
        await registrar.stop()


async def test_more_may_be_in_use_than_a_message_holds(catalog_lmdb: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("catalog.inputs.MAX_DIGESTS", 2)
    for content in (b"one", b"two"):
        catalog_lmdb.publish(POLICY, content)
    catalog_lmdb.run(SetRetention(policy=POLICY, retention=Retention(1)))
    held = (*(f"{number:064x}" for number in range(5)), catalog_lmdb.resolve(f"{POLICY}@1").digest)
    registrar = Registrar(catalog_lmdb.ledger, publish=lambda event: None, batch_max=64)
    try:
        assert await Pruner(registrar.take, lambda: held, every_s=1.0).prune_all() == 0
    finally:
        await registrar.stop()
    assert live(catalog_lmdb, POLICY) == [1, 2]
