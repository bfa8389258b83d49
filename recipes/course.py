"""A run's course: steps, checkpoints and evaluations, gone on with from the last checkpoint after whatever ended it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from wire.outcomes import VersionConflict

from . import service as training
from .config import Config
from .folder import Figures, RunFolder


class Taken(NamedTuple):
    """A step that was taken: what is to be known of it, and how many tokens went through the trainer and the engine."""

    figures: Figures
    tokens: int


# makes a client that samples from what is evaluated
Sampler = Callable[[], Awaitable[Any]]


class Recipe(Protocol):
    """What a step and an evaluation are. Both are functions of the client's weights, ``step`` and the configuration."""

    name: str

    async def step(self, client: Any, step: int) -> Taken: ...

    async def evaluate(self, client: Any, sampler: Sampler) -> Figures: ...


class Watcher(Protocol):
    """Who is told how a run goes on."""

    def stepped(self, step: int, figures: Figures) -> None: ...

    def evaluated(self, step: int, figures: Figures) -> None: ...


class Course:
    """One run of ``recipe`` at the training service ``service``."""

    def __init__(self, recipe: Recipe, config: Config, service: Any, watcher: Watcher) -> None:
        """Raises VersionConflict where the configuration's folder holds another run."""
        self._recipe = recipe
        self._config = config
        self._service = service
        self._watcher = watcher
        self._client: Any = None
        self.folder = RunFolder(Path(config.out), recipe.name, config)

    async def run(self) -> tuple[Figures, Figures]:
        """All of it: the evaluations before and after. The last revision is published."""
        before = await self.advance(0)
        every = self._config.evaluate_every
        for step in range(every, self._config.steps, every) if every else ():
            # what was passed without a look can't be looked at any more
            if step >= self.folder.state.step or step in self.folder.state.evaluations:
                await self.advance(step)
        after = await self.advance(self._config.steps)
        await self.publish()
        return before, after

    async def advance(self, step: int) -> Figures:
        """Train up to ``step`` and evaluate there, unless that was done. Raises VersionConflict for what was passed."""
        state = self.folder.state
        if step not in state.evaluations:
            if step < state.step:
                raise VersionConflict(
                    f"out: {self.folder.folder} holds a run that was not looked at after {step} steps, and has taken "
                    f"{state.step}: name another folder",
                    field="out",
                )
            await self._train(step)
            self.folder.evaluated(step, await self._recipe.evaluate(self._client, self._sampler(step)))
        self._watcher.evaluated(step, state.evaluations[step])
        return state.evaluations[step]

    async def publish(self) -> str:
        """Publish what there is as a revision, unless that was done; its path."""
        if not self.folder.state.published:
            await self._connect()
            saved = await self._client.save_weights_for_sampler("final")
            self.folder.published(saved.path)
        return self.folder.state.published

    async def judge(self, recipe: Recipe) -> Figures:
        """An evaluation by other items, of what there is; done once."""
        if not self.folder.state.judged:
            await self._connect()
            self.folder.judged(await recipe.evaluate(self._client, self._sampler(self.folder.state.step)))
        return self.folder.state.judged

    def _sampler(self, step: int) -> Sampler:
        """Before its first step a policy is its base, and nothing is published for that."""

        async def base() -> Any:
            return await self._service.create_sampling_client(base_model=self._config.base)

        async def own() -> Any:
            return await self._client.save_weights_and_get_sampling_client()

        return own if step else base

    async def _train(self, until: int) -> None:
        await self._connect()
        for step in range(self.folder.state.step + 1, until + 1):
            started = time.perf_counter()
            taken = await self._recipe.step(self._client, step)
            seconds = time.perf_counter() - started
            figures = {**taken.figures, "tokens_per_s": taken.tokens / seconds, "seconds": seconds}
            self.folder.log(step, figures)
            self._watcher.stepped(step, figures)
            if step == until or step % self._config.save_every == 0:
                saved = await self._client.save_state(f"step-{step:06d}")
                self.folder.reached(step, saved.path)

    async def _connect(self) -> None:
        if self._client is not None:
            return
        checkpoint = self.folder.state.checkpoint
        if checkpoint:
            self._client = await training.resume(self._service, self._config, checkpoint)
        else:
            self.folder.restarted()
            self._client = await training.begin(self._service, self._config)
