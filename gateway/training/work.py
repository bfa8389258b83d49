"""What clients ask for and what comes of it, as the journal keeps both: typed MessagePack."""

from __future__ import annotations

import enum

import msgspec
from blake3 import blake3

from wire.trainer import Adam, Batch, DatumOutput


class Ask(msgspec.Struct, frozen=True, tag=True, tag_field="t", omit_defaults=True, kw_only=True):
    """Base of what may be asked for."""


class CreateRun(Ask, frozen=True, kw_only=True):
    """A new adapter. ``seed`` None: any. ``policy`` is the name wanted for it in the catalog, or empty."""

    base: str
    rank: int
    seed: int | None = None
    attention: bool = True
    mlp: bool = True
    policy: str = ""


class ResumeRun(Ask, frozen=True, kw_only=True):
    """A new run that begins as the checkpoint ``path`` is, with ``optimizer`` also its moments."""

    path: str
    optimizer: bool
    policy: str = ""


class Train(Ask, frozen=True, kw_only=True):
    """Forward and backward, or ``forward_only``."""

    batch: Batch
    forward_only: bool = False


class Step(Ask, frozen=True, kw_only=True):
    adam: Adam


class Save(Ask, frozen=True, kw_only=True):
    """A checkpoint called ``name``, which expires after ``ttl_s`` (0: never)."""

    name: str
    ttl_s: int = 0
    overwrite: bool = False


class Load(Ask, frozen=True, kw_only=True):
    path: str
    optimizer: bool


class SaveForSampler(Ask, frozen=True, kw_only=True):
    """A revision: called ``name``, or sampled from in the sampling session ``sampler``.

    With ``follows`` that session samples from whatever the run has saved last in this way.
    """

    name: str = ""
    sampler: str = ""
    follows: bool = False
    ttl_s: int = 0


class Sample(Ask, frozen=True, kw_only=True):
    """``stop`` None keeps the model's own end, an empty tuple none at all; numbers are token ids.

    ``prompt_logprobs`` asks for those of the prompt's last ``last`` tokens (0: of all); ``topk_prompt`` and
    ``topk_sample`` for the likeliest alternatives of each token.
    """

    prompt: tuple[int, ...]
    count: int = 1
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str | int, ...] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    prompt_logprobs: bool = False
    last: int = 0
    topk_prompt: int = 0
    topk_sample: int = 0


class Refused(Ask, frozen=True, kw_only=True):
    """An operation that can't be: it has its place in the order, and fails when that comes."""

    message: str


class Category(enum.StrEnum):
    """Whose fault a failure is."""

    USER = "user"
    SERVER = "server"


class Result(msgspec.Struct, frozen=True, tag=True, tag_field="t", omit_defaults=True, kw_only=True):
    """Base of what may come of it."""


class Failed(Result, frozen=True, kw_only=True):
    error: str
    category: Category


class Created(Result, frozen=True, kw_only=True):
    model_id: str


class Trained(Result, frozen=True, kw_only=True):
    """``data`` in the order of the batch."""

    data: tuple[DatumOutput, ...]
    metrics: dict[str, float]


class Stepped(Result, frozen=True, kw_only=True):
    metrics: dict[str, float]


class Saved(Result, frozen=True, kw_only=True):
    path: str


class Loaded(Result, frozen=True, kw_only=True):
    path: str
    model_id: str


class SavedForSampler(Result, frozen=True, kw_only=True):
    """Either is empty."""

    path: str = ""
    sampler: str = ""


class Alternatives(msgspec.Struct, frozen=True):
    """Row by row the ``k`` likeliest tokens (int32 bytes) and their log-probabilities (float32 bytes)."""

    k: int
    tokens: bytes
    logprobs: bytes


class Sequence(msgspec.Struct, frozen=True):
    """``tokens`` as int32 and ``logprobs`` as float32 bytes; ``stopped``: by itself, not by its bound."""

    tokens: bytes
    logprobs: bytes
    stopped: bool
    topk: Alternatives | None = None


class Sampled(Result, frozen=True, kw_only=True):
    """``prompt_logprobs`` are float32 bytes, NaN where there is none (the first token's)."""

    sequences: tuple[Sequence, ...]
    prompt_logprobs: bytes = b""
    topk_prompt: Alternatives | None = None


TrainingAsk = CreateRun | ResumeRun | Train | Step | Save | Load | SaveForSampler | Refused
AnyAsk = TrainingAsk | Sample
AnyResult = Failed | Created | Trained | Stepped | Saved | Loaded | SavedForSampler | Sampled

_asks: msgspec.msgpack.Decoder[AnyAsk] = msgspec.msgpack.Decoder(AnyAsk)
_results: msgspec.msgpack.Decoder[AnyResult] = msgspec.msgpack.Decoder(AnyResult)
encode = msgspec.msgpack.Encoder().encode
decode_ask = _asks.decode
decode_result = _results.decode


def loaded_path(ask: AnyAsk) -> str:
    """The checkpoint that it is to load, or empty."""
    return ask.path if isinstance(ask, Load | ResumeRun) else ""


def fingerprint(encoded: bytes) -> bytes:
    """Tells an ask that is repeated from another one."""
    return blake3(encoded).digest(16)
