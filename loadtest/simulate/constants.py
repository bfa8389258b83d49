"""The engine model's constants: read from what ``roost loadtest calibrate`` wrote, never made up here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from wire.outcomes import InvalidRequest

MEASURED = Path(__file__).parent.parent / "results" / "engine.json"


class EngineConstants(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds. A step takes ``step_s``, ``sequence_s`` for each sequence in it and ``prefill_s`` for each prompt token;
    with adapters ``adapters_s`` more, ``adapter_s`` for each different one, ``adapter_prompt_s`` for each that has
    prompts in it and ``adapter_prefill_s`` for each token of those. ``request_s`` passes outside of the steps for each
    request, of which the server takes ``front_s`` for one at a time, and for calls.

    ``install_s`` and ``install_byte_s`` are the engine's own time for an adapter, during which no step runs;
    ``prepare_s`` what is done for it before, beside the steps. The same with ``stock_`` in front is for the stock path,
    an adapter folder read tensor by tensor. ``start_s`` is from the process to its first answer; ``fetch_s`` and
    ``fetch_byte_s`` bring an artifact from the store into the arena. ``adapter_bytes`` is the size of a revision.
    """

    step_s: float
    sequence_s: float
    prefill_s: float
    adapters_s: float
    adapter_s: float
    adapter_prompt_s: float
    adapter_prefill_s: float
    request_s: float
    front_s: float
    install_s: float
    install_byte_s: float
    prepare_s: float
    remove_s: float
    stock_install_s: float
    fetch_s: float
    fetch_byte_s: float
    start_s: float
    adapter_bytes: int
    max_batch: int = 256
    step_tokens: int = 2048

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number from 0, not {value}")
        if self.step_s + self.sequence_s <= 0 or self.max_batch < 1 or self.step_tokens < 1:
            raise ValueError("a step must take time, and hold at least one sequence and one token")

    def step_seconds(
        self, *, sequences: int, prompt_tokens: int = 0, adapters: int = 0, prompted: int = 0, adapter_tokens: int = 0
    ) -> float:
        """What a step takes with so many different ``adapters``, of which ``prompted`` have ``adapter_tokens`` of the
        prompts in it."""
        return (
            self.step_s
            + sequences * self.sequence_s
            + prompt_tokens * self.prefill_s
            + (adapters > 0) * self.adapters_s
            + adapters * self.adapter_s
            + prompted * self.adapter_prompt_s
            + adapter_tokens * self.adapter_prefill_s
        )


def read_constants(file: Path = MEASURED) -> tuple[EngineConstants, dict[str, Any]]:
    """The constants that a calibration wrote into ``file``, and what a report has to say of where they come from.

    Raises InvalidRequest where there is none: a model without measured constants says nothing.
    """
    try:
        report = msgspec.json.decode(file.read_bytes())
        constants = msgspec.convert(report["samples"]["constants"], EngineConstants)
    except FileNotFoundError:
        raise InvalidRequest(
            f"{file} does not exist: run `roost loadtest calibrate --json {file}` first", field="engine"
        ) from None
    except (KeyError, TypeError, msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"{file} holds no engine constants: {error}", field="engine") from None
    where = report.get("environment", {})
    told = {
        "engine": "loadtest.simulate.engine, a model of an engine, with constants fitted to a real one",
        "network": "loadtest.simulate.network, a model of ZeroMQ and TCP between processes",
        "storage": "loadtest.simulate.storage, a model of the artifact store and of the arena's memory",
        "constants": msgspec.to_builtins(constants),
        "fitted_to": {name: where.get(name) for name in ("engine", "processor", "cores", "commit")},
    }
    return constants, told
