"""The course of a simulation, looked at now and then: residency, loads, and what each node does."""

from __future__ import annotations

import asyncio

from loadtest.page import Chart, Line

from .world import World

_LOOKS = 400


class Recorder:
    """Looks at every node each ``every_s``, which doubles when there are many looks, until ``stop``."""

    def __init__(self, world: World, every_s: float = 0.25) -> None:
        self._world = world
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._begun = self._loop.time()
        self.times: list[float] = []
        self.serving: dict[str, list[float]] = {node.name: [] for node in world.nodes}
        self.resident: dict[str, list[float]] = {node.name: [] for node in world.nodes}
        self.running: dict[str, list[float]] = {node.name: [] for node in world.nodes}
        self.loaded: list[float] = []
        self._timer = self._loop.call_later(0.0, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def charts(self) -> list[Chart]:
        """The load staircase, residency over time, and each node's requests under way."""
        return [
            Chart("Loads that ended", "installs", "seconds", [Line("all nodes", self.times, self.loaded)]),
            Chart("Revisions in slots", "revisions", "seconds", self._lines(self.serving)),
            Chart("Revisions in arenas", "revisions", "seconds", self._lines(self.resident)),
            Chart("Requests in engines", "requests", "seconds", self._lines(self.running)),
        ]

    def _lines(self, series: dict[str, list[float]]) -> list[Line]:
        return [Line(name, self.times, values) for name, values in series.items()]

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._every_s, self._look)
        self.times.append(self._loop.time() - self._begun)
        installed = 0
        for node in self._world.nodes:
            state = node.sidecar.machine.state if node.sidecar is not None else None
            models = [engine.model for engine in node.engines.values() if engine.model is not None]
            installed += node.count("installed")
            self.serving[node.name].append(float(sum(len(model.installed) for model in models)))
            self.resident[node.name].append(float(len(list(state.cache))) if state is not None else 0.0)
            self.running[node.name].append(float(sum(model.unfinished for model in models)))
        self.loaded.append(float(installed))
        if len(self.times) > _LOOKS:
            self._halve()

    def _halve(self) -> None:
        """Every other look is enough from now on."""
        self._every_s *= 2
        for values in (
            self.times,
            self.loaded,
            *self.serving.values(),
            *self.resident.values(),
            *self.running.values(),
        ):
            del values[1::2]
