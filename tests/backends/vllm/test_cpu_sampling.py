"""A token that is dropped leaves its request's generator as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from backends.vllm import cpu_sampling, versions

SEEDS = (3, 4)


class Runner:
    """As vLLM's: it samples for all, drops what its mask says, and winds those generators back."""

    def __init__(self) -> None:
        generators = {place: torch.Generator().manual_seed(seed) for place, seed in enumerate(SEEDS)}
        self.input_batch = SimpleNamespace(generators=generators, num_reqs=3)
        self.discard_request_mask = SimpleNamespace(np=np.zeros(8, dtype=bool))

    def sample(self) -> list[float]:
        return [float(torch.rand(1, generator=each)) for each in self.input_batch.generators.values()]

    def bookkeep(self) -> None:
        for place in np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]:
            generator: Any = self.input_batch.generators.get(int(place))
            if generator is not None:
                generator.set_offset(generator.get_offset() - 4)


def test_vllm_has_the_seams() -> None:
    versions.check(cpu_sampling.SEAMS)


def test_the_same_seed_gives_the_same_tokens_in_however_many_pieces() -> None:
    sample, bookkeep = cpu_sampling.keeping_state(Runner.sample), cpu_sampling.without_winding(Runner.bookkeep)
    whole = Runner()
    expected = [whole.sample() for _ in range(3)]

    pieces = Runner()
    pieces.discard_request_mask.np[[0, 2]] = True
    drawn = sample(pieces)
    with pytest.raises(RuntimeError, match="offset"):
        pieces.bookkeep()
    bookkeep(pieces)
    assert sorted(pieces.input_batch.generators) == [0, 1]
    pieces.discard_request_mask.np[:] = False
    later = [sample(pieces) for _ in range(2)]
    # the first request's token was dropped; the other's was not
    assert [row[0] for row in later] == [row[0] for row in expected[:2]]
    assert [drawn[1], *(row[1] for row in later)] == [row[1] for row in expected]
