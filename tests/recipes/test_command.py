"""``roost recipe``, without a mesh: what is wrong is told in a line, before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("tinker")

import msgspec

from ops.cli.recipe import _may_be_stopped
from ops.cli.up import trained
from ops.config import EngineConfig, load
from recipes.config import Search, Sft
from recipes.course import Course
from recipes.display import Bar, bars
from recipes.folder import RunFolder
from recipes.report import report_run, report_search
from recipes.search import Halving
from recipes.service import text_of
from recipes.sft import Supervised
from tests.ops.command import Roost
from tests.ops.conftest import roost
from wire.outcomes import InvalidRequest, NotFound

from .fake_service import TEXT, Service
from .items import Silent, config, items, write

__all__ = ["roost"]

NOBODY = "http://127.0.0.1:9"


def test_a_configuration_that_is_wrong_is_told(roost: Roost, tmp_path: Path) -> None:
    """Without a mesh, too."""
    absent = roost("recipe", "sft", "none.toml", cwd=tmp_path, url=NOBODY)
    (tmp_path / "dpo.toml").write_text('base = "tiny"\npolicy = "p"\nbetta = 1.0\n')
    wrong = roost("recipe", "dpo", "dpo.toml", cwd=tmp_path, url=NOBODY)
    (tmp_path / "search.toml").write_text("rounds = 3\n")
    search = roost("recipe", "search", "search.toml", cwd=tmp_path, url=NOBODY)
    assert (absent.returncode, wrong.returncode, search.returncode) == (2, 2, 2)
    assert "none.toml: No such file or directory" in absent.stderr
    assert "unknown field `betta`" in wrong.stderr
    assert "rounds" in search.stderr


def test_a_gateway_that_does_not_answer_is_told_at_once(roost: Roost, tmp_path: Path) -> None:
    (tmp_path / "grpo.toml").write_text('base = "t"\npolicy = "p"\ntrain = "t"\nheld_out = "h"\nout = "o"\n')
    done = roost("recipe", "grpo", "grpo.toml", cwd=tmp_path, url=NOBODY)
    assert done.returncode == 3


def test_who_stops_it_is_told_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), _may_be_stopped():
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "stopped; the same command goes on from the last checkpoint\n"


def test_only_a_base_that_is_served_is_trained(roost: Roost, tmp_path: Path) -> None:
    done = roost("up", "--train", "tiny", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: --train tiny: no --base is called so\n")


def test_what_is_trained_is_of_no_rank_that_its_engine_can_not_serve() -> None:
    engines = [EngineConfig(base="other", model_path="/o"), EngineConfig(base="tiny", model_path="/t", max_rank=32)]
    training = load(None, {}, trained("tiny", engines)).training
    assert training is not None and training.base == "tiny"
    assert (training.trainer.model_path, training.trainer.max_rank) == ("/t", 32)


def test_a_folder_that_can_be_none_is_told_by_its_field(tmp_path: Path) -> None:
    taken = write(tmp_path / "taken", [])
    with pytest.raises(InvalidRequest, match=f"out: {taken} can't be a folder: File exists") as caught:
        RunFolder(Path(taken), "sft", config(Sft, tmp_path))
    assert caught.value.field == "out"


async def test_a_tokenizer_that_is_nowhere_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub does not answer, and is asked once."""
    asked: list[str] = []

    def away(name: str, *, timeout: float) -> None:
        asked.append(name)
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.model_info", away)
    with pytest.raises(NotFound, match=r"tokenizer: nix can't be loaded .*: name its folder") as caught:
        await text_of(None, config(Sft, tmp_path, tokenizer="nix"))
    assert (caught.value.field, asked) == ("tokenizer", ["nix"])


async def test_steps_and_evaluations_are_shown(tmp_path: Path) -> None:
    given = config(Sft, tmp_path, steps=2)
    console = Console(force_terminal=True, width=160, record=True, file=(tmp_path / "shown").open("w"))
    with bars(console) as progress:
        await Course(Supervised(given, TEXT), given, Service(), Bar(progress, given)).run()
    shown = console.export_text()
    assert "taught  step 0, held out: loss" in shown and "taught  step 2, held out: loss" in shown
    assert "2/2" in shown and "tokens per s" in shown


async def test_a_report_has_what_was_before_and_after(tmp_path: Path) -> None:
    given = config(Sft, tmp_path, steps=3)
    course = Course(Supervised(given, TEXT), given, Service(), Silent())
    before, after = await course.run()
    file = tmp_path / "report.json"
    report_run(file, course.folder)
    told = msgspec.json.decode(file.read_bytes())
    assert told["environment"]["seed"] == given.seed
    assert len(told["samples"]["steps"]) == told["summary"]["steps"] == 3
    assert told["summary"]["gain_loss"] == pytest.approx(after["loss"] - before["loss"])

    test = write(tmp_path / "test.jsonl", items(300, 10))
    space = {"learning_rate": (1e-4, 0.1)}
    search = Search(sft=config(Sft, tmp_path), space=space, rounds=(1, 2), metric="loss", test=test)
    found = await Halving(search, Service(), TEXT, lambda _: Silent()).run()
    report_search(file, found, seed=0)
    summary = msgspec.json.decode(file.read_bytes())["summary"]
    assert (summary["candidates"], summary["winner"]) == (2, "taught-1")
    assert summary["gain_loss"] == found.winner_figures["loss"] - found.median_figures["loss"]
