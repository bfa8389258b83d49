"""What a policy's state is made of: a snapshot, and the changes since. Pure: no files, no clocks, no ranks."""

from __future__ import annotations

import msgspec

from wire.outcomes import VersionConflict
from wire.trainer import AnswerOfRank, ForwardBackward, OptimStep, PolicySpec, Stepped

Change = ForwardBackward | OptimStep


class State(msgspec.Struct, frozen=True):
    """Where a policy stands: after change ``number``, whose ``answer`` is kept, and ``step`` steps of the optimiser.

    ``gradients``: whether there are some that no step has used.
    """

    number: int = 0
    step: int = 0
    gradients: bool = False
    answer: AnswerOfRank | None = None


class Record:
    """One policy: its state is ``snapshot`` (a checkpoint's folder; none for a new one) and the ``changes`` since.

    ``durable`` is the number of the snapshot's last change. The changes took ``seconds`` and are ``nbytes`` long.
    ``on_ranks``: whether the ranks have the policy in this state.
    """

    def __init__(self, spec: PolicySpec, parameters: int, state: State | None = None, snapshot: str = "") -> None:
        self.spec = spec
        self.parameters = parameters
        self.state = state or State()
        self.snapshot = snapshot
        self.durable = self.state.number
        self.changes: list[Change] = []
        self.seconds = 0.0
        self.nbytes = 0
        self.on_ranks = False

    def repeated(self, number: int) -> AnswerOfRank | None:
        """The answer of a change that was made already; None for the next one. Raises VersionConflict for another."""
        if number == self.state.number and self.state.answer is not None:
            return self.state.answer
        if number != self.state.number + 1:
            raise VersionConflict(
                f"change {number} of policy {self.spec.policy} can't be made: the next one is {self.state.number + 1}",
                field="number",
            )
        return None

    def made(self, change: Change, answer: AnswerOfRank, seconds: float) -> None:
        """Take note of the next change."""
        step = answer.step if isinstance(answer, Stepped) else self.state.step
        self.state = State(self.state.number + 1, step, isinstance(change, ForwardBackward), answer)
        self.changes.append(change)
        self.seconds += seconds
        self.nbytes += size_of(change)

    def snapshotted(self, state: State, folder: str) -> None:
        """``folder`` holds ``state``, which is the policy's from now on."""
        self.state = state
        self.snapshot = folder
        self.durable = state.number
        self.changes = []
        self.seconds = 0.0
        self.nbytes = 0


def size_of(change: Change) -> int:
    """About how many bytes a change takes in memory."""
    if isinstance(change, OptimStep):
        return 0
    arrays = ("tokens", "targets", "weights", "logprobs", "advantages")
    return sum(len(getattr(datum, name)) for datum in change.batch.data for name in arrays)


def encode_answer(answer: AnswerOfRank | None) -> bytes:
    """An answer as a snapshot's manifest keeps it."""
    return msgspec.msgpack.encode(answer) if answer is not None else b""


def decode_answer(encoded: bytes) -> AnswerOfRank | None:
    """The inverse. Raises msgspec.MsgspecError."""
    return _decoder.decode(encoded) if encoded else None


_decoder: msgspec.msgpack.Decoder[AnswerOfRank] = msgspec.msgpack.Decoder(AnswerOfRank)
