"""Who asks for what, and when: seeded sequences of arrivals, for real engines and for simulated ones alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import msgspec


class Arrival(msgspec.Struct, frozen=True, order=True):
    """A request for ``model`` (a policy, or the base), ``at`` seconds from the beginning."""

    at: float
    model: str


def policy_names(count: int, tenant: str = "load") -> list[str]:
    return [f"{tenant}/p{number:05d}" for number in range(count)]


def poisson(rate: float, seconds: float, chance: random.Random) -> Iterator[float]:
    """Arrival times at ``rate`` a second on average, each independent of the others."""
    at = chance.expovariate(rate)
    while at < seconds:
        yield at
        at += chance.expovariate(rate)


def unique_burst(policies: Sequence[str]) -> list[Arrival]:
    """Every policy once, all at the same time."""
    return [Arrival(0.0, policy) for policy in policies]


def uniform(policies: Sequence[str], rate: float, seconds: float, chance: random.Random) -> list[Arrival]:
    """Any policy, whatever was asked before: more of them than there are slots is a hot set larger than the slots."""
    return [Arrival(at, chance.choice(policies)) for at in poisson(rate, seconds, chance)]


def weak_locality(
    policies: Sequence[str], rate: float, seconds: float, chance: random.Random, *, again: float = 0.3, depth: int = 64
) -> list[Arrival]:
    """With probability ``again`` one of the last ``depth`` that were asked for, else any."""
    found: list[Arrival] = []
    for at in poisson(rate, seconds, chance):
        recent = found[-depth:]
        model = chance.choice(recent).model if recent and chance.random() < again else chance.choice(policies)
        found.append(Arrival(at, model))
    return found


def drifting_zipf(
    policies: Sequence[str],
    rate: float,
    seconds: float,
    chance: random.Random,
    *,
    exponent: float = 1.0,
    swaps_per_s: float = 1.0,
) -> list[Arrival]:
    """Popularity falls by rank to the power of ``exponent``; now and then two policies change their ranks."""
    ranked = list(policies)
    chance.shuffle(ranked)
    weights = list(accumulate((place + 1) ** -exponent for place in range(len(ranked))))
    found, swapped = [], 0.0
    for at in poisson(rate, seconds, chance):
        while swapped + 1 / swaps_per_s < at:
            swapped += 1 / swaps_per_s
            one, other = chance.randrange(len(ranked)), chance.randrange(len(ranked))
            ranked[one], ranked[other] = ranked[other], ranked[one]
        found.append(Arrival(at, chance.choices(ranked, cum_weights=weights)[0]))
    return found


def rounds_in_random_order(
    policies: Sequence[str], rounds: int, seconds: float, chance: random.Random
) -> list[Arrival]:
    """Every policy ``rounds`` times, in random order, evenly over ``seconds``."""
    models = [policy for policy in policies for _ in range(rounds)]
    chance.shuffle(models)
    return [Arrival(place * seconds / len(models), model) for place, model in enumerate(models)]


def beside_a_base(arrivals: Sequence[Arrival], base: str, rate: float, chance: random.Random) -> list[Arrival]:
    """The same with requests for the base all the time."""
    seconds = max((one.at for one in arrivals), default=0.0) + 1.0
    return sorted([*arrivals, *(Arrival(at, base) for at in poisson(rate, seconds, chance))])


def merged(*streams: Sequence[Arrival]) -> list[Arrival]:
    """In the order of time."""
    return sorted(one for stream in streams for one in stream)


Scenario = Callable[[Sequence[str], float, float, random.Random], list[Arrival]]

# (policies, rate, seconds, chance) -> arrivals
SCENARIOS: dict[str, Scenario] = {
    "unique-burst": lambda policies, rate, seconds, chance: unique_burst(policies),
    "hot-set": uniform,
    "weak-locality": weak_locality,
    "zipf-drift": drifting_zipf,
    "wave": lambda policies, rate, seconds, chance: rounds_in_random_order(policies, 5, seconds, chance),
}
