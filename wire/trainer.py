"""What is said to a trainer: a policy's operations and their answers. The same messages go to each of its ranks.

Arrays travel as little-endian bytes: token ids as int64, all else as float32. A datum has N positions: position ``i``
holds the log-probability of ``targets[i]`` given ``tokens[: i + 1]``.
"""

from __future__ import annotations

import msgspec

from .outcomes import Outcome

MAX_TRAINER_BYTES = 256 << 20
"""Bound of one encoded message: a batch of many long rollouts."""


class Loss(msgspec.Struct, frozen=True, omit_defaults=True):
    """``kind`` is cross_entropy, importance_sampling, ppo, cispo or dro; ``config`` its named numbers."""

    kind: str
    config: dict[str, float] = {}


class Datum(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One sequence. ``loss`` is the place of its loss in the batch's ``losses``.

    cross_entropy reads ``weights`` (any real numbers; ones if empty); the others read ``logprobs`` and ``advantages``,
    and ``weights`` as a factor of each position's loss, if given.
    """

    tokens: bytes
    targets: bytes
    weights: bytes = b""
    logprobs: bytes = b""
    advantages: bytes = b""
    loss: int = 0


class Batch(msgspec.Struct, frozen=True):
    """Data of one operation; losses may be mixed. The batch's loss is the sum over data and positions."""

    data: tuple[Datum, ...]
    losses: tuple[Loss, ...]


class Adam(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """AdamW (arXiv 1711.05101) with bias correction. ``grad_clip_norm`` 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class PolicySpec(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A policy as it is trained. ``policy`` names it to the trainer: letters, digits and ``._:-``.

    ``targets`` are our module names (``packer.modules``: q, k, v, o, gate, up, down, experts.gate, ...); empty means
    all that the trainer can adapt. The first values of A follow from ``seed`` and a tensor's name alone; B is zero.
    """

    policy: str
    rank: int
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    seed: int = 0


class TrainerMessage(msgspec.Struct, frozen=True, tag=True, tag_field="t", omit_defaults=True, kw_only=True):
    """Base of all messages between a trainer's control and its ranks."""


class CreatePolicy(TrainerMessage, frozen=True, kw_only=True):
    """Make a policy, from the checkpoint folder ``snapshot`` where one is given. Answered with PolicyStatus."""

    spec: PolicySpec
    snapshot: str = ""


class ForwardBackward(TrainerMessage, frozen=True, kw_only=True):
    """Log-probabilities and losses, and unless ``forward_only`` gradients, added to those that are there.

    Answered with Outputs: each rank has those of the data that end on it.
    """

    policy: str
    batch: Batch
    forward_only: bool = False


class OptimStep(TrainerMessage, frozen=True, kw_only=True):
    """One step of Adam with the gradients that are there, which are zero afterwards. Answered with Stepped."""

    policy: str
    adam: Adam


class SaveState(TrainerMessage, frozen=True, kw_only=True):
    """Write the rank's part of a checkpoint into the folder ``path``; ``gradients`` for one of mid-accumulation."""

    policy: str
    path: str
    optimizer: bool
    gradients: bool = False


class LoadState(TrainerMessage, frozen=True, kw_only=True):
    """Take weights (and with ``optimizer`` moments and step) from a checkpoint; gradients become zero."""

    policy: str
    path: str
    optimizer: bool


class ExportLayers(TrainerMessage, frozen=True, kw_only=True):
    """Write what the rank has of layers ``first`` to ``last`` (exclusive) into the revision file at ``path``.

    ``dtype`` is BF16 or F32. The file exists in its full size; its header is the control's to write.
    """

    policy: str
    path: str
    dtype: str
    first: int
    last: int


class RemovePolicy(TrainerMessage, frozen=True, kw_only=True):
    """Forget a policy; nothing happens where it is not known."""

    policy: str


class AskMemory(TrainerMessage, frozen=True, kw_only=True):
    """Answered with MemoryReport."""


class AskLimits(TrainerMessage, frozen=True, kw_only=True):
    """Answered with TrainerLimits once the base is loaded."""


class EndRank(TrainerMessage, frozen=True, kw_only=True):
    """End in good order."""


class Done(TrainerMessage, frozen=True, kw_only=True):
    """It is done. ``files`` are names that were written, with their digests; ``step`` is where the policy stands."""

    files: dict[str, str] = {}
    step: int = 0


class DatumOutput(msgspec.Struct, frozen=True):
    """``logprobs`` of the N targets (float32 bytes), and the datum's summed loss."""

    logprobs: bytes
    loss: float


class Outputs(TrainerMessage, frozen=True, kw_only=True):
    """``data`` by place in the batch. ``seconds`` is what the operation took of the trainer's time."""

    data: dict[int, DatumOutput] = {}
    seconds: float = 0.0

    @property
    def loss(self) -> float:
        """The batch's loss: a sum."""
        return sum(self.data[place].loss for place in sorted(self.data))


class Stepped(TrainerMessage, frozen=True, kw_only=True):
    """``grad_norm`` is the L2 norm over all of the policy's gradients before clipping; ``step`` counts from 1."""

    grad_norm: float
    step: int
    seconds: float = 0.0


class PolicyStatus(TrainerMessage, frozen=True, kw_only=True):
    """``number`` is that of the last change that the policy's state holds, 0 for a fresh one.

    ``parameters`` counts the policy's numbers over all ranks.
    """

    policy: str
    number: int
    step: int
    parameters: int


class PolicyMemory(msgspec.Struct, frozen=True):
    """Bytes of a policy's parameters, gradients and moments, by where they are now, on one rank or on all."""

    device: int = 0
    host: int = 0
    disk: int = 0


class MemoryReport(TrainerMessage, frozen=True, kw_only=True):
    """``policies`` by name. ``base`` are the bytes of the base's weights, ``scratch`` those of the shared gradients."""

    policies: dict[str, PolicyMemory]
    base: int
    scratch: int
    peak: int = 0


class TrainerLimits(TrainerMessage, frozen=True, kw_only=True):
    """What the trainer can do. ``targets`` are the modules it can adapt; ``dtype`` is the base's."""

    architecture: str
    targets: tuple[str, ...]
    max_rank: int
    max_context: int
    vocabulary: int
    dtype: str
    world_size: int


class Failed(TrainerMessage, frozen=True, kw_only=True):
    """The operation was refused, and changed nothing."""

    outcome: Outcome
    message: str
    field: str | None = None


AskOfRank = (
    CreatePolicy
    | ForwardBackward
    | OptimStep
    | SaveState
    | LoadState
    | ExportLayers
    | RemovePolicy
    | AskMemory
    | AskLimits
    | EndRank
)
AnswerOfRank = Done | Outputs | Stepped | PolicyStatus | MemoryReport | TrainerLimits | Failed
