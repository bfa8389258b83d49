"""Tries configurations on a batch, beside vLLM's own, and says which is worth writing down."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from .configurations import Configuration, label
from .shapes import Kernel, Work

# a candidate's share of the default's time; above it the default stays
WORTH = 0.97
CHOOSING_ROUNDS, CONFIRMING_ROUNDS = 5, 9
DEFAULT = "default"


class Launches(msgspec.Struct, frozen=True):
    """For how many adapters the kernels of a batch are launched. ``specialised``: choose for an engine that is told
    ``--specialize-active-lora``."""

    every: int
    active: int
    specialised: bool = False

    @property
    def chosen_for(self) -> int:
        return self.active if self.specialised else self.every


class Batch(Protocol):
    """One kernel with the tensors of one batch, in a place where it runs."""

    def default(self) -> Configuration:
        """What vLLM takes when it is told nothing."""

    def fault(self, configuration: Configuration) -> str | None:
        """Run it once: why it can't be used, or None where its output is the default's."""

    def timer(self, configuration: Configuration, launched: int) -> Callable[[], float]:
        """Each call of what is returned measures: the microseconds of a call of the kernel."""


class Measured(msgspec.Struct, frozen=True):
    """A kernel on a batch. ``choosing`` has microseconds by configuration and round; ``confirming`` those of the
    default and of the fastest in rounds of their own, which no choice was made by, in both launches. ``tuned`` is the
    fastest where it is worth it, else the default."""

    kernel: Kernel
    tokens: int
    launches: Launches
    default: Configuration
    fastest: Configuration
    choosing: dict[str, list[float]]
    confirming: dict[str, list[float]]
    left_out: dict[str, str]

    @property
    def wins(self) -> bool:
        first, second = _variants(self.launches.specialised)
        if self.fastest == self.default:
            return False
        return _median_ratio(self.confirming[second], self.confirming[first]) < WORTH

    @property
    def tuned(self) -> Configuration:
        return self.fastest if self.wins else self.default

    def samples(self, *, tuned: bool, specialised: bool) -> list[float]:
        """By round: the default's, or those of what is written down."""
        return self.confirming[_variants(specialised)[1 if tuned and self.wins else 0]]

    def told(self) -> dict[str, Any]:
        """As the report has it."""
        return {
            "launched": msgspec.to_builtins(self.launches),
            "default": label(self.default),
            "tuned": label(self.tuned),
            "choosing_us": _rounded(self.choosing),
            "confirming_us": _rounded(self.confirming),
            "left_out": self.left_out,
        }


def measure(
    batch: Batch, kernel: Kernel, tokens: int, launches: Launches, configurations: Sequence[Configuration]
) -> Measured:
    """Try all ``configurations``, then the fastest once more."""
    default = batch.default()
    found = {DEFAULT: default}
    left_out = {}
    for configuration in configurations:
        if configuration == default:
            continue
        if fault := batch.fault(configuration):
            left_out[label(configuration)] = fault
        else:
            found[label(configuration)] = configuration
    timers = {name: batch.timer(one, launches.chosen_for) for name, one in found.items()}
    choosing = _interleaved(timers, CHOOSING_ROUNDS)
    fastest = found[min(choosing, key=lambda name: statistics.median(choosing[name]))]
    timers = {}
    for specialised, launched in ((False, launches.every), (True, launches.active)):
        for variant, one in zip(_variants(specialised), (default, fastest), strict=True):
            if variant == _variants(specialised)[0] or fastest != default:
                timers[variant] = batch.timer(one, launched)
    confirming = _interleaved(timers, CONFIRMING_ROUNDS)
    return Measured(kernel, tokens, launches, default, fastest, choosing, confirming, left_out)


def summary(work: Work, measured: Sequence[Measured]) -> dict[str, Any]:
    """Microseconds of a layer's kernels (the mean over layers), by tokens, and the ratios by round."""
    figures: dict[str, Any] = {}
    for tokens in sorted({one.tokens for one in measured}):
        batch = [one for one in measured if one.tokens == tokens]
        layer = {
            name: _layer(work, [(one.kernel, one.samples(tuned=tuned, specialised=specialised)) for one in batch])
            for name, tuned, specialised in (
                ("default", False, False), ("tuned", True, False),
                ("default_specialised", False, True), ("tuned_specialised", True, True),
            )
        }  # fmt: skip
        figures |= {f"layer_{tokens}_{name}_us": round(statistics.median(rounds), 1) for name, rounds in layer.items()}
        for name in ("tuned", "tuned_specialised"):
            figures[f"layer_{tokens}_{name}_over_default"] = round(_median_ratio(layer[name], layer["default"]), 3)
    figures["kernels_tuned"] = sum(one.wins for one in measured)
    figures["kernels_at_default"] = sum(not one.wins for one in measured)
    figures["candidates_left_out"] = sum(len(one.left_out) for one in measured)
    return figures


def _layer(work: Work, kernels: Sequence[tuple[Kernel, list[float]]]) -> list[float]:
    """By round, the microseconds of the kernels of a layer."""
    rounds = zip(*(samples for _, samples in kernels), strict=True)
    calls = [work.calls[kernel] for kernel, _ in kernels]
    return [sum(n * us for n, us in zip(calls, one, strict=True)) / work.layers for one in rounds]


def _interleaved(timers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            samples[name].append(timer())
    return samples


def _variants(specialised: bool) -> tuple[str, str]:
    end = "_specialised" if specialised else ""
    return f"default{end}", f"fastest{end}"


def _median_ratio(ours: Sequence[float], baseline: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, baseline, strict=True))


def _rounded(samples: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {name: [round(one, 2) for one in found] for name, found in samples.items()}
