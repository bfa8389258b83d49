"""What a rank does with a policy: passes forward and backward, steps of the optimiser. All ranks do it together."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from wire.outcomes import InvalidRequest, TooLarge
from wire.trainer import Adam, Batch, DatumOutput, Outputs, Stepped

from .batching import MicroBatch, complete_losses, deal, read_rows
from .finite import is_finite
from .hf_config import BaseConfig
from .lora import Adapters
from .losses import row_losses
from .optimizer import check_adam, gradient_norm, step_adam
from .parallel import Groups
from .policy import Policy, view
from .topology import Topology

Losses = list[tuple[str, Mapping[str, float]]]
# of each pass: what went in, log-probabilities (rows, length), and each row's loss
Results = list[tuple[MicroBatch, torch.Tensor, torch.Tensor]]


class Engine:
    """One base on this rank, and the passes over it.

    ``micro_batch_tokens`` bounds the padded tokens of a pass, ``context`` the positions of a datum.
    """

    def __init__(
        self,
        model: GPTModel,
        base: BaseConfig,
        topology: Topology,
        groups: Groups,
        device: torch.device,
        *,
        micro_batch_tokens: int,
        context: int,
    ) -> None:
        self._model = model
        self._base = base
        self._topology = topology
        self._groups = groups
        self._device = device
        self._micro_batch_tokens = micro_batch_tokens
        self._context = context
        self._adapters = Adapters(model, base, topology)
        self._scratch = torch.empty(0, device=device)
        self._run = get_forward_backward_func()
        model.train()

    @property
    def scratch_bytes(self) -> int:
        return self._scratch.nbytes

    def forward_backward(self, policy: Policy, batch: Batch, *, forward_only: bool) -> Outputs:
        """Log-probabilities and losses of the rows that end on this rank, and gradients, added to those there are.

        A refused batch leaves the gradients as they were. Raises InvalidRequest, TooLarge.
        """
        started = time.perf_counter()
        rows = read_rows(batch, vocabulary=self._base.vocabulary, context=self._context)
        losses = complete_losses(batch.losses)
        passes = deal(
            rows,
            tokens=self._micro_batch_tokens,
            grain=self._topology.tensor,
            data=self._topology.data,
            data_rank=self._topology.data_rank,
        )
        results: Results = []
        scratch = torch.empty(0, device=self._device)
        self._adapters.active = policy.factors
        try:
            if forward_only:
                with torch.no_grad():
                    self._schedule(passes, losses, results, forward_only=True)
            else:
                scratch = self._backward(policy, passes, losses, results)
        except torch.OutOfMemoryError as error:
            if self._topology.world > 1:
                # the others may wait for this rank: all have to begin anew
                raise
            raise TooLarge(f"the batch does not fit into the device's memory: {error}", field="data") from None
        finally:
            self._adapters.active = {}
        self._refuse_if_not_finite([scratch, *(each for _, _, each in results)])
        if not forward_only:
            policy.gradients.add_(scratch)
            policy.accumulated = True
        return Outputs(data=self._outputs(results), seconds=time.perf_counter() - started)

    def optim_step(self, policy: Policy, adam: Adam) -> Stepped:
        """Step with the gradients that are there. Raises InvalidRequest."""
        started = time.perf_counter()
        check_adam(adam)
        owned = [view(policy.gradients, slot) for slot in policy.layout.slots if slot.owned]
        norm = gradient_norm(owned, self._device, self._groups.world)
        if not math.isfinite(norm):
            raise InvalidRequest("the sum of the gradients is not finite: nothing was changed", field="gradients")
        policy.step += 1
        step_adam(policy.parameters, policy.gradients, policy.moments, policy.step, adam, norm)
        policy.drop_gradients()
        return Stepped(grad_norm=norm, step=policy.step, seconds=time.perf_counter() - started)

    def _backward(self, policy: Policy, passes: list[MicroBatch], losses: Losses, results: Results) -> torch.Tensor:
        """The batch's gradients, summed over ranks, in the scratch buffer that all policies share."""
        layout = policy.layout
        if self._scratch.numel() < layout.size:
            self._scratch = torch.empty(layout.size, device=self._device)
        scratch = self._scratch[: layout.size].zero_()
        for slot, leaf in policy.leaves.items():
            leaf.grad = view(scratch, slot)
        try:
            self._schedule(passes, losses, results, forward_only=False)
        finally:
            for leaf in policy.leaves.values():
                leaf.grad = None
        _sum(scratch[: layout.partial], self._groups.tensor)
        _sum(scratch[: layout.dense], self._groups.data)
        _sum(scratch[layout.dense :], self._groups.expert_data)
        return scratch

    def _schedule(self, passes: list[MicroBatch], losses: Losses, results: Results, *, forward_only: bool) -> None:
        def forward_step(data: Iterator[MicroBatch], model: GPTModel) -> Any:
            given = next(data)
            tokens, targets = self._tensor(given.tokens), self._tensor(given.targets)
            positions = torch.arange(tokens.shape[1], device=self._device).expand_as(tokens)
            output = model(tokens, positions, None, labels=targets)

            def loss(nll: torch.Tensor) -> Any:
                logprobs = -nll
                each = row_losses(
                    logprobs,
                    self._tensor(given.weights),
                    self._tensor(given.sampled),
                    self._tensor(given.advantages),
                    losses,
                    list(given.loss_of_row),
                )
                # a pass that only keeps step has a row without weights
                results.append((given, logprobs.detach(), each.detach()))
                return each.sum(), torch.zeros((), dtype=torch.int, device=self._device), {}

            return output, loss

        self._run(
            forward_step_func=forward_step,
            data_iterator=iter(passes),
            model=[self._model],
            num_microbatches=len(passes),
            seq_length=max(given.tokens.shape[1] for given in passes),
            micro_batch_size=max(given.tokens.shape[0] for given in passes),
            forward_only=forward_only,
        )

    def _outputs(self, results: Results) -> dict[int, DatumOutput]:
        """By place in the batch, on one of the ranks that know them."""
        outputs: dict[int, DatumOutput] = {}
        if not self._topology.last_stage or self._topology.tensor_rank:
            return outputs
        for given, logprobs, losses in results:
            values, sums = logprobs.float().cpu().numpy(), losses.tolist()
            for row, (place, length) in enumerate(zip(given.places, given.lengths, strict=True)):
                outputs[place] = DatumOutput(logprobs=values[row, :length].tobytes(), loss=sums[row])
        return outputs

    def _refuse_if_not_finite(self, tensors: list[torch.Tensor]) -> None:
        """Raises InvalidRequest on all ranks if any of them has a value that is no number."""
        flag = 1.0 - torch.stack([is_finite(tensor) for tensor in tensors]).all().float()
        if self._topology.world > 1:
            dist.all_reduce(flag, group=self._groups.world)
        if flag.item():
            raise InvalidRequest("the loss or its gradient is not finite: the batch changed nothing", field="data")

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _sum(part: torch.Tensor, group: Any) -> None:
    if part.numel() and dist.get_world_size(group) > 1:
        dist.all_reduce(part, group=group)
