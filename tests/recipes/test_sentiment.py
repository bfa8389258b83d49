"""The items of the sentiment task are balanced and apart."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections import Counter

import pytest

from recipes import sentiment


def archive(files: dict[str, str]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"folder/{name}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return held.getvalue()


def test_labels_follow_the_scores_and_unclear_texts_are_left_out() -> None:
    scored = {
        "this is quite good": 2.5,
        "this is quite bad": -1,
        "people do not agree": 0.6,
        "so it is": 0.1,
        "short": 3,
    }
    lines = "".join(f"1\t{score}\t{text}\n" for text, score in scored.items())
    files = {f"{name}_GroundTruth.txt": "" for name in ("movieReviewSnippets", "amazonReviewSnippets")}
    found = list(sentiment.labelled(archive({"tweets_GroundTruth.txt": lines, **files})))
    assert [each.answer for each in found] == [" positive", " negative", " neutral"]
    assert found[0].prompt == "Text: this is quite good\nSentiment:"
    with pytest.raises(LookupError, match="tweets_GroundTruth"):
        list(sentiment.labelled(archive(files)))


@pytest.mark.parametrize("arguments", [[], ["--help"], ["a", "b"]])
def test_the_command_says_how_it_is_called(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recipes.sentiment", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == (0 if arguments == ["--help"] else 2)
    assert "usage: python -m recipes.sentiment [-h] FOLDER" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_labels_are_balanced_and_parts_are_apart() -> None:
    items = [
        sentiment.Example(str(place), sentiment.LABELS[place % 3 == 0]) for place in range(3 * 2 * sentiment.HELD_OUT)
    ]
    mixed = sentiment.balanced(items, sentiment.LABELS, seed=1)
    assert (
        mixed == sentiment.balanced(items, sentiment.LABELS, seed=1) != sentiment.balanced(items, sentiment.LABELS, 2)
    )
    parts = sentiment.split(mixed)
    assert len({each.prompt for part in parts.values() for each in part}) == len(mixed)
    for part in parts.values():
        counted = Counter(each.answer for each in part)
        assert counted[" positive"] == counted[" negative"] > 0
