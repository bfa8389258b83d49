"""How large a catalog is, and what of."""

from __future__ import annotations

import msgspec

from .compaction import first_event
from .environment import DATA_FILE, Environment
from .layout import LAYOUT_VERSION
from .snapshot import Snapshot


class TableStats(msgspec.Struct, frozen=True):
    """Rows, and bytes of the pages that hold them."""

    rows: int
    bytes: int


class CatalogStats(msgspec.Struct, frozen=True):
    """``first_event`` is the oldest one in the journal; ``free_bytes`` of the file wait to be written again."""

    layout: int
    position: int
    first_event: int
    file_bytes: int
    free_bytes: int
    map_bytes: int
    tables: dict[str, TableStats]


def stats(environment: Environment) -> CatalogStats:
    """As of now; the registrar may run meanwhile."""
    tables = {}
    with environment.begin() as txn:
        position = Snapshot(txn, environment.tables).position()
        for name, table in environment.tables.named().items():
            found = txn.stat(table.handle)
            pages = found["branch_pages"] + found["leaf_pages"] + found["overflow_pages"]
            tables[name] = TableStats(found["entries"], pages * found["psize"])
    file_bytes = (environment.path / DATA_FILE).stat().st_size
    used = sum(table.bytes for table in tables.values())
    return CatalogStats(
        layout=LAYOUT_VERSION, position=position, first_event=first_event(environment), file_bytes=file_bytes,
        free_bytes=max(file_bytes - used, 0), map_bytes=environment.map_bytes, tables=tables,
    )  # fmt: skip
