"""``roost loadtest``: the benchmarks, each writing one JSON file of where it ran, its samples and its figures."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from .output import ERR, tell_table

app = typer.Typer(help="Benchmarks of this installation, on this machine.", no_args_is_help=True)

Json = Annotated[Path, typer.Option("--json", metavar="FILE", help="Where the report goes.")]
Seed = Annotated[int, typer.Option(help="Of everything that is random.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="A picture too: .svg, .png or .pdf.")]
Page = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="A page with plots too: .html.")]
Scratch = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="On the disk to be measured.  [default: the temporary folder]")
]


class Scale(enum.StrEnum):
    """How much is measured."""

    SMALL = "small"
    FULL = "full"


class Engine(enum.StrEnum):
    """Engines whose installs can be measured."""

    VLLM = "vllm"


class Device(enum.StrEnum):
    """What engines run on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class InstallPart(enum.StrEnum):
    """Rank 1 through the worker; rank 1 through a server; ranks 16 and 32."""

    WORKER = "worker"
    SERVER = "server"
    RANKS = "ranks"


DeviceOption = Annotated[Device, typer.Option(help="auto: a GPU where there is one.")]
ScaleOption = Annotated[Scale, typer.Option(help="small: within five minutes. full: every size, more rounds.")]


@app.command("calibrate")
def calibrate(
    report: Json,
    scale: ScaleOption = Scale.SMALL,
    seed: Seed = 1,
    layers: Annotated[int, typer.Option(min=1, help="Of the base that is made for it.")] = 4,
    experts: Annotated[int, typer.Option(min=0, help="A layer; 0 makes a dense base.")] = 0,
) -> None:
    """Fit the constants of the simulations' engine to a real vLLM, which is started for it."""
    from loadtest import calibrate
    from loadtest.base_model import BaseSize

    size = BaseSize(layers, experts)
    _show(calibrate.run(report, small=scale is Scale.SMALL, seed=seed, size=size, say=_say), report)


@app.command("catalog")
def catalog(
    report: Json, scale: ScaleOption = Scale.SMALL, plot: Plot = None, seed: Seed = 1, scratch: Scratch = None
) -> None:
    """Look-ups, opens, commits and imports, from a thousand policies to ten million (full: 20 GB of disk)."""
    from loadtest import catalog

    _show(catalog.run(report, small=scale is Scale.SMALL, seed=seed, plot=plot, scratch=scratch, say=_say), report)


@app.command("cache")
def cache(report: Json, scale: ScaleOption = Scale.SMALL, plot: Plot = None, seed: Seed = 1) -> None:
    """Bytes that cache policies let be brought again on replayed traces, beside LRU."""
    from loadtest import cache

    _show(cache.run(report, small=scale is Scale.SMALL, seed=seed, plot=plot, say=_say), report)


@app.command("gateway")
def gateway(report: Json, scale: ScaleOption = Scale.SMALL, seed: Seed = 1) -> None:
    """What the gateway adds to a request, and how many a core carries."""
    from loadtest import gateway

    _show(gateway.run(report, small=scale is Scale.SMALL, seed=seed), report)


@app.command("install")
def install(
    report: Json,
    scale: ScaleOption = Scale.SMALL,
    plot: Plot = None,
    seed: Seed = 1,
    engine: Annotated[Engine, typer.Option(help="The engine to load adapters into.")] = Engine.VLLM,
    device: DeviceOption = Device.AUTO,
    part: Annotated[list[InstallPart] | None, typer.Option(help="What to measure.  [default: all]")] = None,
) -> None:
    """Adapters of 37,248 tensors into a running engine, beside stock loads: time, the longest gap, and equality."""
    from loadtest import install

    parts = [one.value for one in part or InstallPart]
    summary = install.run(
        report, small=scale is Scale.SMALL, seed=seed, say=_say, engine=engine.value, device=device.value,
        parts=parts, plot=plot,
    )  # fmt: skip
    _show(summary, report)


@app.command("lease")
def lease(report: Json, scale: ScaleOption = Scale.SMALL, seed: Seed = 1) -> None:
    """The round trip of a lease between a gateway's socket and a sidecar."""
    from loadtest import lease

    _show(lease.run(report, small=scale is Scale.SMALL, seed=seed), report)


@app.command("pack")
def pack(report: Json, scale: ScaleOption = Scale.SMALL, plot: Plot = None, seed: Seed = 1) -> None:
    """Packing an adapter of 37,248 tensors, beside reading it: time, sizes, and whether it comes back bit for bit."""
    from loadtest import pack

    _show(pack.run(report, small=scale is Scale.SMALL, seed=seed, plot=plot), report)


@app.command("placement")
def placement(report: Json, scale: ScaleOption = Scale.SMALL, seed: Seed = 1) -> None:
    """What a placement costs over 40 and 1,000 nodes, and how many policies a node moves that joins or leaves."""
    from loadtest import placement

    _show(placement.run(report, small=scale is Scale.SMALL, seed=seed), report)


@app.command("burst")
def burst(
    report: Json,
    scale: ScaleOption = Scale.SMALL,
    page: Page = None,
    seed: Seed = 1,
    layers: Annotated[int, typer.Option(min=0, help="Of another base than the published case's.")] = 0,
    experts: Annotated[int, typer.Option(min=0, help="A layer of that base; 0 makes it dense.")] = 0,
) -> None:
    """64 cold policies at once on a real vLLM, the stock way beside ours, and what a running stream sees of it."""
    from loadtest import burst
    from loadtest.base_model import BaseSize

    size = BaseSize(layers, experts) if layers else None
    _show(burst.run(report, small=scale is Scale.SMALL, seed=seed, size=size, plot=page, say=_say), report)


@app.command("handoff")
def handoff(
    report: Json,
    scale: ScaleOption = Scale.SMALL,
    plot: Plot = None,
    seed: Seed = 1,
    device: DeviceOption = Device.AUTO,
) -> None:
    """From a step of training to the first token of it through a whole mesh, beside merging and reloading weights."""
    from loadtest import handoff

    small = scale is Scale.SMALL
    _show(handoff.run(report, small=small, seed=seed, device=device.value, plot=plot, say=_say), report)


@app.command("multipolicy")
def multipolicy(
    report: Json,
    scale: ScaleOption = Scale.SMALL,
    plot: Plot = None,
    seed: Seed = 1,
    device: DeviceOption = Device.AUTO,
) -> None:
    """Three policies one after another and at once: wall time and peak memory; and 50 that are resident."""
    from loadtest import multipolicy

    small = scale is Scale.SMALL
    _show(multipolicy.run(report, small=small, seed=seed, device=device.value, plot=plot, say=_say), report)


@app.command("scenario")
def scenario(
    name: Annotated[str, typer.Argument(help="unique-burst, hot-set, weak-locality, zipf-drift, wave, ...")],
    report: Json,
    url: Annotated[str, typer.Option(help="A real gateway's, which is asked for its own policies.")] = "",
    api_key: Annotated[str, typer.Option(envvar="ROOST_API_KEY", help="For that gateway.")] = "",
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second.")] = 20.0,
    seconds: Annotated[float, typer.Option(min=1, help="How long they come.")] = 60.0,
    page: Page = None,
    seed: Seed = 1,
) -> None:
    """One kind of traffic, on a simulated fleet or with --url on a real mesh."""
    from loadtest import scenario

    summary = scenario.run(report, name=name, seed=seed, rate=rate, seconds=seconds, url=url, key=api_key, plot=page)
    _show(summary, report)


@app.command("two-nodes")
def two_nodes(report: Json, scale: ScaleOption = Scale.SMALL, page: Page = None, seed: Seed = 1) -> None:
    """Simulated: 2048 policies at concurrency 230 on two nodes of 32 slots, beside a sticky hash."""
    from loadtest import two_nodes

    _show(two_nodes.run(report, small=scale is Scale.SMALL, seed=seed, plot=page, say=_say), report)


@app.command("wave")
def wave(report: Json, scale: ScaleOption = Scale.SMALL, page: Page = None, seed: Seed = 1) -> None:
    """Simulated: of a catalog of a million, 2,300 policies asked five times each on 44 nodes of 64 slots."""
    from loadtest import wave

    _show(wave.run(report, small=scale is Scale.SMALL, seed=seed, plot=page, say=_say), report)


@app.command("fairness")
def fairness(report: Json, scale: ScaleOption = Scale.SMALL, page: Page = None, seed: Seed = 1) -> None:
    """Simulated: what one tenant's flood of cold policies does to another's requests."""
    from loadtest import fairness

    _show(fairness.run(report, small=scale is Scale.SMALL, seed=seed, plot=page, say=_say), report)


@app.command("chaos")
def chaos(report: Json, scale: ScaleOption = Scale.SMALL, page: Page = None, seed: Seed = 1) -> None:
    """Simulated: an hour (full: a day) in which everything that can die dies, with exact books at the end."""
    from loadtest import chaos

    _show(chaos.run(report, small=scale is Scale.SMALL, seed=seed, plot=page, say=_say), report)


def _say(text: str) -> None:
    ERR.print(text, style="dim")


def _show(summary: dict[str, object], report: Path) -> None:
    tell_table(("FIGURE", "VALUE"), list(summary.items()), empty="Nothing was measured.")
    _say(f"Written to {report}")
