"""What a calibration asks of the real engine and fits nothing to, asked of the model: how far are they apart?"""

from __future__ import annotations

import asyncio
from typing import Any

from backends.interface import EngineSettings, Installable

from .deployment import BASE
from .simulate.backend import EngineProcess, ModelBackend
from .simulate.clock import simulate
from .simulate.constants import EngineConstants
from .simulate.engine import Sequence

SLOTS = 16
# so many adapters' requests at once
CHECK_SEQUENCES, CHECK_PROMPT, CHECK_TOKENS = 12, 64, 16
# a stream is looked at for so long before as many adapters are loaded beside it as there are slots
LEAD_S = 1.0
SHORT = 16
_FOR_LONG = 8000


def model_over_real(constants: EngineConstants, samples: dict[str, Any]) -> dict[str, float]:
    """How far the model is from what no constant was fitted to: adapters that answer, and that are loaded, at once."""
    answered = simulate(lambda: _answered_at_once(constants))
    loaded = simulate(lambda: _loaded_at_once(constants))
    return {
        "model_over_real": round(answered / min(samples["check_s"]), 3),
        "loads_model_over_real": round(loaded / min(seconds for seconds, _ in samples["loads_check_s"]), 3),
    }


class _Engine:
    """An engine of the model as the session asks the real one."""

    def __init__(self, constants: EngineConstants) -> None:
        settings = EngineSettings(name="modelled", base=BASE, fingerprint="f" * 64, slots=SLOTS)
        self.process = EngineProcess(settings, constants, stock=False)
        self.process.start()
        self.backend = ModelBackend(self.process)
        self._loop = asyncio.get_running_loop()

    async def install(self, adapter: str) -> None:
        length = self.process.constants.adapter_bytes
        await self.backend.install(
            Installable(
                adapter=adapter, digest="", rank=1, segment="", offset=0, length=length, generation=1,
                view=lambda: memoryview(adapter.encode()),
            ),
            120.0,
        )  # fmt: skip

    def ask(self, adapter: str, prompt: int, tokens: int) -> asyncio.Future[None]:
        end: asyncio.Future[None] = self._loop.create_future()

        def on_token(content: str, last: bool) -> None:
            if last:
                end.set_result(None)

        assert self.process.model is not None, "it was started"
        sequence = Sequence(adapter, prompt, tokens, on_token, lambda message: None)
        self._loop.call_later(
            self.process.passes_in(self.process.constants.request_s), self.process.model.submit, sequence
        )
        return end


async def _answered_at_once(constants: EngineConstants) -> float:
    """Seconds until the last of the check's requests has ended."""
    loop = asyncio.get_running_loop()
    engine = _Engine(constants)
    names = [f"a{place}" for place in range(CHECK_SEQUENCES)]
    for name in names:
        await engine.install(name)
    begun = loop.time()
    await asyncio.gather(*(engine.ask(name, CHECK_PROMPT, CHECK_TOKENS) for name in names))
    return loop.time() - begun


async def _loaded_at_once(constants: EngineConstants) -> float:
    """Seconds until all adapters that were to be loaded beside a stream have been."""
    loop = asyncio.get_running_loop()
    engine = _Engine(constants)
    engine.ask("", SHORT, _FOR_LONG)
    await asyncio.sleep(LEAD_S)
    begun = loop.time()
    await asyncio.gather(*(engine.install(f"a{place}") for place in range(SLOTS)))
    return loop.time() - begun
