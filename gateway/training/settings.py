"""What a training service is told when it starts."""

from __future__ import annotations

import msgspec

from backends.trainer import TrainerSettings
from catalog.artifacts import OWN_FOLDER, StoreLocation
from catalog.settings import CurveSettings


class TransferAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where revisions are offered while they are written, and where their chunks are asked for."""

    endpoint: str
    feed_endpoint: str


class TrainingTuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an operator may choose of a training service. Sizes in bytes, times in seconds.

    ``tenant`` is whose policies are trained by keys that reach all tenants. ``alpha`` is every adapter's. The
    unembedding is trained in none: with ``refuse_unembed`` a run that wants it, as SDKs do unless they are told
    otherwise, is refused; else it is made of the rest. ``tokenizer`` is what clients are told to load (the base's name
    where it is empty).

    A revision's event waits ``announce_wait_s`` at most for the nodes that pull it.

    A request for a result is answered after ``poll_s`` at the latest. An operation that waits for an earlier one which
    never came fails after ``gap_s``. Results are kept for ``keep_results_s``; the revision of a sampling session stays
    until its client finishes, or nothing was sampled for ``sampler_idle_s``. Beyond ``max_pending_bytes`` of operations
    and ``max_pending_samples`` clients are told to come again; ``samples_at_once`` are asked of the gateway.
    """

    tenant: str = "default"
    tokenizer: str = ""
    alpha: float = 32.0
    refuse_unembed: bool = False
    revision_dtype: str = "BF16"
    map_bytes: int = 1 << 38
    max_body_bytes: int = 64 << 20
    max_pending_bytes: int = 1 << 30
    max_pending_samples: int = 4096
    samples_at_once: int = 256
    sample_timeout_s: float = 600.0
    poll_s: float = 25.0
    gap_s: float = 300.0
    keep_results_s: float = 86400.0
    sampler_idle_s: float = 3600.0
    announce_wait_s: float = 0.5


class TrainingSettings(TrainingTuning, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``base`` is the catalog's name of the base that ``trainer`` has loaded.

    It listens on the socket file ``socket``, behind the gateway at ``gateway_url``, which it asks for samples with the
    key in ``key_file`` (none where the gateway is anonymous) and which lets one of them have ``max_choices`` sequences,
    ``max_generated_tokens`` in all of them, and ``max_logprobs`` alternatives told for each.
    ``state_dir`` holds its journal and its checkpoints. With a ``journal`` (a ``postgresql://`` address) the journal is
    there, under ``name``, which one process at a time has, and ``state_dir`` holds a copy of it.

    Revisions are offered to nodes at ``transfers`` while they are written. ``nodes`` and ``nodes_file`` are the
    fleet's, as gateways have them.
    """

    base: str
    trainer: TrainerSettings
    socket: str
    gateway_url: str
    key_file: str = ""
    anonymous: bool = False
    max_choices: int = 128
    max_generated_tokens: int = 1 << 18
    max_logprobs: int = 20
    catalog_dir: str
    store_dir: str
    store: StoreLocation = OWN_FOLDER
    registrar_endpoint: str
    transfers: tuple[TransferAddress, ...] = ()
    nodes: tuple[str, ...] = ()
    nodes_file: str = ""
    state_dir: str
    journal: str = ""
    name: str = ""
    log_dir: str
    curve: CurveSettings | None = None
