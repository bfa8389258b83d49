"""The bases that are trained and served: SmolLM2 on a CPU, Qwen3-4B's shape with random weights on a GPU."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

RANK = 32
QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151_936, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40960, "attention_bias": False, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_SPREAD = 0.02
# random numbers are repeated with a period that is no multiple of any row
_PERIOD = (1 << 24) + 43


class TrainedBase(msgspec.Struct, frozen=True):
    """A checkpoint on one kind of device (``cpu`` or ``cuda``). ``stand_in`` says what of it is made up."""

    name: str
    device: str
    folder: Path
    stand_in: Mapping[str, str] | None = None

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "config.json").read_bytes())
        return found

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])


def make_base(device: str, folder: Path, seed: int) -> TrainedBase:
    """The device's base, made in ``folder``: half a minute."""
    if device == "cuda":
        write_random(folder, QWEN3_4B, seed)
        return TrainedBase("qwen3-4b", device, folder, {"weights": "random, in the shape of Qwen3-4B"})
    from ops.demo.base import NAME, make_base

    # it imports torch, which this process does without
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as maker:
        maker.submit(make_base, folder).result()
    return TrainedBase(NAME.lower(), device, folder)


def write_random(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    """A bf16 checkpoint of a dense Qwen3 with random weights, and a tokenizer that has a word for each token."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    numbers = np.random.default_rng(seed).standard_normal(_PERIOD, np.float32) * np.float32(_SPREAD)
    with (folder / "model.safetensors").open("wb") as file:
        shapes = dict(_shapes(config))
        file.write(_header(shapes))
        noise, place = _bf16(numbers), 0
        for shape in shapes.values():
            size = int(np.prod(shape))
            if len(shape) == 1:
                file.write(_bf16(np.ones(size, np.float32)).tobytes())
                continue
            while size:
                piece = noise[place : place + size]
                file.write(piece.tobytes())
                size -= len(piece)
                place = (place + len(piece)) % _PERIOD
    _write_words(folder, int(config["vocab_size"]))


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def _bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype("<u2")


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        yield start + "input_layernorm.weight", (hidden,)
        yield start + "post_attention_layernorm.weight", (hidden,)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{start}self_attn.{name}_proj.weight", (rows, hidden)
        yield start + "self_attn.o_proj.weight", (hidden, queries)
        yield start + "self_attn.q_norm.weight", (head,)
        yield start + "self_attn.k_norm.weight", (head,)
        yield start + "mlp.gate_proj.weight", (inner, hidden)
        yield start + "mlp.up_proj.weight", (inner, hidden)
        yield start + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)


def _write_words(folder: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel(vocab={f"t{token}": token for token in range(vocabulary)}))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=raw).save_pretrained(folder)
