from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from catalog.artifacts import registrar_store
from catalog.blobs import BlobStore
from catalog.bulk import Bookmark, Item, OfflineImporter, OnlineImporter, import_all, open_importer, read_lines
from catalog.replay import check_catalog
from catalog.settings import RegistrarSettings
from catalog.view import CatalogView
from tests.catalog.harness import BASE, Catalog, add_base, upload
from tests.catalog.processes import ROOT, RegistrarProcess
from wire.events import ArtifactFacts, Provenance
from wire.outcomes import ArtifactUnavailable, InvalidRequest, NotFound, Retired, RoostError, TooLarge, VersionConflict
from wire.registrar import Committed, ImportedRevision, ImportRevisions, RetirePolicy


def declared(number: int) -> ArtifactFacts:
    return ArtifactFacts(f"{number:064x}", 1000 + number, 8, ("q", "v"), "bf16", 4, 1024)


def imported(policy: str, number: int, revision: int = 0, base: str = BASE) -> ImportedRevision:
    return ImportedRevision(policy=policy, base=base, artifact=declared(number), revision=revision)


def import_of(*revisions: ImportedRevision, external: bool = True) -> ImportRevisions:
    return ImportRevisions(actor="importer", revisions=revisions, external=external)


class TestDeciding:
    def test_policies_are_created_and_revisions_published_in_order(self, catalog: Catalog) -> None:
        answer = catalog.run(import_of(*(imported("acme/a", n, n) for n in (1, 2, 3)), imported("acme/b", 1)))
        assert (answer.count, answer.changed) == (4, True)
        assert [row.artifact for row in catalog.view.revisions("acme/a")] == [declared(n) for n in (1, 2, 3)]
        assert (catalog.resolve("acme/a").revision, catalog.resolve("acme/b").digest) == (3, declared(1).digest)
        assert {event.actor for event in catalog.view.history("acme/a")} == {"importer"}

    def test_importing_again_changes_nothing(self, catalog: Catalog) -> None:
        command = import_of(*(imported("acme/a", n, n) for n in (1, 2, 3)), imported("acme/b", 1))
        catalog.run(command)
        position = catalog.view.position()
        again = catalog.run(command)
        assert (again.count, again.changed, catalog.view.position()) == (0, False, position)

    def test_without_numbers_the_latest_digest_is_not_published_twice(self, catalog: Catalog) -> None:
        answer = catalog.run(import_of(imported("acme/a", 1), imported("acme/a", 1), imported("acme/a", 2)))
        assert answer.count == 2

    @pytest.mark.parametrize(
        ("revision", "error", "message"),
        [
            (imported("acme/a", 9, 1), VersionConflict, "acme/a: revision 1 has digest 0"),
            (imported("acme/a", 2, 3), VersionConflict, "acme/a: revision 3 can't follow revision 1"),
            (imported("acme/a", 2, base="other"), VersionConflict, "acme/a: .*base"),
            (imported("acme/b", 2, base="other"), NotFound, "acme/b: there is no base other"),
            (imported("acme/old", 2), Retired, "acme/old: .*retired"),
            (imported("Acme", 2), InvalidRequest, "Acme: .*not a policy name"),
        ],
    )
    def test_a_refusal_names_the_policy_and_leaves_nothing(
        self, catalog: Catalog, revision: ImportedRevision, error: type[RoostError], message: str
    ) -> None:
        catalog.run(import_of(imported("acme/a", 1), imported("acme/old", 1)))
        catalog.run(RetirePolicy(policy="acme/old"))
        position = catalog.view.position()
        with pytest.raises(error, match=message):
            catalog.run(import_of(imported("acme/new", 5), revision))
        assert catalog.view.position() == position
        assert catalog.view.policy("acme/new") is None

    def test_artifacts_must_be_in_the_store_unless_they_are_external(self, catalog: Catalog) -> None:
        with pytest.raises(ArtifactUnavailable, match="upload it first"):
            catalog.run(import_of(imported("acme/a", 1), external=False))
        stored = upload(catalog.store, b"stored")
        revision = ImportedRevision(policy="acme/a", base=BASE, artifact=stored)
        assert catalog.run(import_of(revision, external=False)).count == 1

    def test_one_digest_has_one_set_of_facts(self, catalog: Catalog) -> None:
        catalog.run(import_of(imported("acme/a", 1)))
        other = msgspec.structs.replace(declared(1), rank=16)
        with pytest.raises(InvalidRequest, match="with other facts"):
            catalog.run(import_of(ImportedRevision(policy="acme/b", base=BASE, artifact=other)))

    @pytest.mark.parametrize("count", [0, 2001])
    def test_the_number_of_revisions_is_bounded(self, catalog: Catalog, count: int) -> None:
        with pytest.raises(InvalidRequest, match=f"{count} revisions"):
            catalog.run(import_of(*[imported("acme/a", 1)] * count))


class TestReading:
    def never(self, digest: str) -> ArtifactFacts:
        raise AssertionError(digest)

    def test_lines_are_revisions_and_say_where_to_go_on(self) -> None:
        facts = msgspec.to_builtins(declared(1))
        first = {"policy": "acme/a", "base": "tiny", "artifact": facts, "revision": 1, "provenance": {"note": "n"}}
        second = {"policy": "acme/b", "base": "tiny", "artifact": "d" * 64}
        text = msgspec.json.encode(first) + b"\n\n" + msgspec.json.encode(second) + b"\n"
        file = io.BytesIO(text)
        one, two = read_lines(file, lambda digest: declared(2))
        assert one.revision == ImportedRevision(
            policy="acme/a", base="tiny", artifact=declared(1), revision=1, provenance=Provenance(note="n")
        )
        assert (two.revision.artifact, two.revision.revision) == (declared(2), 0)
        file.seek(int(one.resume_at))
        (rest,) = read_lines(file, lambda digest: declared(2))
        assert rest == two

    @pytest.mark.parametrize("line", [b"no json\n", b'{"policy": "acme/a"}\n', b'{"policy": "a/a", "extra": 1}\n'])
    def test_a_bad_line_is_named_by_its_place(self, line: bytes) -> None:
        with pytest.raises(InvalidRequest, match=r"^line 3 is no revision"):
            list(read_lines(io.BytesIO(b"\n\n" + line), self.never))

    @pytest.mark.parametrize(
        ("fields", "told"),
        [
            ({"artifact": {"size": 1 << 64}}, "^line 2: size is 18446744073709551616"),
            ({"artifact": {"rank": -1}}, "^line 2: rank is -1"),
            ({"provenance": {"step": 1 << 64}}, "^line 2: step is"),
            ({"revision": 1 << 64}, "^line 2 is no revision"),
        ],
    )
    def test_a_number_out_of_bounds_is_named_by_its_line(self, fields: dict[str, Any], told: str) -> None:
        line = {"policy": "acme/a", "base": "tiny", **fields}
        line["artifact"] = {**msgspec.to_builtins(declared(1)), **fields.get("artifact", {})}
        file = io.BytesIO(b"\n" + json.dumps(line).encode())
        file.seek(1)
        with pytest.raises(InvalidRequest, match=told):
            list(read_lines(file, self.never))

    def test_a_line_is_bounded(self) -> None:
        with pytest.raises(TooLarge, match=r"^line 1 has over 65536 bytes"):
            list(read_lines(io.BytesIO(b'{"policy": "' + b"x" * (1 << 17)), self.never))


class TestBookmark:
    def test_it_is_of_one_source(self, tmp_path: Path) -> None:
        file = tmp_path / "mark"
        bookmark = Bookmark(file, "one")
        assert bookmark.read() == ""
        bookmark.write("17")
        assert Bookmark(file, "one").read() == "17"
        assert Bookmark(file, "another").read() == ""
        bookmark.remove()
        assert (bookmark.read(), list(tmp_path.iterdir())) == ("", [])

    def test_another_file_is_not_taken_for_one(self, tmp_path: Path) -> None:
        (tmp_path / "mark").write_text("{}")
        with pytest.raises(InvalidRequest, match="no bookmark"):
            Bookmark(tmp_path / "mark", "one").read()


LINES = 5000


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    file = tmp_path / "lines.jsonl"
    with file.open("wb") as out:
        for number in range(LINES):
            line = {"policy": f"acme/p{number // 2}", "base": BASE, "artifact": declared(number + 1)}
            out.write(msgspec.json.encode({**line, "revision": number % 2 + 1}) + b"\n")
    return file


@pytest.fixture
def registrar(tmp_path: Path) -> Iterator[RegistrarProcess]:
    process = RegistrarProcess(tmp_path)
    yield process
    process.close()


async def run_import(settings: RegistrarSettings, lines: Path) -> tuple[type, int, int, list[str]]:
    places: list[str] = []
    async with open_importer(settings, registrar_store(Path(settings.store_dir))) as importer:
        with lines.open("rb") as file:
            items = read_lines(file, TestReading().never)
            totals = await import_all(
                items, importer, actor="me", external=True, done=lambda count, place: places.append(place)
            )
    return type(importer), totals.seen, totals.published, places


async def test_an_import_goes_through_the_registrar_and_without_one_into_the_catalog(
    registrar: RegistrarProcess, lines: Path
) -> None:
    registrar.start()
    with closing(registrar.client()) as client:
        await client.run(add_base())
    settings = msgspec.json.decode(registrar.settings_file.read_bytes(), type=RegistrarSettings)
    kind, seen, published, places = await run_import(settings, lines)
    assert (kind, seen, published) == (OnlineImporter, LINES, LINES)
    assert places == sorted(places, key=int)
    assert len(places) == 3
    registrar.terminate()
    assert (await run_import(settings, lines))[:3] == (OfflineImporter, LINES, 0)
    assert check_catalog(registrar.catalog_dir).differences == ()


def roost(state: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ops.cli", "--state-dir", str(state), "catalog", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)


def test_an_import_that_was_killed_goes_on_where_it_was(tmp_path: Path, lines: Path) -> None:
    catalog = Catalog(tmp_path / "state")
    catalog.run(add_base())
    catalog.close()
    bookmark = lines.with_name("lines.jsonl.roost-import")
    first = roost(tmp_path / "state", "import", str(lines), "--external")
    while not bookmark.exists():
        assert first.poll() is None
        time.sleep(0.001)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = roost(tmp_path / "state", "import", str(lines), "--external", "--json")
    totals = msgspec.json.decode(second.communicate()[0])
    assert second.returncode == 0
    assert totals["seen"] < LINES
    assert not bookmark.exists()
    with closing(CatalogView.open(tmp_path / "state" / "catalog")) as view:
        assert view.position() == 1 + LINES // 2 + LINES
    assert check_catalog(tmp_path / "state" / "catalog").differences == ()


def test_a_catalog_goes_through_all_commands_of_an_operator(tmp_path: Path) -> None:
    state = tmp_path / "state"
    catalog = Catalog(state)
    catalog.run(add_base())
    for number in range(4):
        catalog.publish("acme/support", b"revision %d" % number)
    catalog.close()

    def run(*words: str, code: int = 0) -> dict[str, object]:
        process = roost(state, *words, "--json")
        out = process.communicate()[0]
        assert process.returncode == code, words
        return msgspec.json.decode(out) if out else {}  # type: ignore[no-any-return]

    assert run("export", str(tmp_path / "export"))["events"] == 6
    assert run("compact") == {"position": 6, "removed": 5}
    assert run("stats")["first_event"] == 6
    assert run("snapshot", str(tmp_path / "snapshot"))["position"] == 6
    for source in ("export", "snapshot"):
        assert run("restore", str(tmp_path / source), "--into", str(tmp_path / f"from-{source}"))["position"] == 6
    run("restore", str(tmp_path / "snapshot"), code=2)
    assert run("check")["artifacts"] == {
        "artifacts": 4, "verified": 4, "failed": 0, "missing": 0, "problems": [],
    }  # fmt: skip
    blob = BlobStore(state / "store").path(upload(BlobStore(state / "store"), b"revision 2").digest)
    blob.chmod(0o600)
    blob.write_bytes(b"revision X")
    damaged = run("check", code=1)["artifacts"]
    assert isinstance(damaged, dict)
    assert damaged["failed"] == 1
    assert "is corrupt" in damaged["problems"][0]


async def test_what_a_slow_source_gave_so_far_is_imported_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog(tmp_path)
    catalog.run(add_base())
    monkeypatch.setattr("catalog.bulk._LONGEST_BATCH_S", 0.0)
    seen: list[int] = []

    class Straight:
        async def run(self, command: ImportRevisions) -> Committed:
            return catalog.run(command)

    def slow() -> Iterator[Item]:
        for number in range(3):
            seen.append(catalog.view.position())
            yield Item(imported("acme/a", number), str(number))

    told: list[str] = []
    totals = await import_all(
        slow(), Straight(), actor="importer", external=True, done=lambda count, at: told.append(at)
    )
    assert (totals.published, told) == (3, ["0", "1", "2"])
    assert seen == sorted(set(seen))
    catalog.close()
