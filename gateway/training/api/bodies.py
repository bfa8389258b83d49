"""JSON bodies as SDKs send them. Fields that no operation here depends on are left out, and ignored."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web

from gateway.training.data import JsonInput, JsonTensor, ModelInput
from wire.outcomes import InvalidRequest, TooLarge

T = TypeVar("T")

# JSON knows numbers of any size: what is kept, and what engines take, has 64 bits
Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
# what clients count by
Ordinal = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class NewSession(msgspec.Struct, frozen=True):
    user_metadata: dict[str, Any] | None = None


class LoraConfig(msgspec.Struct, frozen=True):
    rank: Int64
    seed: Int64 | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(msgspec.Struct, frozen=True):
    type: str = "adamw"


class NewRun(msgspec.Struct, frozen=True):
    session_id: str
    model_seq_id: Ordinal
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: dict[str, Any] | None = None


class OfRun(msgspec.Struct, frozen=True):
    model_id: str


class Training(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: int
    forward_backward_input: JsonInput | None = None
    forward_input: JsonInput | None = None


class AdamParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One that is not known would be left out silently, and training would go another way than its client thinks."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: int
    adam_params: AdamParams | None = None


class SaveWeights(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False


class LoadWeights(msgspec.Struct, frozen=True):
    """Into a run (``model_id``, ``seq_id``), or as a new one (``session_id``, ``model_seq_id``)."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: Ordinal | None = None
    base_model: str | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: dict[str, Any] | None = None


class SaveForSampler(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: Ordinal | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None


class CheckpointTtl(msgspec.Struct, frozen=True):
    ttl_seconds: int | None


class WeightsInfo(msgspec.Struct, frozen=True):
    tinker_path: str


class NewSampler(msgspec.Struct, frozen=True):
    session_id: str
    sampling_session_seq_id: Ordinal
    base_model: str | None = None
    model_path: str | None = None


class SamplingParams(msgspec.Struct, frozen=True):
    max_tokens: Int64 | None = None
    seed: Int64 | None = None
    stop: str | list[str | Int64] | None = None
    temperature: float = 1.0
    top_k: Int64 = -1
    top_p: float = 1.0


class Sampling(msgspec.Struct, frozen=True):
    sampling_session_id: str
    seq_id: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: Int64 = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Int64 = 0
    topk_sample_logprobs: Int64 = 0
    target_prompt_logprobs: JsonTensor | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: Int64 | None = None


class Retrieve(msgspec.Struct, frozen=True):
    request_id: str


async def read_bytes(request: web.Request, most: int) -> bytes:
    """Raises TooLarge."""
    gathered = bytearray()
    async for chunk in request.content.iter_any():
        gathered += chunk
        if len(gathered) > most:
            raise TooLarge(f"the body is above {most} bytes", field="body")
    return bytes(gathered)


def decode(body: bytes, kind: type[T]) -> T:
    """The JSON body. Raises InvalidRequest that names the field."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), field="body") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", field="body") from None
