"""What a recipe is told, as TOML."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from wire.outcomes import InvalidRequest

T = TypeVar("T", bound="Config")
S = TypeVar("S", bound=msgspec.Struct)


# the fields that name files or folders
FILES = ("train", "held_out", "out", "test", "tokenizer")


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all recipes share.

    ``policy`` (``name``, or ``tenant/name``) over ``base`` is trained on the items of ``train`` and judged by those of
    ``held_out`` (``held_out_items`` of them; 0: all), both JSON lines. Everything about the run is kept in ``out``.
    ``tokenizer`` is a folder or a name that transformers knows (the base's name where it is empty). With ``chat`` a
    prompt is a user's message in the model's chat template, else text as it stands; an answer ends with the
    tokenizer's end token. ``stop`` ends a sample too.

    A step is over ``batch`` items. A checkpoint is saved every ``save_every`` steps, and held-out items are looked at
    every ``evaluate_every`` steps (0: only before and after).
    """

    base: str
    policy: str
    train: str
    held_out: str
    out: str
    held_out_items: int = 0
    tokenizer: str = ""
    chat: bool = False
    stop: tuple[str, ...] = ()
    rank: int = 16
    seed: int = 0
    learning_rate: float = 1e-3
    steps: int = 50
    batch: int = 16
    save_every: int = 10
    evaluate_every: int = 0


class Sft(Config, frozen=True):
    """Supervised: items are ``{"prompt", "answer"}``. With ``labels``, the likeliest of them is an item's class.

    ``max_tokens`` bounds an answer that is sampled for an evaluation; without ``held_out`` there is none.
    """

    held_out: str = ""

    labels: tuple[str, ...] = ()
    max_tokens: int = 32


class Dpo(Config, frozen=True):
    """Direct preference optimisation against the base: items are ``{"prompt", "chosen", "rejected"}``."""

    beta: float = 0.1


class Grpo(Config, frozen=True):
    """Group-relative policy optimisation: items are ``{"prompt", "answer"}``, judged by ``reward`` (see ``rewards``).

    A step samples ``group`` answers to each of ``batch`` prompts. ``loss`` is importance_sampling, ppo or cispo. With a
    ``kl_coefficient``, straying from the base is made dear. An evaluation samples ``evaluation_samples`` answers a
    prompt.
    """

    reward: str = "exact"
    group: int = 8
    temperature: float = 1.0
    max_tokens: int = 64
    loss: str = "importance_sampling"
    kl_coefficient: float = 0.0
    evaluation_samples: int = 1


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Successive halving over SFT runs: all at once; after each of ``rounds`` (steps so far) the better half goes on.

    A candidate is ``sft`` with one value of each field in ``space``: all combinations, in order. What is best has most
    of ``metric`` on the held-out items; the winner and the median candidate are then judged on those of ``test``.
    """

    sft: Sft
    space: dict[str, tuple[Any, ...]]
    rounds: tuple[int, ...]
    metric: str
    test: str

    def candidates(self) -> list[Sft]:
        """In order, each with a policy and a folder of its own. Raises InvalidRequest."""
        given = msgspec.to_builtins(self.sft)
        found = []
        for place, values in enumerate(itertools.product(*self.space.values())):
            changed = dict(zip(self.space, values, strict=True))
            own = {"policy": f"{self.sft.policy}-{place}", "out": str(Path(self.sft.out) / f"candidate-{place}")}
            found.append(_check(_convert(given | changed | own | {"steps": self.rounds[-1]}, Sft, "sft.")))
        return found


def load(file: Path, kind: type[T]) -> T:
    """A recipe's configuration; paths in it are relative to its folder. Raises InvalidRequest that names the field."""
    return _check(_convert(_anchored(_read(file), file.absolute().parent), kind, ""))


def load_search(file: Path) -> Search:
    """The same for a search."""
    tree = _read(file)
    if isinstance(tree.get("sft"), dict):
        tree["sft"] = _anchored(tree["sft"], file.absolute().parent)
    found = _convert(_anchored(tree, file.absolute().parent), Search, "")
    if not found.rounds or list(found.rounds) != sorted(set(found.rounds)) or found.rounds[0] < 1:
        raise _invalid("rounds", f"expected numbers of steps that grow, got {list(found.rounds)}")
    for name, values in found.space.items():
        if name not in Sft.__struct_fields__ or name in {"policy", "out", "steps", "held_out", "base"}:
            raise _invalid(f"space.{name}", "is not a field that candidates may differ in")
        if not values:
            raise _invalid(f"space.{name}", "has no values")
    if len(found.candidates()) < 2:
        raise _invalid("space", "makes a single candidate: there is nothing to choose from")
    return found


def _check(config: T) -> T:
    for name in ("base", "policy", "train", "out", "held_out"):
        if not getattr(config, name) and not (name == "held_out" and isinstance(config, Sft)):
            raise _invalid(name, "is empty")
    least = {"rank": 1, "steps": 1, "batch": 1, "save_every": 1, "evaluate_every": 0, "held_out_items": 0}
    if isinstance(config, Sft | Grpo):
        least["max_tokens"] = 1
    if isinstance(config, Grpo):
        least |= {"group": 2, "evaluation_samples": 1}
        if config.loss not in ("importance_sampling", "ppo", "cispo"):
            raise _invalid("loss", f"expected importance_sampling, ppo or cispo, got {config.loss!r}")
        _positive("temperature", config.temperature)
        if not (math.isfinite(config.kl_coefficient) and config.kl_coefficient >= 0):
            raise _invalid("kl_coefficient", f"expected 0 or more, got {config.kl_coefficient}")
    if isinstance(config, Dpo):
        _positive("beta", config.beta)
    if isinstance(config, Sft) and len(config.labels) == 1:
        raise _invalid("labels", "has a single label: two or more make classes")
    for name, bound in least.items():
        if getattr(config, name) < bound:
            raise _invalid(name, f"expected {bound} or more, got {getattr(config, name)}")
    _positive("learning_rate", config.learning_rate)
    return config


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise _invalid(name, f"expected a number above 0, got {value}")


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _invalid(str(file), str(error.strerror)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _invalid(str(file), str(error)) from None


def _anchored(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """``tree`` with its paths made absolute; a tokenizer is one where such a folder is there."""
    for name in FILES:
        value = tree.get(name)
        if isinstance(value, str) and value and (name != "tokenizer" or (folder / value).is_dir()):
            tree[name] = str(folder / Path(value).expanduser())
    return tree


def _convert(tree: Mapping[str, Any], kind: type[S], prefix: str) -> S:
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{prefix}{error}", field="config") from None


def _invalid(name: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {reason}", field=name)
