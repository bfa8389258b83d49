"""A disk that is really full: a file system of one mebibyte, mounted where nobody else sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.catalog.processes import ROOT

MOUNT = 'mount -t tmpfs -o size=1m none "$1/small" && exec "$2" -m tests.catalog.full_disk "$3" "$1"'


def run_scenario(full: str, folder: Path) -> dict[str, object]:
    (folder / "small").mkdir()
    # root may mount; anybody else may in a user namespace, as root of that
    namespace = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    ended = subprocess.run(
        [*namespace, "sh", "-c", MOUNT, "sh", str(folder), sys.executable, full],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found: dict[str, object] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize(("full", "too_much_at_once"), [("journal", "refused"), ("store", "added")])
def test_a_full_disk_refuses_publishes_and_serves_on(full: str, too_much_at_once: str) -> None:
    right = {"exact": True, "latest": True, "differences": []}
    with tempfile.TemporaryDirectory(prefix="roost-") as folder:
        found = run_scenario(full, Path(folder))
    assert found["published_before"] >= 3  # type: ignore[operator]
    assert found == {
        "published_before": found["published_before"],
        "published_after": 3,
        "refused": 3,
        "too_much_at_once": too_much_at_once,
        "found_while_full": right,
        "found_after": right,
        "partial": [],
        "exit": 0,
    }
