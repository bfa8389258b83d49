"""Files spoilt at random are read or refused with a reason: no crash, no hang, nothing else raised."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from packer.inspect import inspect
from packer.revision import RevisionFile, check_fit
from packer.shape import BaseShape
from tests.packer.adapters import packed
from wire.outcomes import RoostError

COUNTS = [pytest.param(1_500), pytest.param(200_000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])]
SCRAPS = (
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"-",
    b"1e9",
    b"99999999999999999999",
    b"null",
    b"\\u0000",
    b"\\ud800",
    b"\xff",
)


def spoilt(random_: random.Random, file: bytes, reach: int) -> bytes:
    """``file`` with a few changes within its first ``reach`` bytes: other bytes, scraps, cuts, copies."""
    spoiling = bytearray(file)
    for _ in range(random_.randint(1, 3)):
        at = random_.randrange(max(1, min(reach, len(spoiling))))
        kind = random_.randrange(5)
        if kind == 0:
            spoiling[at : at + 1] = bytes([random_.randrange(256)])
        elif kind == 1:
            scrap = random_.choice(SCRAPS)
            spoiling[at : at + len(scrap)] = scrap
        elif kind == 2:
            del spoiling[at : at + random_.randrange(1, 40)]
        elif kind == 3:
            spoiling[at:at] = spoiling[at : at + random_.randrange(1, 40)]
        else:
            del spoiling[random_.randrange(len(spoiling) + 1) :]
    return bytes(spoiling)


@pytest.mark.parametrize("count", COUNTS)
def test_spoilt_revisions(count: int, revision: bytes, shape: BaseShape) -> None:
    random_ = random.Random(count)
    refused = 0
    for _ in range(count):
        try:
            check_fit(RevisionFile(spoilt(random_, revision, 8_000)), shape)
        except RoostError as error:
            refused += 1
            assert 10 < len(error.message) < 600
    assert refused > count // 2


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_spoilt_folders(count: int, name: str, adapter: Path, shape: BaseShape, tmp_path: Path) -> None:
    random_ = random.Random(count)
    folder = shutil.copytree(adapter, tmp_path / "a")
    good = (folder / name).read_bytes()
    refused = 0
    for number in range(count):
        (folder / name).write_bytes(spoilt(random_, good, 8_000))
        try:
            packed(folder, shape)
        except RoostError as error:
            refused += 1
            assert 10 < len(error.message) < 600
        if number % 10 == 0:
            assert inspect(folder).kind
    assert refused > count // 2
