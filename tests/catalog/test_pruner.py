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
        for report in (ReportInUse(gateway="", digests=()), ReportInUse(gateway="g", digests=("x",))):
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
