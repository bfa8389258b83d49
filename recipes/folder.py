"""What a run keeps in its folder: how far it is, its metrics, and what was seen at evaluations."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from wire.outcomes import InvalidRequest, VersionConflict

# what may be changed between one start of a run and the next
_MAY_CHANGE = {"steps", "save_every", "evaluate_every", "out", "train", "held_out", "tokenizer"}

_LOCK = ".lock"

Figures = dict[str, float]


class State(msgspec.Struct, kw_only=True):
    """``checkpoint`` is of after ``step`` steps (empty: none was saved yet); ``evaluations`` are by step,
    ``judged`` is one by other items than the run's own.
    """

    recipe: str
    config: dict[str, Any]
    step: int = 0
    checkpoint: str = ""
    evaluations: dict[int, Figures] = {}
    judged: Figures = {}
    published: str = ""


class RunFolder:
    """``state.json``, replaced as a whole, and ``metrics.jsonl``, one line a step."""

    def __init__(self, folder: Path, recipe: str, config: msgspec.Struct) -> None:
        """Raises VersionConflict for a folder that holds another run, or where another process runs this one;
        InvalidRequest for what can't be a folder.
        """
        self.folder = folder
        self.metrics = folder / "metrics.jsonl"
        self._file = folder / "state.json"
        told = msgspec.json.decode(msgspec.json.encode(config))
        self._lock = _locked(folder)
        self.state = State(recipe=recipe, config=told)
        if self._file.exists():
            self.state = self._read()
            _check_same(folder, self.state, recipe, told)
            _check_no_shorter(folder, self.state, told)
            self.state.config = told
        self._cut(self.state.step)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """A line of metrics, there to be read at once."""
        with self.metrics.open("ab") as file:
            file.write(msgspec.json.encode({"step": step, **figures}) + b"\n")

    def lines(self) -> list[Figures]:
        """All lines of metrics that are whole."""
        return read_metrics(self.metrics)

    def reached(self, step: int, checkpoint: str) -> None:
        """A checkpoint of after ``step`` was saved: what was published or judged before is not of it."""
        self.state.step, self.state.checkpoint = step, checkpoint
        self.state.published, self.state.judged = "", {}
        self._write()

    def evaluated(self, step: int, figures: Figures) -> None:
        self.state.evaluations[step] = figures
        self._write()

    def judged(self, figures: Figures) -> None:
        self.state.judged = figures
        self._write()

    def published(self, path: str) -> None:
        self.state.published = path
        self._write()

    def restarted(self) -> None:
        """The run begins anew: no checkpoint of it was saved."""
        self.state.step, self.state.checkpoint = 0, ""
        self._cut(0)

    def _read(self) -> State:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=State)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"out: {self._file}: {error}", field="out") from None

    def _write(self) -> None:
        part = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        with part.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self.state), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._file)

    def _cut(self, step: int) -> None:
        """Leave only metrics up to ``step``: what came after them is done again."""
        kept = [line for line in self.lines() if line["step"] <= step]
        if self.metrics.exists():
            part = self.metrics.with_name(f".{self.metrics.name}.{os.getpid()}")
            part.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in kept))
            part.replace(self.metrics)


def read_metrics(file: Path) -> list[Figures]:
    """The lines of a ``metrics.jsonl``; a last one that was cut short by a kill is left out."""
    if not file.exists():
        return []
    found = []
    for line in file.read_bytes().split(b"\n"):
        try:
            found.append(msgspec.json.decode(line, type=dict[str, float]))
        except msgspec.DecodeError:
            continue
    return found


def _locked(folder: Path) -> IO[bytes]:
    """The folder's lock, which is this process's for as long as the file is open."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("wb")
    except OSError as error:
        raise InvalidRequest(f"out: {folder} can't be a folder: {error.strerror}", field="out") from None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise VersionConflict(f"out: another process runs in {folder}: let it end", field="out") from None
    return lock


def _check_no_shorter(folder: Path, state: State, told: Mapping[str, Any]) -> None:
    """What was trained can't be taken back."""
    steps = told.get("steps", state.step)
    if steps < state.step:
        raise VersionConflict(
            f"out: {folder} holds a run that has taken {state.step} steps, and steps is {steps}: raise it, or name "
            "another folder",
            field="steps",
        )


def _check_same(folder: Path, state: State, recipe: str, told: Mapping[str, Any]) -> None:
    if state.recipe != recipe:
        raise VersionConflict(f"out: {folder} holds a run of {state.recipe}", field="out")
    for name, value in told.items():
        if name not in _MAY_CHANGE and state.config.get(name, value) != value:
            raise VersionConflict(
                f"out: {folder} holds a run with {name} = {state.config[name]!r}, not {value!r}: go on with that, or "
                "name another folder",
                field=name,
            )
