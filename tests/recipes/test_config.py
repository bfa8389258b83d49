"""Configurations and items are checked, and what is wrong with them is told by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recipes
from recipes.config import Dpo, Grpo, Sft, load, load_search
from recipes.data import Example, Preference, batch, read
from recipes.rewards import named
from wire.outcomes import InvalidRequest

LEAST = 'base = "tiny"\npolicy = "taught"\ntrain = "a.jsonl"\nheld_out = "b.jsonl"\nout = "out"\n'


def written(folder: Path, text: str) -> Path:
    file = folder / "recipe.toml"
    file.write_text(text)
    return file


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    found = load(written(tmp_path, LEAST + 'tokenizer = "tokenizer"\n'), Sft)
    assert (found.train, found.out) == (str(tmp_path / "a.jsonl"), str(tmp_path / "out"))
    assert found.tokenizer == str(tmp_path / "tokenizer")
    assert load(written(tmp_path, LEAST + 'tokenizer = "org/name"\n'), Sft).tokenizer == "org/name"


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        (Sft, 'base = "tiny"', "missing required field `policy`"),
        (Sft, LEAST + "lables = []", "unknown field `lables`"),
        (Sft, LEAST + "steps = 0", "steps: expected 1 or more, got 0"),
        (Sft, LEAST + 'labels = ["a"]', "labels: has a single label"),
        (Sft, LEAST + "learning_rate = inf", "learning_rate: expected a number above 0, got inf"),
        (Sft, LEAST + "rank = 'x'", r"Expected `int`, got `str` - at `\$.rank`"),
        (Dpo, LEAST + "beta = 0", "beta: expected a number above 0"),
        (Grpo, LEAST + "group = 1", "group: expected 2 or more, got 1"),
        (Grpo, LEAST + 'loss = "hope"', "loss: expected importance_sampling, ppo or cispo, got 'hope'"),
        (Grpo, LEAST + "kl_coefficient = -1", "kl_coefficient: expected 0 or more"),
        (Sft, "base = ", "recipe.toml"),
    ],
)
def test_what_is_wrong_is_named(kind: type[Sft], text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=told):
        load(written(tmp_path, text), kind)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rounds = [2, 4]\n[space]\nlearning_rate = [1.0]", "makes a single candidate"),
        ("rounds = [4, 2]\n[space]\nrank = [1, 2]", "rounds: expected numbers of steps that grow"),
        ("rounds = [2]\n[space]\nout = ['a', 'b']", "space.out: is not a field that candidates may differ in"),
        ("rounds = [2]\n[space]\nrank = [0, 2]", "rank: expected 1 or more, got 0"),
        ("rounds = [2]\n[space]\nrank = ['x', 2]", r"sft.Expected `int`, got `str` - at `\$.rank`"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(text: str, told: str, tmp_path: Path) -> None:
    whole = f'metric = "loss"\ntest = "t.jsonl"\n{text}\n[sft]\n{LEAST}'
    with pytest.raises(InvalidRequest, match=told):
        load_search(written(tmp_path, whole))


EXAMPLES = Path(recipes.__file__).parent / "examples"


def test_the_examples_are_taken() -> None:
    for name, kind in (("sft", Sft), ("dpo", Dpo), ("grpo", Grpo)):
        assert load(EXAMPLES / f"{name}.toml", kind).base == "smollm2"
    assert len(load_search(EXAMPLES / "search.toml").candidates()) == 6


def test_candidates_are_all_combinations(tmp_path: Path) -> None:
    whole = 'metric = "loss"\ntest = "t.jsonl"\nrounds = [2, 4]\n[space]\nrank = [2, 4]\nbatch = [1, 8]\n[sft]\n'
    found = load_search(written(tmp_path, whole + LEAST))
    assert [(each.rank, each.batch) for each in found.candidates()] == [(2, 1), (2, 8), (4, 1), (4, 8)]
    assert [each.policy for each in found.candidates()] == [f"taught-{place}" for place in range(4)]
    assert {each.steps for each in found.candidates()} == {4}
    assert len({each.out for each in found.candidates()}) == 4
    assert found.test == str(tmp_path / "t.jsonl")


def test_an_item_that_is_not_one_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n\n{"prompt": "a"}\n')
    with pytest.raises(InvalidRequest, match=r"train: .*line 3: .*missing required field `answer`"):
        read(str(file), Example, "train")
    with pytest.raises(InvalidRequest, match=r"line 1: .*`chosen`"):
        read(str(file), Preference, "held_out")
    file.write_text("\n")
    with pytest.raises(InvalidRequest, match="has no items"):
        read(str(file), Example, "train")
    with pytest.raises(InvalidRequest, match="No such file"):
        read(str(tmp_path / "none"), Example, "train")


@given(count=st.integers(1, 20), size=st.integers(1, 15), seed=st.integers(0, 3))
def test_every_epoch_goes_through_all_items_once(count: int, size: int, seed: int) -> None:
    items = [Example(str(place), "") for place in range(count)]
    steps = [batch(items, step, size, seed) for step in range(1, count + 1)]
    assert all(len(each) == size for each in steps)
    # as many steps as there are items are as many epochs as a step has items
    assert Counter(item.prompt for each in steps for item in each) == dict.fromkeys(map(str, range(count)), size)


@pytest.mark.parametrize(
    ("reward", "said", "worth"),
    [
        ("exact", " 1200\n", 1.0), ("exact", "1200!", 0.0), ("contains", "so 1200!", 1.0), ("contains", "12", 0.0),
        ("number", "10, or rather 1,200.00.", 1.0), ("number", "1200 or 7", 0.0), ("number", "none", 0.0),
        ("tests.recipes.test_config:half", "anything", 0.5),
    ],
)  # fmt: skip
def test_rewards(reward: str, said: str, worth: float) -> None:
    assert named(reward)(Example("", "1200"), said) == worth


def half(_: Example, __: str) -> float:
    return 0.5


def much(_: Example, __: str) -> float:
    return 7.5


def words(_: Example, __: str) -> str:
    return "a"


def broken(item: Example, __: str) -> float:
    return {"b": 1.0}[item.prompt]


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        ("much", "gave 7.5: expected a number from 0 to 1"),
        ("words", "failed: ValueError: could not convert string to float: 'a'"),
        ("broken", "failed: KeyError: 'a'"),
    ],
)
def test_a_reward_that_goes_wrong_is_told_with_what_it_was_asked(reward: str, reason: str) -> None:
    name = f"tests.recipes.test_config:{reward}"
    with pytest.raises(InvalidRequest) as caught:
        named(name)(Example("a", "b"), "so")
    assert caught.value.message == f"reward: {name}, asked about 'a' and 'so', {reason}"
    assert caught.value.field == "reward"


@pytest.mark.parametrize("name", ["none", "no.such.module:f", "recipes.rewards:nothing", "math:pi"])
def test_a_reward_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="reward: "):
        named(name)
