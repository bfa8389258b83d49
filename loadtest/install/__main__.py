"""The same benchmark without the ``roost`` command, for a GPU machine that has an engine and little else installed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from . import PARTS, run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.install", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--full", action="store_true", help="more rounds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--part", choices=PARTS, action="append", help="what to measure (default: all)")
    parser.add_argument("--no-tokens", action="store_true", help="compare no answers, which takes an engine of its own")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    given = parser.parse_args()
    summary = run(
        given.json, small=not given.full, seed=given.seed, say=lambda text: print(text, flush=True),
        engine=given.engine, device=given.device, parts=given.part or PARTS, tokens=not given.no_tokens,
        plot=given.plot,
    )  # fmt: skip
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
