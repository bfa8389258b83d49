"""What a person sees while recipes run: a bar a policy, with the latest figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .config import Config
from .folder import Figures

_SHOWN = ("loss", "reward", "margin", "kl", "tokens_per_s")


class Bar:
    """See ``course.Watcher``. Where nobody watches, evaluations are told a line each, and steps not at all."""

    def __init__(self, progress: Progress, config: Config) -> None:
        self._progress = progress
        self._policy = config.policy
        self._task: TaskID = progress.add_task(config.policy, total=config.steps, figures="")

    def stepped(self, step: int, figures: Figures) -> None:
        shown = {name: figures[name] for name in _SHOWN if name in figures}
        self._progress.update(self._task, completed=step, figures=told(shown))

    def evaluated(self, step: int, figures: Figures) -> None:
        self._progress.update(self._task, completed=step)
        if figures:
            self._progress.console.print(f"{self._policy}  step {step}, held out: {told(figures)}", highlight=False)


@contextmanager
def bars(console: Console) -> Iterator[Progress]:
    """Where bars are drawn."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress


def told(figures: Figures) -> str:
    """For one line."""
    return "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items())
