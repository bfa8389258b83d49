"""What an operator says of the journal, and what is found at its address."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from catalog.postgres.address import shown
from catalog.postgres.examine import examine
from loadtest.postgres import PostgresServer
from ops.cli.doctor import Grade, check_journal
from ops.config import RegistrarConfig, RoostConfig, check
from ops.deployment import derive
from ops.layout import Layout
from tests.catalog.harness import add_base
from tests.catalog.postgres.harness import PostgresCatalog
from wire.outcomes import InvalidRequest, JournalUnavailable

URL = "postgresql://roost@db.internal:5432/fleet"


def test_the_registrar_is_told_where_the_journal_is(tmp_path: Path) -> None:
    config = check({"registrar": {"journal": URL, "view_wait_s": 0.5}})
    settings = derive(config, Layout(tmp_path), {}).registrar
    assert (settings.journal, settings.view_wait_s) == (URL, 0.5)
    assert derive(RoostConfig(), Layout(tmp_path), {}).registrar.journal == ""


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("postgresql://roost:secret@db/fleet", "leave the password out"),
        ("postgresql://db/fleet?password=secret", "leave the password out"),
        ("postgresql://db/fleet?sslmode=verify-full&sslpassword=secret", "leave the password out"),
        ("mysql://db/fleet", "expected postgresql://"),
        ("/var/run/postgresql", "expected postgresql://"),
    ],
)
def test_an_address_that_is_none_or_holds_a_secret_is_refused(url: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        check({"registrar": {"journal": url}})
    assert caught.value.field == "registrar.journal"
    assert "secret" not in caught.value.message


def test_a_look_makes_nothing_and_tells_what_is_there(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.database()
    assert "no journal yet" in asyncio.run(examine(url))
    assert "no journal yet" in asyncio.run(examine(url))
    catalog = PostgresCatalog(tmp_path, url)
    catalog.run(add_base())
    catalog.close()
    assert asyncio.run(examine(url)).endswith("1 events")
    postgres.query("UPDATE roost.version SET layout = layout + 1", url=url)
    with pytest.raises(JournalUnavailable, match="this release writes"):
        asyncio.run(examine(url))


def test_the_doctor_tries_the_journal(postgres: PostgresServer, tmp_path: Path) -> None:
    def found(url: str) -> Grade:
        return check_journal(RoostConfig(registrar=RegistrarConfig(journal=url)), Layout(tmp_path)).grade

    assert found("") is Grade.OK
    assert found(postgres.database()) is Grade.OK
    assert found(f"postgresql://roost@/catalog?host={tmp_path}") is Grade.FAIL
    assert found(postgres.address("nowhere")) is Grade.FAIL


def test_an_address_is_shown_without_its_options() -> None:
    assert shown(URL + "?sslmode=verify-full") == URL
