"""A layer's experts as one grouped multiplication: the base's weights, and the place where adapters join in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

# what a grouped kernel demands of the strides of its operands, in bytes
_STRIDE_BYTES = 16

Grouped = tuple[torch.Tensor, list[int]]
"""The experts' ends among the rows (int32, on the device), and their sizes."""

Adapt = Callable[[str, torch.Tensor, Grouped], torch.Tensor | None]
"""What an adapter adds to ``gate``, ``up`` or ``down`` of rows sorted by expert; None for nothing."""


def grouped_linear(rows: torch.Tensor, weights: torch.Tensor, grouped: Grouped) -> torch.Tensor:
    """``rows`` (n, in), sorted by expert, times each expert's own of ``weights`` (experts, out, in) -> (n, out)."""
    ends, sizes = grouped
    if _grouped_mm is None or not rows.shape[0]:
        parts = [F.linear(part, weights[place]) for place, part in enumerate(torch.split(rows, sizes))]
        return torch.cat(parts)
    rank_bytes = weights.shape[-1] * weights.element_size()
    short = -rank_bytes % _STRIDE_BYTES // weights.element_size()
    if short:
        rows, weights = F.pad(rows, (0, short)), F.pad(weights, (0, short))
    outputs = weights.shape[1]
    short = -(outputs * weights.element_size()) % _STRIDE_BYTES // weights.element_size()
    if short:
        weights = F.pad(weights, (0, 0, 0, short))
    product: torch.Tensor = _grouped_mm(rows.contiguous(), weights.transpose(-2, -1), offs=ends)
    return product[:, :outputs]


_grouped_mm: Any = getattr(F, "grouped_mm", None)


class GroupedExperts(MegatronModule):  # type: ignore[misc]
    """The experts that this rank holds. Weights as in ``weights.py``: gate over up, (experts, 2 inner, hidden), and
    down, (experts, hidden, inner). ``adapt`` is set where a policy may adapt them."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__(config=config)
        hidden, inner = config.hidden_size, config.moe_ffn_hidden_size
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()

        def empty(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(*shape, dtype=config.params_dtype, device=device))

        self.gate_up = empty(num_local_experts, 2 * inner, hidden)
        self.down = empty(num_local_experts, hidden, inner)
        self.adapt: Adapt | None = None

    def forward(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probabilities: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """(n, hidden) rows sorted by expert -> (n, hidden), weighted by their ``probabilities`` (n,)."""
        sizes = tokens_per_expert.tolist()
        ends = torch.as_tensor(tokens_per_expert).cumsum(0).to(torch.int32).to(rows.device)
        grouped = ends, sizes
        gate, up = grouped_linear(rows, self.gate_up, grouped).chunk(2, dim=-1)
        if self.adapt is not None:
            gate, up = self._adapted("gate", rows, gate, grouped), self._adapted("up", rows, up, grouped)
        inner = (F.silu(gate) * up * probabilities.unsqueeze(-1)).to(rows.dtype)
        down = grouped_linear(inner, self.down, grouped)
        return self._adapted("down", inner, down, grouped), None

    def _adapted(self, module: str, rows: torch.Tensor, output: torch.Tensor, grouped: Grouped) -> torch.Tensor:
        delta = self.adapt(module, rows, grouped) if self.adapt is not None else None
        return output if delta is None else output + delta

    def backward_dw(self) -> None:
        """The weights are frozen: there is nothing to do later."""
