"""``roost recipe``: training recipes at this mesh's gateway, or at the one that ``--url`` names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from .client import ApiClient
from .output import ERR, tell, tell_json, tell_table
from .session import AsJson, session

app = typer.Typer(help="Train a policy: SFT, DPO, GRPO, or a search over many.", no_args_is_help=True)

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="What to train, and on what: TOML (docs/recipes.md).")]
Report = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Write a result file too, as benchmarks do.")
]


@app.command("sft")
def sft(context: typer.Context, config: ConfigFile, report: Report = None, as_json: AsJson = False) -> None:
    """Supervised fine-tuning on prompts and answers. Started again, it goes on from its last checkpoint."""
    _run(context, "sft", config, report, as_json)


@app.command("dpo")
def dpo(context: typer.Context, config: ConfigFile, report: Report = None, as_json: AsJson = False) -> None:
    """Direct preference optimisation on pairs of answers. Started again, it goes on from its last checkpoint."""
    _run(context, "dpo", config, report, as_json)


@app.command("grpo")
def grpo(context: typer.Context, config: ConfigFile, report: Report = None, as_json: AsJson = False) -> None:
    """Reinforcement on a verifiable reward. Started again, it goes on from its last checkpoint."""
    _run(context, "grpo", config, report, as_json)


@app.command("search")
def search(context: typer.Context, config: ConfigFile, report: Report = None, as_json: AsJson = False) -> None:
    """Successive halving over SFT runs, all at once. Started again, it goes on from the last checkpoints."""
    from recipes.config import load_search
    from recipes.run import run_search

    wanted = load_search(config)
    client = _client(context)
    with _may_be_stopped():
        found = run_search(wanted, url=client.url, key=client.key, console=ERR, report=report)
    if as_json:
        tell_json(found._asdict())
        return
    names = list(found.winner_figures)
    rows = [(found.winner, "winner", found.winner_figures), (found.median, "median candidate", found.median_figures)]
    tell_table(
        ("policy", "", *names),
        [(policy, which, *(f"{figures[name]:.4g}" for name in names)) for policy, which, figures in rows],
        empty="nothing was found",
    )


@contextlib.contextmanager
def _may_be_stopped() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        ERR.print("stopped; the same command goes on from the last checkpoint")
        raise


def _client(context: typer.Context) -> ApiClient:
    """The gateway, which answers and knows the key: the SDK would try for minutes to tell otherwise."""
    client = session(context).client()
    client.call("GET", "/v1/models")
    return client


def _run(context: typer.Context, name: str, config: Path, report: Path | None, as_json: bool) -> None:
    from recipes.run import read, run_recipe

    wanted = read(name, config)
    client = _client(context)
    with _may_be_stopped():
        done = run_recipe(name, wanted, url=client.url, key=client.key, console=ERR, report=report)
    if as_json:
        tell_json(done)
        return
    rows = [(figure, f"{done.before[figure]:.4g}", f"{value:.4g}") for figure, value in done.after.items()]
    tell_table(("held out", "before", "after"), rows, empty="nothing was evaluated")
    tell("Published ", (done.policy, "bold"), f" as {done.published}")
