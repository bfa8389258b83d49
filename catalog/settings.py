"""What the registrar process is told when it starts."""

from __future__ import annotations

import msgspec

from wire.curve import CurveKeys

from .artifacts import OWN_FOLDER, StoreLocation

CurveSettings = CurveKeys


class RegistrarTuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an operator may choose of a registrar. Sizes in bytes, times in seconds.

    ``journal`` is empty for a journal in LMDB, which then is the catalog of one host; or a ``postgresql://`` address
    without a password, which libpq's own means supply (PGPASSWORD, PGPASSFILE, ``~/.pgpass``). A commit there is
    acknowledged when this host's view has it, or after ``view_wait_s`` seconds.
    """

    map_bytes: int = 1 << 34
    batch_max: int = 512
    journal: str = ""
    view_wait_s: float = 1.0


class RegistrarSettings(RegistrarTuning, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``catalog_dir`` holds LMDB, ``store_dir`` the artifacts unless ``store`` says where. Endpoints are ZeroMQ's:
    ``ipc://`` or ``tcp://``.

    What retention does not keep is looked for every ``prune_every_s`` seconds, and retired while a gateway says what
    all of its nodes hold; ``prune_unreported`` is for a catalog without gateways, where nobody says so.
    """

    catalog_dir: str
    store_dir: str
    endpoint: str
    feed_endpoint: str
    prune_every_s: float = 300.0
    prune_unreported: bool = False
    store: StoreLocation = OWN_FOLDER
    curve: CurveSettings | None = None
