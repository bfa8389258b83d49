"""Adapters of real models at their real size, of rank 1, packed and given back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.pack import write_adapter
from packer.formats import pack_adapter
from packer.peft import TENSORS_NAME
from packer.revision import RevisionFile
from packer.shape import BaseShape
from packer.unpack import write_peft
from tests.packer.test_architectures import PUBLISHED

# those of a hundred megabytes or less are always packed, those of up to three gigabytes with the full counts
_LIGHT = {"Qwen3-30B-A3B", "Mixtral-8x7B", "Moonlight-16B-A3B"}
MODELS = [pytest.param(name, marks=[] if name in _LIGHT else [pytest.mark.soak]) for name in PUBLISHED]


@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_there_and_back(name: str, tmp_path: Path) -> None:
    shape = BaseShape.from_config(json.dumps(PUBLISHED[name]).encode())
    write_adapter(tmp_path / "raw", shape, seed=1)
    with (tmp_path / "packed").open("wb") as out:
        facts = pack_adapter(tmp_path / "raw", shape, out)
    file = RevisionFile.open(tmp_path / "packed")
    assert file.facts() == facts
    write_peft(file.buffer, tmp_path / "back")
    raw, back = ((tmp_path / folder / TENSORS_NAME).open("rb") for folder in ("raw", "back"))
    with raw, back:
        while block := raw.read(8 << 20):
            assert back.read(len(block)) == block
        assert not back.read(1)
