"""A run that was killed goes on as if it had not been, and a folder is one run's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tinker")

from recipes.config import Sft
from recipes.course import Course
from recipes.folder import RunFolder, read_metrics
from recipes.plot import draw
from recipes.sft import Supervised
from recipes.text import Text
from wire.outcomes import InvalidRequest, VersionConflict

from .fake_service import TEXT, Crash, Service, Tokenizer
from .items import Silent, config

_TIMED = {"seconds", "tokens_per_s"}


def course_of(given: Sft, service: Service) -> Course:
    return Course(Supervised(given, TEXT), given, service, Silent())


def learnt(course: Course) -> list[dict[str, float]]:
    return [{name: value for name, value in line.items() if name not in _TIMED} for line in course.folder.lines()]


@pytest.mark.parametrize("crash_at", [0, 3, 5, 7, 11])
async def test_a_run_that_ended_anywhere_goes_on_to_the_very_same_figures(crash_at: int, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = course_of(config(Sft, tmp_path / "whole", evaluate_every=4), Service())
    expected = await whole.run()

    given = config(Sft, tmp_path, evaluate_every=4)
    service = Service(crash_at)
    with pytest.raises(Crash):
        await course_of(given, service).run()
    # a line that was cut short
    with (tmp_path / "out" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')
    service.crash_at = None
    again = course_of(given, service)
    assert await again.run() == expected
    assert learnt(again) == learnt(whole)
    assert again.folder.state.evaluations == whole.folder.state.evaluations
    # saved at 4 (an evaluation), 5, 8 and 10
    reached = max(step for step in (0, 4, 5, 8, 10) if step <= crash_at)
    assert [path.rpartition("-")[2] for path in service.resumed] == ([f"{reached:06d}"] if reached else [])


async def test_a_run_that_is_done_is_told_again_and_nothing_is_trained(tmp_path: Path) -> None:
    given, service = config(Sft, tmp_path), Service()
    told = await course_of(given, service).run()
    assert await course_of(given, service).run() == told
    assert (service.steps, len(service.begun), service.resumed, len(service.published)) == (12, 1, [], 1)


async def test_a_run_may_be_made_longer_and_is_published_anew(tmp_path: Path) -> None:
    service = Service()
    shorter = course_of(config(Sft, tmp_path, steps=4), service)
    await shorter.run()
    longer = course_of(config(Sft, tmp_path, steps=6), service)
    await longer.run()
    assert service.steps == 6 and [line["step"] for line in longer.folder.lines()] == [1, 2, 3, 4, 5, 6]
    assert len(service.published) == 2
    assert longer.folder.state.published != shorter.folder.state.published


async def test_a_run_can_not_be_made_shorter_than_it_is(tmp_path: Path) -> None:
    service = Service()
    await course_of(config(Sft, tmp_path, steps=4, evaluate_every=2), service).run()
    with pytest.raises(VersionConflict, match="has taken 4 steps, and steps is 2") as caught:
        course_of(config(Sft, tmp_path, steps=2), service)
    assert caught.value.field == "steps"
    same = course_of(config(Sft, tmp_path, steps=4), service)
    with pytest.raises(VersionConflict, match="not looked at after 3 steps, and has taken 4"):
        await same.advance(3)
    assert service.steps == 4


async def test_steps_that_were_passed_without_a_look_get_no_figures_of_later_ones(tmp_path: Path) -> None:
    service = Service()
    await course_of(config(Sft, tmp_path, steps=4), service).run()
    longer = course_of(config(Sft, tmp_path, steps=8, evaluate_every=2), service)
    await longer.run()
    assert sorted(longer.folder.state.evaluations) == [0, 4, 6, 8]


def test_a_folder_of_another_run_is_refused_by_the_field_s_name(tmp_path: Path) -> None:
    given = config(Sft, tmp_path)
    RunFolder(tmp_path / "out", "sft", given).reached(1, "tinker://a/weights/b")
    with pytest.raises(VersionConflict, match=r"learning_rate = 0.1, not 0.3") as caught:
        RunFolder(tmp_path / "out", "sft", config(Sft, tmp_path, learning_rate=0.3))
    assert caught.value.field == "learning_rate"
    with pytest.raises(VersionConflict, match="holds a run of sft"):
        RunFolder(tmp_path / "out", "dpo", given)


def test_a_folder_is_one_process_s_at_a_time(tmp_path: Path) -> None:
    given = config(Sft, tmp_path)
    holder = "from recipes.folder import _locked; from pathlib import Path; import sys; "
    holder += "lock = _locked(Path(sys.argv[1])); print('mine', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", holder, given.out], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None and other.stdout.readline() == "mine\n"
        with pytest.raises(VersionConflict, match="another process runs in") as caught:
            RunFolder(tmp_path / "out", "sft", given)
        other.communicate()
    assert caught.value.field == "out"
    RunFolder(tmp_path / "out", "sft", given)


def test_an_item_that_the_base_s_context_can_not_hold_is_told_with_its_line(tmp_path: Path) -> None:
    text = Text(Tokenizer(), context=8)
    (tmp_path / "long.jsonl").write_bytes(
        b'\xef\xbb\xbf{"prompt": "1234", "answer": "5678"}\n{"prompt": "1234", "answer": "56789"}\n'
    )
    given = config(Sft, tmp_path, train=str(tmp_path / "long.jsonl"))
    with pytest.raises(InvalidRequest, match=r"line 2: it has 9 tokens, and the base's context is 8"):
        Supervised(given, text)
    assert text.misfit("1234567") == "" != text.misfit("12345678")
    assert Text(Tokenizer()).misfit("1" * 1000) == ""


async def test_the_picture_has_every_metric(tmp_path: Path) -> None:
    course = course_of(config(Sft, tmp_path, steps=3), Service())
    await course.run()
    file = tmp_path / "metrics.svg"
    draw(course.folder, file)
    drawn = file.read_text()
    assert drawn.count('id="axes_') == 3  # accuracy, loss, tokens per second
    assert read_metrics(tmp_path / "nothing.jsonl") == []
