"""Each recipe's figures get better on items that it was not trained on."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tinker")

from recipes.config import Dpo, Grpo, Sft
from recipes.course import Course
from recipes.dpo import Preferring
from recipes.grpo import Reinforced, advantages
from recipes.sft import Supervised

from .fake_service import TEXT, Done, Sampler, Service
from .items import Silent, config


async def base_of(service: Service) -> Sampler:
    return await service.create_sampling_client(base_model="tiny")


def finite(course: Course) -> bool:
    return all(math.isfinite(value) for line in course.folder.lines() for value in line.values())


async def test_sft_answers_right_and_prefers_the_right_label(tmp_path: Path) -> None:
    service, given = Service(), config(Sft, tmp_path, labels=("e", "o"), evaluate_every=6, learning_rate=0.4)
    course = Course(Supervised(given, TEXT), given, service, Silent())
    before, after = await course.run()
    assert before["accuracy"] <= 0.2 and before["label_accuracy"] <= 0.8
    assert after["accuracy"] == after["label_accuracy"] == 1.0
    assert after["loss"] < before["loss"] / 3
    assert sorted(course.folder.state.evaluations) == [0, 6, 12]
    assert [line["step"] for line in course.folder.lines()] == list(range(1, 13))
    assert set(course.folder.lines()[0]) >= {"loss", "tokens_per_s", "gradient_norm"}
    assert finite(course)
    assert service.published == [course.folder.state.published]


async def test_what_sft_trains_for_is_the_mean_over_the_answers_tokens(tmp_path: Path) -> None:
    """Whatever the batch, so that a learning rate means the same: the prompt does not count."""
    service, given = Service(), config(Sft, tmp_path, steps=1, batch=40, learning_rate=1e-9)
    course = Course(Supervised(given, TEXT), given, service, Silent())
    await course.run()
    (line,) = course.folder.lines()
    own = Supervised(config(Sft, tmp_path, held_out=given.train), TEXT)
    client = await service.create_lora_training_client("tiny", user_metadata={"policy": "other"})
    seen = await own.evaluate(client, lambda: base_of(service))
    assert line["loss"] == pytest.approx(seen["loss"])


async def test_dpo_s_margin_grows_from_nothing(tmp_path: Path) -> None:
    service, given = Service(), config(Dpo, tmp_path, beta=0.5, learning_rate=0.3)
    course = Course(Preferring(given, TEXT, await base_of(service)), given, service, Silent())
    before, after = await course.run()
    assert before["margin"] == pytest.approx(0.0, abs=1e-6)
    assert after["margin"] > 1.0 and after["preferred"] == 1.0
    lines = course.folder.lines()
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert lines[-1]["loss"] < lines[0]["loss"] and lines[-1]["margin"] > lines[0]["margin"]
    assert finite(course)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
async def test_grpo_earns_at_least_half_of_what_was_missing(loss: str, tmp_path: Path) -> None:
    service = Service()
    given = config(Grpo, tmp_path, steps=20, max_tokens=1, group=16, learning_rate=0.6, loss=loss)
    recipe = Reinforced(given, TEXT, await base_of(service))
    course = Course(recipe, given, service, Silent())
    before, after = await course.run()
    assert before["reward"] < 0.2
    assert after["reward"] - before["reward"] >= (1 - before["reward"]) / 2
    # the engine's policy is the trainer's own here
    assert all(line["kl"] == pytest.approx(0.0, abs=1e-9) for line in course.folder.lines())
    assert all("kl_base" not in line for line in course.folder.lines())


class Mute:
    """Says nothing to every other prompt, and the right thing to the others."""

    def sample(self, prompt: Any, count: int, params: Any) -> Done[Any]:
        last = prompt.to_ints()[-1]
        number = last - ord("0")
        said = [ord("odd"[0] if number % 2 else "even"[0])] if number % 4 > 1 else []
        one = SimpleNamespace(tokens=said, logprobs=[-1.0] * len(said))
        return Done(SimpleNamespace(sequences=[one] * count))


async def test_an_answer_of_no_tokens_is_judged_too(tmp_path: Path) -> None:
    given = config(Grpo, tmp_path, max_tokens=1)
    recipe = Reinforced(given, TEXT, None)

    async def mute() -> Mute:
        return Mute()

    # of the digits 2, 3, 6 and 7 are answered
    assert await recipe.evaluate(None, mute) == {"reward": pytest.approx(0.4)}


async def test_straying_from_the_base_is_made_dear(tmp_path: Path) -> None:
    strayed = {}
    for coefficient in (0.001, 30.0):
        folder = tmp_path / str(coefficient)
        folder.mkdir()
        service = Service()
        given = config(
            Grpo, folder, steps=20, max_tokens=1, learning_rate=0.3, kl_coefficient=coefficient
        )  # fmt: skip
        course = Course(Reinforced(given, TEXT, await base_of(service)), given, service, Silent())
        await course.run()
        strayed[coefficient] = sum(line["kl_base"] for line in course.folder.lines()[10:])
    assert strayed[30.0] < strayed[0.001] * 0.7


def test_advantages_are_of_the_group_alone() -> None:
    assert advantages([1.0, 1.0, 1.0]) == [0.0, 0.0, 0.0]
    assert advantages([0.0, 1.0]) == pytest.approx([-1.0, 1.0], abs=1e-5)
    assert sum(advantages([0.1, 0.7, 0.2, 1.0])) == pytest.approx(0.0)


async def test_a_prompt_is_a_message_where_the_model_chats(tmp_path: Path) -> None:
    from recipes.text import Text

    from .fake_service import END, Tokenizer

    text = Text(Tokenizer(), chat=True, stop=["\n"])
    assert TEXT.prompt("hi") == [104, 105]
    assert "".join(map(chr, text.prompt("hi"))) == "<hi>"
    assert text.answer("a") == [97, END] and text.answer("a", ended=False) == [97]
    assert text.read([97, END]) == "a"
    assert text.sampling(max_tokens=3, temperature=0.5, seed=1).stop == ["\n"]
