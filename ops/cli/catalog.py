"""``roost catalog``: the catalog of this host as a whole: importing, exporting, checking, compacting."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import typer

from catalog import compaction, stream
from catalog.artifact_check import check_artifacts
from catalog.artifacts import open_store, registrar_store
from catalog.backup import backup
from catalog.bulk import Bookmark, Item, Totals, import_all, open_importer, read_lines
from catalog.durable import create_private, fsync_folder
from catalog.environment import Environment
from catalog.exclusive import ExclusiveFolder
from catalog.migrations import open_to_write
from catalog.replay import check_environment
from catalog.settings import RegistrarSettings
from catalog.stats import stats
from catalog.view import CatalogView
from packer.revision import RevisionFile
from packer.shape import BaseShape
from wire.events import ArtifactFacts
from wire.outcomes import InvalidRequest, NotFound, RoostError

from ..layout import Layout
from .adapters import adapter_folders, read_folder, without_adapter
from .output import size_of, tell, tell_json, tell_table
from .progress import byte_progress, count_progress
from .session import AsJson, session

app = typer.Typer(help="The catalog of this host as a whole.", no_args_is_help=True)

BOOKMARK_SUFFIX = ".roost-import"
_MAP_BYTES = 1 << 34
_PROBLEMS_SHOWN = 20

Target = Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")]
Restart = Annotated[bool, typer.Option(help="For a file: from the beginning, whatever an earlier import has done.")]


@app.command("import")
def import_(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(help="JSON lines, one revision a line; or a folder of PEFT folders.")],
    base: Annotated[str, typer.Option(help="For a folder: the base that the adapters are for.")] = "",
    tenant: Annotated[str, typer.Option(help="For a folder: the tenant of the policies, named as the folders.")] = "",
    external: Annotated[bool, typer.Option(help="Take artifacts as declared: the store may get them later.")] = False,
    restart: Restart = False,
    as_json: AsJson = False,
) -> None:
    """Import revisions in bulk; run again after an interruption, it goes on where it was.

    A file is read on from where it was. Folders are looked at again, for they may have changed: what they hold is known
    by its content, and only what is new is stored and published.

    A line is {"policy", "base", "artifact", "revision", "provenance"}; "artifact" holds the facts, or the digest of an
    artifact in the store. Goes through the registrar while that runs, else into the catalog itself.
    """
    settings = _settings(session(context).layout())
    if source.is_dir():
        totals = _import_folder(settings, source, tenant, base)
        totals.skipped = without_adapter(source)
    else:
        totals = _import_file(settings, source, external, restart)
    if as_json:
        tell_json(msgspec.to_builtins(totals))
    else:
        tell(f"Imported {totals.published:,} revisions; {totals.seen - totals.published:,} were there already.")
        if totals.skipped:
            tell(f"{totals.skipped:,} folders hold no adapter and were left out.")


@app.command("export")
def export(context: typer.Context, file: Target, as_json: AsJson = False) -> None:
    """Write everything there is, with its history, as one stream of MessagePack."""
    folder = session(context).layout().catalog
    with (
        _environment(folder) as environment, compaction.opened_base(environment) as behind, _written(file) as out,
        count_progress("Exporting") as progress,
    ):  # fmt: skip
        found = stream.write_export(environment, out, behind=behind, progress=progress)
    _tell_stream("Exported", found, file, as_json)


@app.command("snapshot")
def snapshot(context: typer.Context, file: Target, as_json: AsJson = False) -> None:
    """Write the catalog as it is now, without its history, as one stream of MessagePack."""
    folder = session(context).layout().catalog
    with _environment(folder) as environment, _written(file) as out, count_progress("Writing") as progress:
        found = stream.write_snapshot(environment, out, progress)
    _tell_stream("Written", found, file, as_json)


@app.command("restore")
def restore(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A snapshot or an export.")],
    into: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="A fresh folder.  [default: that of this mesh]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a catalog of a snapshot or an export: of all of it, or nothing."""
    folder = into if into is not None else session(context).layout().catalog
    with _read(file) as source, count_progress("Restoring") as progress, ExclusiveFolder(folder):
        found = stream.restore(source, folder, progress)
    _tell_stream("Restored", found, folder, as_json)


@app.command("backup")
def back_up(
    context: typer.Context, folder: Annotated[Path, typer.Argument(help="A folder that is empty or to be made.")]
) -> None:
    """Copy the catalog while it is in use: a catalog that can be opened as it is."""
    with _environment(session(context).layout().catalog) as environment:
        backup(environment, folder)
    tell("Copied to ", (str(folder), "bold"))


@app.command("check")
def check(
    context: typer.Context,
    sample: Annotated[float, typer.Option(min=0, max=1, help="The share of the artifacts whose bytes are read.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Replay the journal and compare; look for every artifact and read it. Exit status 1 where something is wrong."""
    settings = _settings(session(context).layout())
    store = open_store(Path(settings.store_dir), settings.store)
    with _environment(Path(settings.catalog_dir)) as environment:
        replay = check_environment(environment)
        with count_progress("Artifacts") as progress:
            artifacts = check_artifacts(
                environment, store, sample=sample, most=None if as_json else _PROBLEMS_SHOWN,
                progress=lambda done, _: progress(done),
            )  # fmt: skip
    problems = (*replay.differences, *artifacts.problems)
    if as_json:
        tell_json({"replay": msgspec.to_builtins(replay), "artifacts": msgspec.to_builtins(artifacts)})
    else:
        for problem in problems:
            tell((problem, "red"))
        tell(f"{replay.events:,} events make the view's {replay.rows:,} rows: {len(replay.differences)} differences.")
        tell(
            f"{artifacts.artifacts:,} artifacts, {artifacts.verified:,} of them read: "
            f"{artifacts.failed - artifacts.missing:,} are damaged and {artifacts.missing:,} are not in the store."
        )
        if artifacts.failed > len(artifacts.problems):
            tell(f"{len(artifacts.problems)} of these {artifacts.failed:,} shown: --json lists all.")
        if artifacts.missing:
            tell("What an import with --external declared is not in the store until it is brought there.")
    if problems:
        raise typer.Exit(1)


@app.command("compact")
def compact(context: typer.Context, as_json: AsJson = False) -> None:
    """Let a snapshot stand for the journal so far, and free its room. The mesh must be down."""
    folder = session(context).layout().catalog
    _must_be_there(folder)
    with (
        ExclusiveFolder(folder),
        contextlib.closing(open_to_write(folder, _MAP_BYTES)) as environment,
        count_progress("Compacting") as progress,
    ):
        found = compaction.compact(environment, progress)
    if as_json:
        tell_json(msgspec.to_builtins(found))
    else:
        tell(f"A snapshot at event {found.position:,} stands for {found.removed:,} events.")


@app.command("stats")
def show_stats(context: typer.Context, as_json: AsJson = False) -> None:
    """How large the catalog is, and what of."""
    with _environment(session(context).layout().catalog) as environment:
        found = stats(environment)
    if as_json:
        tell_json(msgspec.to_builtins(found))
        return
    tell(
        f"Layout {found.layout}, at event {found.position:,}; {size_of(found.file_bytes)}, "
        f"{size_of(found.free_bytes)} of it free; the journal begins at event {found.first_event:,}."
    )
    rows = [(name, f"{table.rows:,}", size_of(table.bytes)) for name, table in found.tables.items()]
    tell_table(("TABLE", "ROWS", "SIZE"), rows, empty="No table.")


def _import_file(settings: RegistrarSettings, source: Path, external: bool, restart: bool) -> Totals:
    store = open_store(Path(settings.store_dir), settings.store)

    def facts_of(digest: str) -> ArtifactFacts:
        with store.as_file(digest) as file:
            return RevisionFile.open(file).facts()

    with _read(source) as file:
        found = os.fstat(file.fileno())
        identity = f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"
        bookmark = Bookmark(source.with_name(source.name + BOOKMARK_SUFFIX), identity)
        begin_at = 0 if restart else int(bookmark.read() or 0)
        file.seek(begin_at)
        with byte_progress("Importing") as progress:

            def done(count: int, resume_at: str) -> None:
                bookmark.write(resume_at)
                progress(int(resume_at), found.st_size)

            totals = _run(settings, read_lines(file, facts_of), external=external, done=done)
        bookmark.remove()
        return totals


def _import_folder(settings: RegistrarSettings, source: Path, tenant: str, base: str) -> Totals:
    if not tenant or not base:
        raise InvalidRequest("a folder of adapters needs --tenant and --base", field="tenant" if base else "base")
    with contextlib.closing(CatalogView.open(Path(settings.catalog_dir))) as view:
        known = view.base(base)
    if known is None:
        raise NotFound(f"there is no base {base}: add it first", field="base")
    folders = adapter_folders(source)
    store = open_store(Path(settings.store_dir), settings.store)
    items = read_folder(folders, tenant, base, BaseShape.from_config(known.config), store)
    with count_progress("Packing and importing", len(folders)) as progress:
        imported = 0

        def done(count: int, resume_at: str) -> None:
            nonlocal imported
            imported += count
            progress(imported)

        return _run(settings, items, external=False, done=done)


def _run(
    settings: RegistrarSettings,
    items: Iterable[Item],
    *,
    external: bool,
    done: Callable[[int, str], None],
) -> Totals:
    async def run() -> Totals:
        store = registrar_store(Path(settings.store_dir), settings.store)
        async with open_importer(settings, store) as importer:
            return await import_all(items, importer, actor=getpass.getuser(), external=external, done=done)

    return asyncio.run(run())


def _settings(layout: Layout) -> RegistrarSettings:
    """As this mesh's registrar was started; without one, those of a registrar over the state folder."""
    file = layout.settings_file("registrar")
    try:
        return msgspec.json.decode(file.read_bytes(), type=RegistrarSettings)
    except FileNotFoundError:
        return RegistrarSettings(
            catalog_dir=str(layout.catalog), store_dir=str(layout.store), endpoint=layout.socket("registrar"),
            feed_endpoint=layout.socket("registrar-feed"), map_bytes=_MAP_BYTES,
        )  # fmt: skip
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{file} is not the settings of a registrar: {error}") from None


@contextlib.contextmanager
def _environment(catalog_dir: Path) -> Iterator[Environment]:
    with contextlib.closing(Environment.open(catalog_dir)) as environment:
        yield environment


def _must_be_there(catalog_dir: Path) -> None:
    with _environment(catalog_dir):
        pass


@contextlib.contextmanager
def _written(file: Path) -> Iterator[BinaryIO]:
    """A file that is there whole, durable and its owner's alone, or not at all."""
    part = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with create_private(part) as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        part.replace(file)
        fsync_folder(file.absolute().parent)
    except OSError as error:
        if isinstance(error, RoostError):
            raise
        raise InvalidRequest(f"{file} can't be written: {error.strerror}", field="file") from None
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _read(file: Path) -> Iterator[BinaryIO]:
    try:
        opened = file.open("rb")
    except OSError as error:
        raise InvalidRequest(f"{file} can't be read: {error.strerror}", field="file") from None
    with opened:
        yield opened


def _tell_stream(done: str, found: stream.Summary, where: Path, as_json: bool) -> None:
    if as_json:
        tell_json(msgspec.to_builtins(found))
    else:
        tell(f"{done} {found.rows:,} rows and {found.events:,} events, to event {found.position:,}: ", str(where))
