"""Tiny random checkpoints and adapters, real enough for transformers, PEFT and vLLM, made in well under a second.

The tokenizer knows every byte, so that any prompt is representable. Rows of the output layer for anything but printable
ASCII are zero: a greedy answer is readable text that never stops by itself, so its length is ``max_tokens`` exactly.
Weights are drawn wide, so that greedy choices have margins and adapters change them.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCABULARY = 320
# 32 is the smallest head that vLLM's CPU attention has
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 2, 2, 1, 32
EXPERTS, EXPERT_INTERMEDIATE = 4, 32
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tiny_base(
    folder: Path, arch: str = "qwen3", seed: int = 0, layers: int = LAYERS, experts: int = EXPERTS
) -> Path:
    """Write a float32 checkpoint with its tokenizer into ``folder``; ``arch`` is qwen3, qwen2, llama or qwen3_moe."""
    import transformers

    classes: dict[str, tuple[Any, Any]] = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }
    config_class, model_class = classes[arch]
    extra: dict[str, Any] = {} if arch == "qwen2" else {"head_dim": HEAD_DIM}
    if arch == "qwen3_moe":
        extra |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_INTERMEDIATE}
    config = config_class(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=512,
        initializer_range=0.15, tie_word_embeddings=False, bos_token_id=None, eos_token_id=257, pad_token_id=256,
        dtype="float32", **extra,
    )  # fmt: skip
    tokenizer = _tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    silent = [i for i, token in enumerate(tokenizer.convert_ids_to_tokens(range(VOCABULARY))) if not _printable(token)]
    with torch.no_grad():
        model.lm_head.weight[silent] = 0.0
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _printable(token: str) -> bool:
    # byte-level vocabularies write a space as U+0120 and printable ASCII as itself
    return len(token) == 1 and (token == "\u0120" or "!" <= token <= "~")


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    specials = ["<pad>", "<end>", *(f"<unused{i}>" for i in range(VOCABULARY - 258))]
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_adapter(
    folder: Path,
    base: Path,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 1,
    *,
    targets: Sequence[str] = ALL_LINEAR,
    rslora: bool = False,
    rank_pattern: dict[str, int] | None = None,
    alpha_pattern: dict[str, float] | None = None,
    dtype: torch.dtype = torch.float32,
    strength: float = 0.15,
) -> Path:
    """Write a PEFT LoRA folder for ``base``. ``strength`` is the standard deviation of B; A is scaled to its input."""
    import peft

    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=list(targets), use_rslora=rslora, rank_pattern=rank_pattern or {},
        alpha_pattern=alpha_pattern or {}, task_type="CAUSAL_LM", base_model_name_or_path=base.name,
        inference_mode=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for module, (inputs, outputs) in module_shapes(base, targets).items():
        r = (rank_pattern or {}).get(module.rpartition(".")[2], rank)
        prefix = f"base_model.model.model.{module}"
        a = torch.randn(r, inputs, generator=generator) / inputs**0.5
        tensors[f"{prefix}.lora_A.weight"] = a.to(dtype)
        tensors[f"{prefix}.lora_B.weight"] = (torch.randn(outputs, r, generator=generator) * strength).to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def module_shapes(base: Path, targets: Sequence[str] = ALL_LINEAR) -> dict[str, tuple[int, int]]:
    """``layers.0.self_attn.q_proj`` -> (in, out) for each target of each layer, in layer order."""
    config = json.loads((base / "config.json").read_text())
    hidden, mid = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden),
        "gate_proj": (hidden, mid), "up_proj": (hidden, mid), "down_proj": (mid, hidden),
    }  # fmt: skip
    return {
        f"layers.{layer}.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}": shapes[name]
        for layer in range(config["num_hidden_layers"])
        for name in _ordered(targets)
    }


def _ordered(targets: Sequence[str]) -> list[str]:
    return [name for name in ALL_LINEAR if name in targets]


@functools.lru_cache(maxsize=8)
def _loaded_base(base: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), AutoTokenizer.from_pretrained(base)


def chat_prompt(base: Path, content: str) -> str:
    """What the chat template makes of one user message."""
    _, tokenizer = _loaded_base(base)
    messages = [{"role": "user", "content": content}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _adapted(base: Path, adapter: Path | None) -> Any:
    if adapter is None:
        return _loaded_base(base)[0]
    return _loaded_adapter(base, adapter, max(file.stat().st_mtime_ns for file in adapter.iterdir()))


@functools.lru_cache(maxsize=2)
def _loaded_adapter(base: Path, adapter: Path, _: int) -> Any:
    import peft
    from transformers import AutoModelForCausalLM

    # PEFT injects its layers in place: a model of its own keeps the cached base clean
    fresh = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(fresh, adapter)


def text_of(base: Path, tokens: Sequence[int]) -> str:
    """What the base's tokenizer makes of token ids."""
    return str(_loaded_base(base)[1].decode(list(tokens)))


def reference_answer(base: Path, adapter: Path | None, prompt: str, max_tokens: int) -> str:
    """The greedy continuation of ``prompt``, computed by transformers and PEFT in float32."""
    model, tokenizer = _adapted(base, adapter), _loaded_base(base)[1]
    tokens = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        made = model.generate(**tokens, max_new_tokens=max_tokens, do_sample=False, pad_token_id=256)
    return str(tokenizer.decode(made[0, tokens["input_ids"].shape[1] :]))


def reference_scores(base: Path, adapter: Path | None, tokens: Sequence[int]) -> Any:
    """Log-probabilities of each token's successor, (tokens, vocabulary) as float32, by transformers and PEFT."""
    model = _adapted(base, adapter)
    with torch.inference_mode():
        logits = model(torch.tensor([list(tokens)])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1).numpy()


def make_merged(folder: Path, base: Path, adapter: Path) -> Path:
    """Write ``base`` with an adapter's product added to each weight, computed in float32. Patterns name modules."""
    from safetensors.torch import load_file

    settings = json.loads((adapter / "adapter_config.json").read_text())
    alphas = settings.get("alpha_pattern", {})
    weights = load_file(base / "model.safetensors")
    factors = load_file(adapter / "adapter_model.safetensors")
    for name in (name for name in factors if name.endswith(".lora_A.weight")):
        a, b = factors[name].float(), factors[name.replace("lora_A", "lora_B")].float()
        module = name.removesuffix(".lora_A.weight").rpartition(".")[2]
        scale = alphas.get(module, settings["lora_alpha"]) / (len(a) ** 0.5 if settings.get("use_rslora") else len(a))
        weights[name.removeprefix("base_model.model.").replace("lora_A.", "")] += scale * (b @ a)
    shutil.copytree(base, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
