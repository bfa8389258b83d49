"""Files spoilt at random are read or refused with a reason: no crash, no hang, nothing else raised."""

from __future__ import annotations

import io
import random
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from packer.formats import pack_adapter
from packer.inspect import inspect
from packer.revision import RevisionFile, check_fit
from packer.shape import BaseShape
from packer.unpack import write_peft
from tests.packer.adapters import packed
from tests.packer.moe import base, config, folder_of, outer, per_expert, stacked
from tests.packer.test_megatron import shards
from wire.outcomes import RoostError

# files in all, over what each test goes through
COUNTS = [pytest.param(20_000), pytest.param(1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(36_000)])]
_TENSORS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PARAMETERS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "peft_version": "0.21.2"}
# no more than this beside twice the file: the interpreter's own small change
_ALLOWANCE = 1 << 20
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


class Subject(NamedTuple):
    """A good adapter and its base; ``files`` are spoilt one at a time, as often as each is named."""

    folder: Path
    base: str
    files: tuple[str, ...]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> list[Subject]:
    root = tmp_path_factory.mktemp("good")
    shape = base("Qwen3-MoE")
    peft = (_TENSORS, _TENSORS, _TENSORS, _CONFIG)
    shards(root / "shards", per_expert(shape), (2, 1, 1, 2))
    sharded = ("adapter-tp0-ep0-pp0.safetensors", "adapter-tp1-ep0-pp0.safetensors", "megatron.json", _CONFIG)
    return [
        Subject(folder_of(root / "dense", per_expert(base("Llama")), config()), "Llama", peft),
        Subject(folder_of(root / "own", per_expert(shape), config()), "Qwen3-MoE", peft),
        Subject(folder_of(root / "stacked", stacked(base("gpt-oss"))[0], config(**_PARAMETERS)), "gpt-oss", peft),
        Subject(folder_of(root / "outer", outer(shape), config()), "Qwen3-MoE", peft),
        Subject(folder_of(root / "latent", per_expert(base("GLM-5")), config()), "GLM-5", peft),
        Subject(root / "shards", "Qwen3-MoE", sharded),
    ]


def reach_of(name: str) -> int:
    """How far into a file most of the damage goes: its header."""
    return 12_000 if name.endswith(".safetensors") else 1_000


def spoilings(count: int, files: list[tuple[int, str, bytes]]) -> Iterator[tuple[int, str, bytes]]:
    """(subject, file's name, spoilt bytes), ``count`` of them."""
    random_ = random.Random(count)
    for _ in range(count):
        subject, name, good = random_.choice(files)
        yield subject, name, spoilt(random_, good, reach_of(name))


def refused(attempt: Callable[[], object]) -> bool:
    """Whether it is refused; anything but a RoostError with a reason of sensible length comes through."""
    try:
        attempt()
    except RoostError as error:
        assert 10 < len(error.message) < 900
        return True
    return False


@pytest.mark.parametrize("count", COUNTS)
def test_spoilt_folders(count: int, subjects: list[Subject]) -> None:
    count = count * 3 // 4
    files = [
        (number, name, (subject.folder / name).read_bytes())
        for number, subject in enumerate(subjects)
        for name in subject.files
    ]
    shapes = [base(subject.base) for subject in subjects]
    bad = 0
    for turn, (number, name, content) in enumerate(spoilings(count, files)):
        subject = subjects[number]
        path = subject.folder / name
        good = path.read_bytes()
        path.write_bytes(content)
        shape = shapes[number]
        traced = turn % 50 == 0
        if traced:
            tracemalloc.start()
        bad += refused(partial(pack_adapter, subject.folder, shape, io.BytesIO()))
        assert inspect(subject.folder, shape if turn % 2 else None).kind
        if traced:
            held = sum(file.stat().st_size for file in subject.folder.iterdir())
            assert tracemalloc.get_traced_memory()[1] < 2 * held + _ALLOWANCE
            tracemalloc.stop()
        path.write_bytes(good)
    assert bad > count // 2


def _check(content: bytes, shape: BaseShape) -> None:
    check_fit(RevisionFile(content), shape)


@pytest.mark.parametrize("count", COUNTS)
def test_spoilt_revisions(count: int, subjects: list[Subject], tmp_path: Path) -> None:
    count //= 4
    whole = [subject for subject in subjects if subject.files[0] == _TENSORS]
    shapes = [base(subject.base) for subject in whole]
    good = [(number, "r.safetensors", packed(subject.folder, shapes[number])) for number, subject in enumerate(whole)]
    path = tmp_path / "r.safetensors"
    bad = 0
    for turn, (number, _, content) in enumerate(spoilings(count, good)):
        path.write_bytes(content)
        if refused(partial(_check, content, shapes[number])):
            bad += 1
        else:
            write_peft(content, tmp_path / f"back{turn}")
        assert inspect(path, shapes[number] if turn % 2 else None).kind
    assert bad > count // 2
