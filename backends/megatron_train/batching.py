"""A batch from the wire into micro-batches: decoded, checked, sorted by length, dealt to the data ranks. No torch.

What a rank computes follows from the batch alone, so that the same operation gives the same bits at any time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wire.outcomes import InvalidRequest
from wire.trainer import Batch, Datum, Loss

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_CLIP_LOW, _CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"
# by loss: its numbers with their defaults
LOSS_DEFAULTS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {_CLIP_LOW: 0.8, _CLIP_HIGH: 1.2},
    "cispo": {_CLIP_LOW: 0.0, _CLIP_HIGH: 4.0},
    "dro": {"beta": 0.1},
}
# sequences are padded to a multiple of this, so that few shapes occur
_LENGTH_GRAIN = 16


class Row(NamedTuple):
    """A datum, decoded. All arrays have its N positions."""

    tokens: Ids
    targets: Ids
    weights: Floats
    sampled: Floats
    advantages: Floats
    loss: int


class MicroBatch(NamedTuple):
    """One forward pass: arrays of shape (rows, length), padded to the right with weight 0.

    ``places`` are the rows' places in the batch; none for a pass that only keeps this rank in step with others.
    """

    places: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: Ids
    targets: Ids
    weights: Floats
    sampled: Floats
    advantages: Floats
    loss_of_row: tuple[int, ...]


def complete_losses(losses: tuple[Loss, ...]) -> list[tuple[str, Mapping[str, float]]]:
    """Each loss's kind with all of its numbers. Raises InvalidRequest that names the loss or the number."""
    completed: list[tuple[str, Mapping[str, float]]] = []
    for loss in losses:
        defaults = LOSS_DEFAULTS.get(loss.kind)
        if defaults is None:
            raise InvalidRequest(
                f"there is no loss {loss.kind!r}; known are {', '.join(LOSS_DEFAULTS)}", field="loss_fn"
            )
        for name, value in loss.config.items():
            if name not in defaults:
                raise InvalidRequest(f"the loss {loss.kind} has no setting {name!r}", field="loss_fn_config")
            if not math.isfinite(value):
                raise InvalidRequest(f"{name} of the loss {loss.kind} is not finite", field="loss_fn_config")
        numbers = {**defaults, **loss.config}
        low, high = numbers.get(_CLIP_LOW, 0.0), numbers.get(_CLIP_HIGH, math.inf)
        if low > high:
            raise InvalidRequest(
                f"{_CLIP_LOW} of the loss {loss.kind} is {low:g}, more than {_CLIP_HIGH}, {high:g}",
                field="loss_fn_config",
            )
        completed.append((loss.kind, numbers))
    return completed


def read_rows(batch: Batch, *, vocabulary: int, context: int) -> list[Row]:
    """Decode and check all data. Raises InvalidRequest that names the datum and the field."""
    if not batch.data:
        raise InvalidRequest("the batch has no data", field="data")
    complete_losses(batch.losses)
    return [_read_row(place, datum, batch.losses, vocabulary, context) for place, datum in enumerate(batch.data)]


def _read_row(place: int, datum: Datum, losses: tuple[Loss, ...], vocabulary: int, context: int) -> Row:
    if not 0 <= datum.loss < len(losses):
        raise InvalidRequest(f"datum {place} has loss {datum.loss} of {len(losses)}", field="loss")
    tokens = _ids(place, "tokens", datum.tokens, vocabulary)
    count = len(tokens)
    if not 1 <= count <= context:
        raise InvalidRequest(f"datum {place} has {count} tokens, not 1 to {context}", field="tokens")
    targets = _ids(place, "targets", datum.targets, vocabulary)
    if len(targets) != count:
        raise InvalidRequest(f"datum {place} has {len(targets)} targets for {count} tokens", field="targets")
    weights = _floats(place, "weights", datum.weights, count, absent=1.0)
    if losses[datum.loss].kind == "cross_entropy":
        zeros = np.zeros(count, np.float32)
        return Row(tokens, targets, weights, zeros, zeros, datum.loss)
    for name in ("logprobs", "advantages"):
        if not getattr(datum, name):
            raise InvalidRequest(f"datum {place} lacks {name}, which {losses[datum.loss].kind} needs", field=name)
    sampled = _floats(place, "logprobs", datum.logprobs, count)
    return Row(tokens, targets, weights, sampled, _floats(place, "advantages", datum.advantages, count), datum.loss)


def _ids(place: int, name: str, raw: bytes, vocabulary: int) -> Ids:
    if len(raw) % 8:
        raise InvalidRequest(f"datum {place}: {name} is {len(raw)} bytes, not int64 numbers", field=name)
    ids = np.frombuffer(raw, "<i8")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise InvalidRequest(f"datum {place}: {name} has an id outside 0 to {vocabulary - 1}", field=name)
    return ids


def _floats(place: int, name: str, raw: bytes, count: int, absent: float = 0.0) -> Floats:
    if not raw:
        return np.full(count, absent, np.float32)
    if len(raw) != 4 * count:
        raise InvalidRequest(f"datum {place}: {name} is {len(raw)} bytes, not {count} float32 numbers", field=name)
    values = np.frombuffer(raw, "<f4")
    if not np.isfinite(values).all():
        raise InvalidRequest(f"datum {place}: {name} has a value that is not finite", field=name)
    return values


def deal(rows: list[Row], *, tokens: int, grain: int, data: int, data_rank: int) -> list[MicroBatch]:
    """This data rank's micro-batches, as many as every other's. Each has at most ``tokens`` padded ones, or one row.

    Lengths are padded to a multiple of ``grain`` (the tensor ranks, which split sequences) and of our own.
    """
    grain = math.lcm(grain, _LENGTH_GRAIN)
    order = sorted(range(len(rows)), key=lambda place: (-len(rows[place].tokens), place))
    # no more to one pass than leaves each rank with work
    most = -(-len(rows) // data)
    passes: list[list[int]] = []
    for place in order:
        length = _padded(len(rows[passes[-1][0]].tokens), grain) if passes else 0
        if passes and len(passes[-1]) < most and (len(passes[-1]) + 1) * length <= tokens:
            passes[-1].append(place)
        else:
            passes.append([place])
    mine = [_stack(rows, places, grain) for places in passes[data_rank::data]]
    idle = -(-len(passes) // data) - len(mine)
    return mine + [_empty(grain)] * idle


def _padded(length: int, grain: int) -> int:
    return -(-length // grain) * grain


def _stack(rows: list[Row], places: list[int], grain: int) -> MicroBatch:
    chosen = [rows[place] for place in places]
    lengths = tuple(len(row.tokens) for row in chosen)
    shape = (len(chosen), _padded(max(lengths), grain))
    ids = [np.zeros(shape, np.int64) for _ in range(2)]
    numbers = [np.zeros(shape, np.float32) for _ in range(3)]
    for number, row in enumerate(chosen):
        for array, values in zip(ids, (row.tokens, row.targets), strict=True):
            array[number, : len(values)] = values
        for floats, given in zip(numbers, (row.weights, row.sampled, row.advantages), strict=True):
            floats[number, : len(given)] = given
    return MicroBatch(
        places=tuple(places),
        lengths=lengths,
        tokens=ids[0],
        targets=ids[1],
        weights=numbers[0],
        sampled=numbers[1],
        advantages=numbers[2],
        loss_of_row=tuple(row.loss for row in chosen),
    )


def _empty(grain: int) -> MicroBatch:
    ids, numbers = np.zeros((1, grain), np.int64), np.zeros((1, grain), np.float32)
    return MicroBatch((), (), ids, ids, numbers, numbers, numbers, (0,))
