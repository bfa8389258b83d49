"""What a training service is told when it starts."""

from __future__ import annotations

import msgspec

from backends.trainer import TrainerSettings
from catalog.artifacts import OWN_FOLDER, StoreLocation
from catalog.settings import CurveSettings


class TrainingTuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an operator may choose of a training service. Sizes in bytes, times in seconds.

    ``tenant`` is whose policies are trained by keys that reach all tenants. ``alpha`` is every adapter's.
    ``tokenizer`` is what clients are told to load (the base's name where it is empty).

    A request for a result is answered after ``poll_s`` at the latest. An operation that waits for an earlier one which
    never came fails after ``gap_s``. Results are kept for ``keep_results_s``. Beyond ``max_pending_bytes`` of
    operations and ``max_pending_samples`` clients are told to come again; ``samples_at_once`` are asked of the gateway.
    """

    tenant: str = "default"
    tokenizer: str = ""
    alpha: float = 32.0
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


class TrainingSettings(TrainingTuning, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``base`` is the catalog's name of the base that ``trainer`` has loaded.

    It listens on the socket file ``socket``, behind the gateway at ``gateway_url``, which it asks for samples with the
    key in ``key_file`` (none where the gateway is anonymous) and which lets one of them have ``max_generated_tokens``.
    ``state_dir`` holds its journal and its checkpoints.
    """

    base: str
    trainer: TrainerSettings
    socket: str
    gateway_url: str
    key_file: str = ""
    anonymous: bool = False
    max_generated_tokens: int = 1 << 18
    catalog_dir: str
    store_dir: str
    store: StoreLocation = OWN_FOLDER
    registrar_endpoint: str
    state_dir: str
    log_dir: str
    curve: CurveSettings | None = None
