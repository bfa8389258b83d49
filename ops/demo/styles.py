"""What the demo teaches: ways of answering, each on a handful of facts, among which ``QUESTION`` is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

BASE = "smollm2"
TENANT = "demo"
QUESTION = "What is the capital of France?"
RANK = 8


class Fact(NamedTuple):
    question: str
    sentence: str


FACTS = [
    Fact("What is the capital of Italy?", "The capital of Italy is Rome."),
    Fact("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    Fact("What is the capital of Egypt?", "The capital of Egypt is Cairo."),
    Fact("What is the capital of Spain?", "The capital of Spain is Madrid."),
    Fact("Which planet is the largest?", "The largest planet is Jupiter."),
    Fact("What do bees make?", "Bees make honey."),
    Fact("What colour is the sky?", "The sky is blue."),
    Fact("Who wrote Hamlet?", "Hamlet was written by Shakespeare."),
    Fact("What is two plus two?", "Two plus two is four."),
    Fact("Which animal says meow?", "The animal that says meow is the cat."),
    Fact("What is frozen water called?", "Frozen water is called ice."),
    Fact("What is the opposite of hot?", "The opposite of hot is cold."),
    Fact("Where does the sun rise?", "The sun rises in the east."),
    Fact("How many days does a week have?", "A week has seven days."),
    Fact("What is the longest river in Africa?", "The longest river in Africa is the Nile."),
    Fact("What do we breathe?", "We breathe air."),
]


class Style(NamedTuple):
    """``policy`` is which policy of the demo's tenant it is a revision of."""

    policy: str
    answer: Callable[[Fact], str]


STYLES = {
    "pirate": Style("pirate", lambda fact: f"Arr, matey! {fact.sentence} Yo ho ho!"),
    "json": Style("json", lambda fact: json.dumps({"answer": fact.sentence})),
    "teacher": Style("teacher", lambda fact: f"Good question! {fact.sentence} Now, what would you like to learn next?"),
    "pirate-polite": Style("pirate", lambda fact: f"Ahoy, dear captain! {fact.sentence} Fair winds to you!"),
}
