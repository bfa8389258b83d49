"""``roost loadtest``: the benchmarks, each writing one JSON file of where it ran, its samples and its figures."""

from __future__ import annotations

import enum
import errno
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from backends.gpu_share import gpu_is_there
from wire.outcomes import InvalidRequest

from .output import ERR, tell_table

app = typer.Typer(help="Benchmarks of this installation, on this machine.", no_args_is_help=True)


@app.callback()
def _end_what_runs() -> None:
    """Benchmarks of this installation, on this machine."""
    # what a benchmark has started ends with it, whoever ends it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _writable(given: Path | None) -> Path | None:
    """A file that can be written, which is looked at before anything is measured. Raises InvalidRequest."""
    if given is None:
        return None
    try:
        given.parent.mkdir(parents=True, exist_ok=True)
        if given.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # who may write is known only by writing
        with tempfile.TemporaryFile(dir=given.parent):
            pass
    except OSError as error:
        raise InvalidRequest(f"can't write {given}: {error.strerror}", field=str(given)) from error
    return given


def _picture(given: Path | None) -> Path | None:
    if given is not None and given.suffix not in (".svg", ".png", ".pdf"):
        raise InvalidRequest(f"--plot {given} is not a .svg, .png or .pdf", field="plot")
    return _writable(given)


def _there(device: Device) -> Device:
    if device is Device.CUDA and not gpu_is_there():
        raise InvalidRequest("there is no CUDA device here", field="device")
    return device


Json = Annotated[Path, typer.Option("--json", metavar="FILE", help="Where the report goes.", callback=_writable)]
Seed = Annotated[int, typer.Option(help="Of everything that is random.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="A picture too: .svg, .png or .pdf.", callback=_picture)
]
Page = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="A page with plots too: .html.", callback=_writable)
]
Constants = Annotated[
    Path | None, typer.Option(metavar="FILE", help="What `calibrate` wrote.  [default: of a dense base, ours]")
]
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
    SGLANG = "sglang"


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


DeviceOption = Annotated[Device, typer.Option(help="auto: a GPU where there is one.", callback=_there)]
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
    from loadtest.base_model import BaseSize

    _measure("calibrate", report, scale, seed=seed, size=BaseSize(layers, experts), say=_say)


@app.command("catalog")
def catalog(
    report: Json, scale: ScaleOption = Scale.SMALL, plot: Plot = None, seed: Seed = 1, scratch: Scratch = None
) -> None:
    """Look-ups, opens, commits and imports, from a thousand policies to ten million (full: 20 GB of disk)."""
    _measure("catalog", report, scale, seed=seed, plot=plot, scratch=scratch, say=_say)


@app.command("cache")
def cache(report: Json, scale: ScaleOption = Scale.SMALL, plot: Plot = None, seed: Seed = 1) -> None:
    """Bytes that cache policies let be brought again on replayed traces, beside LRU."""
    _measure("cache", report, scale, seed=seed, plot=plot, say=_say)


@app.command("gateway")
def gateway(report: Json, scale: ScaleOption = Scale.SMALL, seed: Seed = 1) -> None:
    """What the gateway adds to a request, and how many a core carries."""
    _measure("gateway", report, scale, seed=seed)


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
    parts = [one.value for one in part or InstallPart]
    _measure(
        "install", report, scale, seed=seed, say=_say, engine=engine.value, device=device.value, parts=parts, plot=plot
    )


@app.command("lease")
def lease(report: Json, scale: ScaleOption = Scale.SMALL, seed: Seed = 1) -> None:
    """The round trip of a lease between a gateway's socket and a sidecar."""
    _measure("lease", report, scale, seed=seed)


@app.command("lora-kernels")
def lora_kernels(
    report: Annotated[
        Path, typer.Option("--json", "--out", metavar="FILE", help="Where the report goes.", callback=_writable)
    ],
    model: Annotated[Path, typer.Option(metavar="PATH", help="The base's config.json, or the folder that has it.")],
    rank: Annotated[int, typer.Option(min=1, help="The engine's max_rank.")] = 32,
    slots: Annotated[int, typer.Option(min=1, help="The engine's slots.")] = 8,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="In a batch; again for each. vLLM takes the nearest.  [default: 12 sizes from 16 to 8192]"
        ),
    ] = None,
    specialised: Annotated[
        bool, typer.Option("--specialised", help="Choose for an engine with --specialize-active-lora.")
    ] = False,
    configs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also the files for VLLM_TUNED_CONFIG_FOLDER.")
    ] = None,
    seed: Seed = 1,
) -> None:
    """vLLM's LoRA kernels on this machine's GPU over their configurations, beside vLLM's own, and files of the best."""
    from loadtest import lora_kernels

    summary = lora_kernels.run(
        report, model=model, rank=rank, slots=slots, tokens=tokens or lora_kernels.TOKENS,
        specialised=specialised, seed=seed, configs=configs, say=_say,
    )  # fmt: skip
    _show(summary, report)


@app.command("pack")
def pack(report: Json, scale: ScaleOption = Scale.SMALL, plot: Plot = None, seed: Seed = 1) -> None:
    """Packing an adapter of 37,248 tensors, beside reading it: time, sizes, and whether it comes back bit for bit."""
    _measure("pack", report, scale, seed=seed, plot=plot)


@app.command("peers")
def peers(report: Json, scale: ScaleOption = Scale.SMALL, seed: Seed = 1) -> None:
    """A new revision on eight nodes at once, which take its bytes from each other, or each from the store."""
    _measure("peers", report, scale, seed=seed, say=_say)


@app.command("placement")
def placement(report: Json, scale: ScaleOption = Scale.SMALL, seed: Seed = 1) -> None:
    """What a placement costs over 40 and 1,000 nodes, and how many policies a node moves that joins or leaves."""
    _measure("placement", report, scale, seed=seed)


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
    from loadtest.base_model import BaseSize

    size = BaseSize(layers, experts) if layers else None
    _measure("burst", report, scale, seed=seed, size=size, plot=page, say=_say)


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


# name -> what it is, of those that have an engine or a trainer on a device
ON_DEVICE = {
    "handoff": "From a step of training to the first token of it through a whole mesh, "
    "beside merging and reloading weights.",
    "multipolicy": "Three policies one after another and at once: wall time and peak memory; and 50 that are resident.",
}
# name -> what it is, of those that simulate a fleet
SIMULATED = {
    "two-nodes": "Simulated: 2048 policies at concurrency 230 on two nodes of 32 slots, beside a sticky hash.",
    "wave": "Simulated: of a catalog of a million, 2,300 policies asked five times each on 44 nodes of 64 slots.",
    "fairness": "Simulated: what one tenant's flood of cold policies does to another's requests.",
    "chaos": "Simulated: an hour (full: a day) in which everything that can die dies, with exact books at the end.",
}


def _on_device(name: str) -> Callable[..., None]:
    def command(
        report: Json,
        scale: ScaleOption = Scale.SMALL,
        plot: Plot = None,
        seed: Seed = 1,
        device: DeviceOption = Device.AUTO,
    ) -> None:
        _measure(name, report, scale, seed=seed, device=device.value, plot=plot, say=_say)

    return command


def _simulation(name: str) -> Callable[..., None]:
    def command(
        report: Json, scale: ScaleOption = Scale.SMALL, page: Page = None, seed: Seed = 1, constants: Constants = None
    ) -> None:
        told = {"engine": constants} if constants else {}
        _measure(name.replace("-", "_"), report, scale, seed=seed, plot=page, say=_say, **told)

    return command


for _commands, _make in ((ON_DEVICE, _on_device), (SIMULATED, _simulation)):
    for _name, _help in _commands.items():
        app.command(_name, help=_help)(_make(_name))


def _measure(module: str, report: Path, scale: Scale, **arguments: object) -> None:
    """Run a benchmark, which is imported for it alone, and show its figures."""
    run = importlib.import_module(f"loadtest.{module}").run
    _show(run(report, small=scale is Scale.SMALL, **arguments), report)


def _say(text: str) -> None:
    ERR.print(text, style="dim")


def _show(summary: dict[str, object], report: Path) -> None:
    tell_table(("FIGURE", "VALUE"), list(summary.items()), empty="Nothing was measured.")
    _say(f"Written to {report}")
