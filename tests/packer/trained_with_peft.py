"""What PEFT itself trains and saves, and the revision that comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch

from packer.revision import RevisionFile, check_fit
from packer.shape import BaseShape
from tests.packer.adapters import packed


def trained_with_peft(base: Any, folder: Path, **settings: Any) -> tuple[Any, BaseShape, RevisionFile]:
    """``base`` with an adapter of random numbers, its shape, and the revision packed from what PEFT saved."""
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder / "trained")
    model.base_model.model.config.save_pretrained(folder / "base")
    shape = BaseShape.from_config((folder / "base" / "config.json").read_bytes())
    file = RevisionFile(packed(folder / "trained", shape))
    check_fit(file, shape)
    return model, shape, file
