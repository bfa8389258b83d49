from __future__ import annotations

import lzma
from contextlib import closing
from pathlib import Path

import pytest

from catalog.environment import Environment
from catalog.layout import LAYOUT_KEY
from catalog.migrations import migrate, open_to_write
from catalog.names import parse_reference
from catalog.replay import check_catalog
from catalog.view import CatalogView
from tests.catalog.processes import RegistrarProcess
from wire.events import ChannelRemoved, PolicyCreated, Provenance, Scope
from wire.outcomes import JournalUnavailable, Retired
from wire.registrar import CreatePolicy

# a catalog as release 0.1.0 wrote it
LAYOUT_1 = Path(__file__).parent / "data" / "layout-1.mdb.xz"
MAP_BYTES = 1 << 26


def put_layout_1(catalog_dir: Path) -> Path:
    catalog_dir.mkdir(parents=True)
    (catalog_dir / "data.mdb").write_bytes(lzma.decompress(LAYOUT_1.read_bytes()))
    return catalog_dir


@pytest.fixture
def former(tmp_path: Path) -> Path:
    return put_layout_1(tmp_path / "catalog")


def test_readers_refuse_a_catalog_that_the_registrar_has_not_migrated(former: Path) -> None:
    with pytest.raises(JournalUnavailable, match="layout '1', and this release reads 2"):
        CatalogView.open(former)


def test_everything_that_layout_1_held_is_there_after_migrating(former: Path) -> None:
    assert migrate(former) == 1
    view = CatalogView.open(former)
    assert view.position() == 20
    assert [base.name for base in view.bases()] == ["other", "tiny"]
    moved = view.base("tiny")
    assert moved is not None
    assert (moved.path, moved.fingerprint) == ("/moved/tiny", "b" * 64)
    assert [record.policy for record in view.policies()] == ["acme/empty", "acme/old", "acme/support", "zeta/copy"]
    support = view.resolve(parse_reference("acme/support"))
    assert (support.revision, support.rank, support.targets, support.base_fingerprint) == (2, 8, ("q", "v"), "b" * 64)
    assert view.resolve(parse_reference("acme/support:latest")).revision == 3
    arms = {view.resolve(parse_reference("acme/support:canary"), selector=b"%d" % n).revision for n in range(200)}
    assert arms == {1, 2}
    copy = view.revision("zeta/copy", 1)
    assert copy is not None
    assert (copy.provenance, copy.actor) == (Provenance("here", "peft", "run", 7, "a note"), "k1")
    assert copy.artifact.digest == view.resolve(parse_reference("acme/support@1")).digest
    with pytest.raises(Retired):
        view.resolve(parse_reference("acme/old"))
    history = [type(event.body) for event in view.history("acme/support")]
    assert (len(history), history[0], ChannelRemoved in history) == (8, PolicyCreated, True)
    keys = {key.key_id: (key.revoked, key.scopes) for key in view.keys().keys}
    assert keys == {"k1": (True, (Scope.INVOKE, Scope.PUBLISH)), "k2": (False, (Scope.ADMIN,))}
    view.close()
    assert check_catalog(former).differences == ()


def test_the_former_file_is_kept_and_a_second_start_has_nothing_to_do(former: Path) -> None:
    before = (former / "data.mdb").read_bytes()
    migrate(former)
    assert (former / "data.layout-1.mdb").read_bytes() == before
    assert migrate(former) is None
    assert sorted(path.name for path in former.iterdir()) == ["data.layout-1.mdb", "data.mdb", "lock.mdb"]


def test_what_a_killed_migration_left_is_not_in_the_way(former: Path) -> None:
    (former / "migrating").mkdir()
    (former / "migrating" / "data.mdb").write_bytes(b"half a file")
    assert migrate(former) == 1
    assert check_catalog(former).events == 20


def test_data_that_outgrew_the_map_are_migrated(former: Path) -> None:
    small = 1 << 15
    with closing(open_to_write(former, small)) as environment:
        assert environment.map_bytes > small
    assert check_catalog(former).events == 20


def test_nothing_is_migrated_where_there_is_nothing_or_something_newer(tmp_path: Path) -> None:
    assert migrate(tmp_path) is None
    environment = Environment.create(tmp_path / "catalog", map_bytes=MAP_BYTES)
    with environment.begin(write=True) as txn:
        txn.put(LAYOUT_KEY, b"99", db=environment.meta)
    environment.close()
    assert migrate(tmp_path / "catalog") is None


async def test_a_registrar_migrates_when_it_starts_and_goes_on_from_there(tmp_path: Path) -> None:
    put_layout_1(tmp_path / "catalog")
    registrar = RegistrarProcess(tmp_path)
    registrar.start()
    try:
        assert "migrated 20 events; the former file is data.layout-1.mdb" in registrar.logged()
        client = registrar.client()
        answer = await client.run(CreatePolicy(policy="acme/new", base="tiny"))
        assert (answer.seq, answer.changed) == (21, True)
        client.close()
    finally:
        registrar.close()
