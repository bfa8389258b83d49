"""A real vLLM asked for 64 policies at once that it has never seen: what cold costs over warm, ours and stock.

The base has as many layers and experts as Qwen3-30B-A3B, at a small hidden size: an adapter has 37,248 tensors. A mesh
serves it, and beside it a second engine of the same base gets the stock treatment: each client loads its own adapter's
folder through vLLM's endpoint, then asks. Rounds take turns between the two, with new policies each, and the same
requests come again at once when everything is loaded. In between, a stream of the base runs while others load.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from backends.interface import EngineSettings, Health
from backends.registry import make_backend
from backends.vllm.client import VllmClient
from catalog.names import parse_reference
from catalog.view import CatalogView
from ops.layout import Layout
from packer.shape import BaseShape
from wire.outcomes import EngineFailed

from .base_model import PLAIN_TOKENS, PUBLISHED, BaseSize, write_base
from .deployment import BASE, EngineMesh
from .generator import Generator, Sample, completion
from .lease import LeaseClient
from .pack import write_adapter
from .page import Chart, Line, write_page
from .report import environment, percentile, write_report

PROMPT, TOKENS = 64, 16
_ENGINE: dict[str, Any] = {"max_rank": 1, "max_num_seqs": 128, "extra_args": ("--no-enable-prefix-caching",)}
_CONTEXT, _STREAM_TOKENS, _STREAM_LEAD_S = 8192, 8000, 2.0
# more than the loads in flight and the queue behind them take
_OVER_THE_BOUND = 40
_QUEUED = 64
_LOADS_S = 120.0
# a tenant may take only a part of the queue
_TENANTS = 8


class Plan(msgspec.Struct, frozen=True):
    """How much is measured: ``policies`` at once, ``stock`` the stock way, in ``rounds``; ``crowd`` asks for one."""

    size: BaseSize
    policies: int
    stock: int
    rounds: int
    crowd: int


FULL = Plan(PUBLISHED, 64, 64, 3, 1000)
SMALL = Plan(PUBLISHED, 64, 16, 1, 256)


def run(
    file: Path, *, small: bool, seed: int, size: BaseSize | None = None, plot: Path | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Measure and write the report; returns the summary. ``size`` is another base than the published case's shape."""
    plan = SMALL if small else FULL
    if size is not None:
        plan = msgspec.structs.replace(plan, size=size)
    plan = msgspec.structs.replace(plan, size=msgspec.structs.replace(plan.size, context=_CONTEXT))
    with tempfile.TemporaryDirectory(prefix="roost-loadtest-") as scratch:
        root = Path(scratch)
        base = write_base(root / "base", plan.size, seed)
        engine = {**_ENGINE, "slots": plan.policies, "max_model_len": plan.size.context}
        engine["extra_args"] = list(_ENGINE["extra_args"])
        say("starting the mesh")
        with EngineMesh(root / "mesh", base, engine, node_table()) as mesh:
            measured = asyncio.run(_Run(mesh, root, base, plan, seed, say).run())
    summary = _summary(measured)
    told = {"base": msgspec.to_builtins(plan.size), "policies": plan.policies, "stock_policies": plan.stock}
    write_report(file, environment(seed=seed, engine="vllm") | told, measured, summary)
    if plot is not None:
        _draw(plot, measured, summary)
    return summary


def node_table() -> dict[str, object]:
    """What the mesh's configuration says of the node: a queue whose bound is what it is set to."""
    return {"loads_queued": _QUEUED, "loads_queued_s": 0.0, "arena_bytes": 1 << 30}


class _Run:
    """The phases, over one mesh and one stock engine."""

    def __init__(
        self, mesh: EngineMesh, root: Path, base: Path, plan: Plan, seed: int, say: Callable[[str], object]
    ) -> None:
        self._mesh = mesh
        self._root = root
        self._base = base
        self._plan = plan
        self._seed = seed
        self._say = say
        self._names: list[str] = []
        self._chance = np.random.default_rng(seed)
        self._through = Generator("127.0.0.1", mesh.port)

    async def run(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            name: []
            for name in (
                "cold",
                "warm",
                "stock_cold",
                "stock_warm",
                "quiet_gap_s",
                "loading_gap_s",
                "asking_gap_s",
                "warm_gap_s",
            )
        }
        stock = _StockEngine(self._root, self._base, self._plan)
        self._say("starting the stock engine")
        await stock.start()
        try:
            await self._one_each([BASE] * 8)
            for number in range(self._plan.rounds):
                self._say(f"round {number + 1}: {self._plan.policies} policies, through the mesh")
                policies = await self._publish(self._plan.policies)
                found["cold"].append(_timings(await self._one_each(policies)))
                found["warm"].append(_timings(await self._one_each(policies)))
                self._say(f"round {number + 1}: the stock path")
                folders = await asyncio.to_thread(stock.adapters, self._plan.stock, self._seed + 1000 * number)
                found["stock_cold"].append(_timings(await stock.burst(folders, self._prompts(len(folders)))))
                found["stock_warm"].append(_timings(await stock.ask(list(folders), self._prompts(len(folders)))))
                await stock.forget(list(folders))
                await self._beside_a_stream(found)
        finally:
            await stock.stop()
        await self._crowd(found)
        await self._over_the_bound(found)
        self._through.close()
        return found

    async def _beside_a_stream(self, found: dict[str, Any]) -> None:
        """A base stream's longest gap: alone, while policies load, while others load for requests that are as short as
        can be, and beside the same number of whole requests that are warm."""
        self._say("a base stream beside loads")
        others = self._names[-self._plan.policies :]
        policies = await self._publish(self._plan.policies)
        found["quiet_gap_s"].append(await self._gap_beside(lambda: asyncio.sleep(2.0)))
        found["loading_gap_s"].append(await self._gap_beside(lambda: self._loads(policies)))
        found["asking_gap_s"].append(await self._gap_beside(lambda: self._one_each(others, prompt=1, tokens=1)))
        found["warm_gap_s"].append(await self._gap_beside(lambda: self._one_each(policies)))

    async def _loads(self, policies: Sequence[str]) -> None:
        """All at once, and no requests."""
        layout = Layout.of(str(self._mesh.state))
        view, client = CatalogView.open(layout.catalog), LeaseClient(layout.socket("node"))
        try:
            resolved = [view.resolve(parse_reference(policy)) for policy in policies]
            client.release(*await asyncio.gather(*(client.acquire(one, _LOADS_S) for one in resolved)))
        finally:
            client.close()
            view.close()

    async def _gap_beside(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> float:
        request = completion(BASE, prompt=self._prompt(PROMPT), tokens=_STREAM_TOKENS)
        return (await self._through.beside(request, work, _STREAM_LEAD_S)).longest_gap_s

    async def _crowd(self, found: dict[str, Any]) -> None:
        """Many at once for one policy that nobody has asked for: how many fetches and installs does it cost?"""
        self._say("a crowd for one policy")
        (policy,) = await self._publish(1)
        before = await asyncio.to_thread(self._mesh.node)
        samples = await self._one_each([policy] * self._plan.crowd, tokens=2)
        after = await asyncio.to_thread(self._mesh.node)
        found["crowd_answered"] = sum(one.status == 200 for one in samples)
        found["single_flight_fetches"] = after["fetches"] - before["fetches"]
        found["single_flight_installs"] = after["installs"] - before["installs"]

    async def _over_the_bound(self, found: dict[str, Any]) -> None:
        """More cold policies at once than may wait: does a Retry-After come true?

        What a node tells is what it has seen, so that it sees as many others first. Policies that lost their slots to
        later ones are cold again.
        """
        self._say("more than may wait")
        count = _QUEUED + _OVER_THE_BOUND
        await self._publish(max(0, 2 * count - len(self._names)))
        await self._patiently(self._names[-count:])
        tried = await self._patiently(self._names[:count])
        found["bound_answered"] = sum(tries[-1].status == 200 for tries in tried)
        found["promises"] = [
            (refused.retry_after_s, tries[-1].first_token - refused.done)
            for tries in tried
            if tries[-1].status == 200
            for refused in tries[:-1]
        ]

    async def _patiently(self, policies: Sequence[str]) -> list[list[Sample]]:
        requests = [completion(policy, prompt=self._prompt(PROMPT), tokens=TOKENS) for policy in policies]
        intended = _now()
        return await asyncio.gather(*(self._through.patient(request, intended) for request in requests))

    async def _publish(self, count: int) -> list[str]:
        before = len(self._names)
        names = [f"burst-{place % _TENANTS}/p{before + place}" for place in range(count)]
        await asyncio.to_thread(self._mesh.publish_random, names, self._seed + before)
        self._names += names
        return names

    async def _one_each(self, models: Sequence[str], prompt: int = PROMPT, tokens: int = TOKENS) -> list[Sample]:
        requests = [completion(model, prompt=self._prompt(prompt), tokens=tokens) for model in models]
        return _checked(await self._through.at_once(requests))

    def _prompts(self, count: int) -> list[list[int]]:
        return [self._prompt(PROMPT) for _ in range(count)]

    def _prompt(self, length: int) -> list[int]:
        return [int(token) for token in self._chance.integers(0, PLAIN_TOKENS, length)]


class _StockEngine:
    """An engine of the same base whose clients load PEFT folders by themselves, as a stock server has it."""

    def __init__(self, root: Path, base: Path, plan: Plan) -> None:
        settings = EngineSettings(
            name="stock-0", base=BASE, model_path=str(base), fingerprint="f" * 64, slots=plan.stock,
            max_model_len=plan.size.context, dtype="float32", **_ENGINE,
        )  # fmt: skip
        self._client: VllmClient | None = None
        self._root = root / "stock"
        self._base = base
        self._backend = make_backend(settings, run_dir=self._root / "run", log_dir=self._root / "log")

    async def start(self) -> None:
        await self._backend.start()
        while (health := await self._backend.health()) is not Health.READY:
            if health is Health.DEAD:
                raise EngineFailed(f"the stock engine did not start: {self._backend.detail}")
            await asyncio.sleep(0.5)
        host, port = self._backend.address()
        self._client = VllmClient(host, port, self._backend.token())
        self._generator = Generator(host, port)

    @property
    def _loader(self) -> VllmClient:
        if self._client is None:
            raise RuntimeError("the stock engine was not started")
        return self._client

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.close()
        await self._backend.stop()

    def adapters(self, count: int, seed: int) -> dict[str, Path]:
        """Folders of new random adapters, by name."""
        shape = BaseShape.from_config((self._base / "config.json").read_bytes())
        made = {f"stock-{seed + place}": self._root / f"raw-{seed + place}" for place in range(count)}
        for place, folder in enumerate(made.values()):
            write_adapter(folder, shape, seed + place)
        return made

    async def burst(self, folders: dict[str, Path], prompts: Sequence[Sequence[int]]) -> list[Sample]:
        """Every client loads its adapter and asks, all at once; a request's time counts from before its load."""
        intended = _now()

        async def one(name: str, folder: Path, prompt: Sequence[int]) -> Sample:
            await self._loader.load(name, str(folder), 600.0)
            return await self._generator.one(self._request(name, prompt), intended)

        pairs = zip(folders.items(), prompts, strict=True)
        return _checked(list(await asyncio.gather(*(one(name, folder, prompt) for (name, folder), prompt in pairs))))

    async def ask(self, names: Sequence[str], prompts: Sequence[Sequence[int]]) -> list[Sample]:
        pairs = zip(names, prompts, strict=True)
        return _checked(await self._generator.at_once([self._request(name, prompt) for name, prompt in pairs]))

    async def forget(self, names: Sequence[str]) -> None:
        for name in names:
            await self._loader.unload(name, 60.0)

    def _request(self, name: str, prompt: Sequence[int]) -> bytes:
        return completion(name, prompt=prompt, tokens=TOKENS, token=self._backend.token())


def _now() -> float:
    return asyncio.get_running_loop().time()


def _checked(samples: list[Sample]) -> list[Sample]:
    failed = [one for one in samples if one.status != 200]
    if failed:
        raise EngineFailed(
            f"{len(failed)} of {len(samples)} requests failed, one with {failed[0].status}: {failed[0].text}"
        )
    return samples


def _timings(samples: Sequence[Sample]) -> dict[str, list[float]]:
    return {
        "first_token_s": sorted(round(one.first_token - one.intended, 4) for one in samples),
        "total_s": sorted(round(one.done - one.intended, 4) for one in samples),
    }


def _summary(found: dict[str, Any]) -> dict[str, Any]:
    promises = [true / said for said, true in found["promises"]]
    summary: dict[str, Any] = {
        "ttft_cold_over_warm_p95": _ratio(found["cold"], found["warm"], "first_token_s"),
        "total_cold_over_warm_p95": _ratio(found["cold"], found["warm"], "total_s"),
        "stock_ttft_cold_over_warm_p95": _ratio(found["stock_cold"], found["stock_warm"], "first_token_s"),
        "stock_total_cold_over_warm_p95": _ratio(found["stock_cold"], found["stock_warm"], "total_s"),
        "base_gap_over_quiet": _median_ratio(found["loading_gap_s"], found["quiet_gap_s"]),
        "base_gap_beside_first_requests_over_quiet": _median_ratio(found["asking_gap_s"], found["quiet_gap_s"]),
        "base_gap_beside_warm_requests_over_quiet": _median_ratio(found["warm_gap_s"], found["quiet_gap_s"]),
        "single_flight_fetches": found["single_flight_fetches"],
        "single_flight_installs": found["single_flight_installs"],
    }
    if promises:
        summary["retry_after_ratio_p95"] = round(percentile([max(one, 1 / one) for one in promises], 0.95), 3)
    return summary


def _ratio(cold: Sequence[dict[str, list[float]]], warm: Sequence[dict[str, list[float]]], figure: str) -> float:
    """The median over rounds of p95 over p95."""
    return _median_ratio(*([percentile(one[figure], 0.95) for one in rounds] for rounds in (cold, warm)))


def _median_ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    return round(statistics.median(one / other for one, other in zip(ours, others, strict=True)), 3)


def _draw(file: Path, found: dict[str, Any], summary: dict[str, Any]) -> None:
    names = {"cold": "Roost, cold", "warm": "Roost, warm", "stock_cold": "stock, cold", "stock_warm": "stock, warm"}

    def distributions(title: str, figure: str) -> Chart:
        lines = [
            Line.distribution(label, [one for each in found[name] for one in each[figure]])
            for name, label in names.items()
        ]
        return Chart(title, "share of requests", "seconds", lines)

    def staircase(name: str) -> Line:
        times = found[name][0]["first_token_s"]
        return Line(names[name], times, [float(place + 1) for place in range(len(times))])

    charts = [
        distributions("Time to the first token", "first_token_s"),
        distributions("Time to the whole answer", "total_s"),
        Chart("Cold requests that had a token", "requests", "seconds", [staircase("cold"), staircase("stock_cold")]),
    ]
    write_page(file, "64 cold policies at once", summary, charts, {})
