"""The one interface of all trainer backends: what a training service may ask of a trainer.

A trainer holds one resident base and many policies. Operations of one policy run in the order in which they are asked
for; which policy's turn it is, is the caller's to decide. A driver imports no torch.

**Durability.** The caller numbers a policy's changes (forward_backward, optim_step, load_state) from 1 on, without a
gap, and asks for one only when the answer to the one before is safe with it. A trainer restores every policy by itself
when its ranks die. When the caller itself begins anew, ``create_policy`` says up to which number the state on disk
goes: the caller asks again for the later ones, from its own log, and gets the very same answers. Asked again for the
last number that it has done, a trainer repeats its answer and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from wire.events import ArtifactFacts
from wire.node import Health as Health
from wire.outcomes import EngineFailed
from wire.trainer import Adam, Batch, MemoryReport, Outputs, PolicySpec, PolicyStatus, Stepped, TrainerLimits


class TrainerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One trainer. ``fingerprint`` is the base's in the catalog (empty: not known); what was saved over another is
    refused. ``dtype`` is what the base is kept in, ``auto`` what an engine with ``auto`` computes in. ``tensor``,
    ``pipeline``, ``expert``, ``expert_tensor`` and ``data`` are the sizes of its parallel groups.

    ``host_bytes`` bounds what each rank keeps of cold policies in (pinned) host memory, ``device_bytes`` what it keeps
    of policies on the device (0: no bound); the rest is on disk, in the trainer's state folder.
    ``micro_batch_tokens`` bounds the padded tokens of one forward pass. ``threads`` are a rank's on a CPU (0: the
    host's, shared out); replays give the same bits with the same number of them. A state that took
    ``snapshot_after_s`` of operations to make, or logs of ``snapshot_after_bytes`` together, are snapshotted.
    """

    name: str
    backend: str = "megatron"
    model_path: str
    fingerprint: str = ""
    device: str = "auto"
    dtype: str = "auto"
    tensor: int = 1
    sequence_parallel: bool = False
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    max_rank: int = 128
    max_context: int = 0
    micro_batch_tokens: int = 8192
    recompute: bool = True
    device_bytes: int = 0
    host_bytes: int = 8 << 30
    threads: int = 0
    env: dict[str, str] = {}
    start_timeout_s: float = 600.0
    operation_timeout_s: float = 3600.0
    snapshot_after_s: float = 60.0
    snapshot_after_bytes: int = 64 << 20

    @property
    def world_size(self) -> int:
        """How many ranks there are. Experts are spread over tensor and data ranks, and need none of their own."""
        return self.tensor * self.pipeline * self.data


class TrainerLost(EngineFailed):
    """The trainer's ranks died under an operation, and again when it was tried anew: its policy is as before it."""


class TrainerBackend(Protocol):
    """A driver for one trainer. Calls may be made at once, and queue. Errors are RoostErrors.

    An operation that is refused (InvalidRequest, NotFound, Unfit) has changed nothing, and its number is free again.
    """

    settings: TrainerSettings
    # why the trainer is DEAD, for a person; empty otherwise
    detail: str

    async def start(self) -> None:
        """Start the ranks. Returns once they are spawned: ``health`` tells when the base is loaded."""

    async def health(self) -> Health:
        """STARTING also while dead ranks are being replaced: operations wait. DEAD where there will be no ranks."""

    async def limits(self) -> TrainerLimits:
        """What the trainer can do; waits until it is READY."""

    async def create_policy(self, spec: PolicySpec) -> PolicyStatus:
        """Make a policy, or restore it from its last snapshot under the trainer's state folder.

        Raises InvalidRequest or Unfit that name the field: a target, a rank or an alpha that can't be, or a policy
        that is there already with another specification.
        """

    def durable(self, policy: str) -> int:
        """Up to which change the policy's state is on disk by now: earlier ones need never be asked for again."""

    async def forward_backward(self, policy: str, batch: Batch, *, number: int) -> Outputs:
        """Log-probabilities, losses and gradients, the last added to those that are there. Raises NotFound.

        Raises InvalidRequest that names the datum and the field, also where loss or gradients are not finite; TooLarge
        for a datum that the device has no memory for.
        """

    async def forward(self, policy: str, batch: Batch) -> Outputs:
        """The same without gradients."""

    async def optim_step(self, policy: str, adam: Adam, *, number: int) -> Stepped:
        """Step, and begin the gradients anew."""

    async def save_state(self, policy: str, path: Path, *, with_optimizer: bool) -> None:
        """Write the checkpoint folder ``path``, all or nothing; one that is there is replaced."""

    async def load_state(self, policy: str, path: Path, *, with_optimizer: bool, number: int) -> None:
        """Take a checkpoint's weights, of whatever topology it was written in. Raises InvalidRequest, Unfit.

        Its rank, targets and modules must be the policy's; ``with_optimizer`` needs one that was saved with it.
        """

    async def export_revision(
        self, policy: str, path: Path, *, dtype: str = "BF16", progress: Callable[[int, int], None] | None = None
    ) -> ArtifactFacts:
        """Write the policy's revision file to ``path``; ``dtype`` is BF16 or F32.

        ``progress(done, total)``: the file's first ``done`` bytes are final, and may be read already. It is first
        called before anything else is written; where ranks died it begins anew, in another file. The digest is known
        at the end. Raises InvalidRequest if a value is not finite.
        """

    async def remove_policy(self, policy: str) -> None:
        """Forget a policy and its snapshots; nothing happens where it is not known."""

    async def memory(self) -> MemoryReport:
        """Where the policies' bytes are now, over all ranks."""

    async def stop(self) -> None:
        """Snapshot what has changed, and end the ranks."""
