"""Inside SGLang's scheduler: a request's seed decides its tokens, as on vLLM.

SGLang heeds seeds only in its deterministic mode, which no attention on CPU has and which costs speed elsewhere; and
there it gives all requests without a seed the same one, and ends at the first ``min_p``. Only sampling in torch knows
seeds at all.
"""

from __future__ import annotations

import functools
import secrets
from typing import Any

import torch
from sglang.srt.layers import sampler
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from . import versions

# a seed is an int64 there; a client's may be any number
_BITS = 63

_stock_batch = SamplingBatchInfo.from_schedule_batch
_stock_sample = sampler.top_k_top_p_min_p_sampling_from_probs_torch


def patch() -> None:
    """Have batches carry their requests' seeds from now on, in this process. Raises UnsupportedSglang."""
    versions.check(versions.SEED_SEAMS)
    SamplingBatchInfo.from_schedule_batch = staticmethod(from_schedule_batch)
    sampler.top_k_top_p_min_p_sampling_from_probs_torch = sample


@functools.wraps(_stock_batch)
def from_schedule_batch(batch: Any, vocab_size: int) -> Any:
    """A request that has no seed gets one at random."""
    info = _stock_batch(batch, vocab_size)
    if get_exec().kernel.sampling_backend == "pytorch":
        info.sampling_seed = torch.tensor(
            [_seed_of(request.sampling_params.sampling_seed) for request in batch.reqs],
            dtype=torch.int64,
            device=batch.device,
        )
    return info


def _seed_of(asked: int | None) -> int:
    return secrets.randbits(_BITS) if asked is None else asked & ((1 << _BITS) - 1)


@functools.wraps(_stock_sample)
def sample(
    probs: torch.Tensor,
    top_ks: Any,
    top_ps: Any,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    *rest: Any,
    **named: Any,
) -> Any:
    """``min_p`` is applied here: what it leaves is the same before the other two as after them."""
    if need_min_p_sampling:
        least = probs.amax(dim=-1, keepdim=True) * min_ps.view(-1, 1)
        probs = probs.masked_fill(probs < least, 0.0)
    return _stock_sample(probs, top_ks, top_ps, min_ps, False, *rest, **named)
