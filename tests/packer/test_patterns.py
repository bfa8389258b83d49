"""Regular expressions from outside end, whatever they are."""

from __future__ import annotations

import time

import pytest

from packer import patterns
from packer.patterns import match_all
from wire.outcomes import InvalidRequest


def test_plain_names_and_expressions_match_alike() -> None:
    names = ["a.b", "a-b", "x.a.b"]
    assert match_all([r"a\.b"], names, "f") == [["", None, None]]
    assert match_all([r"a\.b", "(a).b"], names, "f") == [["", None, None], ["", "", None]]
    assert match_all([r"(?P<idx>\w)\.b"], names, "f", group="idx") == [["a", None, None]]
    assert match_all(["x"], names, "f", whole=True) == [[None, None, None]]
    assert match_all([r"x.*"], names, "f", whole=True) == [[None, None, ""]]


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|a)*$", r"(a?){40}a{40}b", r"(.*a){30}b"])
def test_an_expression_that_would_run_for_years_is_refused(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "TIME_LIMIT_S", 0.5)
    before = time.monotonic()
    with pytest.raises(InvalidRequest, match="f: matching it takes more than"):
        match_all([pattern], ["a" * 60 + "!"], "f")
    assert time.monotonic() - before < 10


@pytest.mark.parametrize("pattern", ["(", "*", "(?P<idx>a)(?P<idx>b)", "[z-a]", "(" * 4000 + ")" * 4000])
def test_what_is_no_expression_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="f"):
        match_all([pattern], ["a"], "f")


def test_numbers_and_lengths_are_bounded() -> None:
    with pytest.raises(InvalidRequest, match="too long"):
        match_all(["a" * 5000], ["a"], "f")
    with pytest.raises(InvalidRequest, match="at most"):
        match_all(["a"] * 5000, ["a"], "f")
