"""Runs a recipe as its configuration file says, from the first step or from where it was left."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from wire.outcomes import InvalidRequest

from . import config as configs
from .config import Config, Dpo, Grpo, Sft
from .course import Course, Recipe
from .display import Bar, bars
from .folder import Figures

_PACKAGES = ("tinker", "transformers", "matplotlib")
_KINDS: dict[str, type[Config]] = {"sft": Sft, "dpo": Dpo, "grpo": Grpo}
_CLOSING_S = 10.0


class Outcome(msgspec.Struct, frozen=True):
    """Held-out figures before and after, and the path of the revision that was published."""

    policy: str
    before: Figures
    after: Figures
    published: str


def read(name: str, file: Path) -> Config:
    """The configuration of ``sft``, ``dpo`` or ``grpo`` in ``file``. Raises InvalidRequest that names the field."""
    return configs.load(file, _KINDS[name])


def run_recipe(
    name: str, config: Config, *, url: str, key: str, console: Console, report: Path | None = None
) -> Outcome:
    """Run ``sft``, ``dpo`` or ``grpo``, or go on with it, at the gateway ``url``.

    Metrics are in ``metrics.jsonl`` of its folder as they come, and in ``metrics.svg`` at the end. A result
    file goes to ``report``.
    Raises InvalidRequest, NotFound and VersionConflict for what the caller must mend, as Unauthenticated and Forbidden;
    EngineFailed where the training service failed.
    """
    done: Outcome = asyncio.run(_with_service(url, key, lambda service: _one(name, config, service, console, report)))
    return done


def run_search(search: configs.Search, *, url: str, key: str, console: Console, report: Path | None = None) -> Any:
    """Run a search, or go on with it; what was found (``search.Found``), which is in ``search.json`` too."""
    return asyncio.run(_with_service(url, key, lambda service: _many(search, service, console, report)))


async def _with_service(url: str, key: str, work: Callable[[Any], Any]) -> Any:
    for package in _PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError:
            raise InvalidRequest(
                f"recipes need the package {package}: pip install 'roost[recipes]'", field="recipe"
            ) from None
    import tinker

    from .failures import failure_of
    from .service import connect

    service = connect(url, key)
    ended = "errored"
    try:
        done = await work(service)
        ended = "success"
        return done
    except tinker.TinkerError as error:
        raise failure_of(error) from error
    finally:
        with contextlib.suppress(tinker.TinkerError, TimeoutError):
            async with asyncio.timeout(_CLOSING_S):
                await service.close(ended)


async def _one(name: str, config: Config, service: Any, console: Console, report: Path | None) -> Outcome:
    from .plot import draw
    from .report import report_run
    from .service import text_of

    recipe = await _make(name, config, service, await text_of(service, config))
    with bars(console) as progress:
        course = Course(recipe, config, service, Bar(progress, config))
        before, after = await course.run()
    draw(course.folder, course.folder.folder / "metrics.svg")
    if report is not None:
        report_run(report, course.folder)
    return Outcome(config.policy, before, after, course.folder.state.published)


async def _make(name: str, config: Any, service: Any, text: Any) -> Recipe:
    from .dpo import Preferring
    from .grpo import Reinforced
    from .sft import Supervised

    if name == "sft":
        return Supervised(config, text)
    base = await service.create_sampling_client(base_model=config.base)
    return Preferring(config, text, base) if name == "dpo" else Reinforced(config, text, base)


async def _many(search: configs.Search, service: Any, console: Console, report: Path | None) -> Any:
    from .report import report_search
    from .search import Halving
    from .service import text_of

    text = await text_of(service, search.sft)
    with bars(console) as progress:
        found = await Halving(search, service, text, lambda candidate: Bar(progress, candidate)).run()
    kept = msgspec.json.format(msgspec.json.encode(found._asdict()), indent=1)
    (Path(search.sft.out) / "search.json").write_bytes(kept + b"\n")
    if report is not None:
        report_search(report, found, seed=search.sft.seed)
    return found
