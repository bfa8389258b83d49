from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from ops.cli import main

from ..models import make_adapter, make_tiny_base
from .command import Done, Roost


@pytest.fixture
def roost(capsys: pytest.CaptureFixture[str]) -> Roost:
    def run(*arguments: str, cwd: Path, url: str = "", stdin: str = "", **environment: str) -> Done:
        code = 0
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("ROOST_")]:
                patch.delenv(name)
            for name, value in (environment | ({"ROOST_URL": url} if url else {})).items():
                patch.setenv(name, value)
            patch.chdir(cwd)
            patch.setattr(sys, "argv", ["roost", *arguments])
            patch.setattr(sys, "stdin", io.StringIO(stdin))
            try:
                main()
            except SystemExit as ended:
                code = int(ended.code or 0)
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base in ``base`` and a PEFT adapter over it in ``adapter``."""
    folder = tmp_path_factory.mktemp("adapter")
    make_tiny_base(folder / "base", "llama")
    make_adapter(folder / "adapter", folder / "base")
    return folder
