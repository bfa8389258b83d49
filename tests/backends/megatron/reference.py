"""The same training in transformers and PEFT, or for stacked experts in transformers and plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from packer.modules import Place
from packer.revision import RevisionFile
from packer.unpack import write_peft
from wire.trainer import Adam, Batch

Tensor = torch.Tensor


def _load(base: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


class Reference:
    """An adapter on the base, as torch computes it. ``parameters`` are its factors, trainable."""

    parameters: list[Tensor]

    def logits(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def logprobs(self, tokens: np.ndarray, targets: np.ndarray) -> Tensor:
        logits = self.logits(torch.from_numpy(tokens.copy())[None])[0]
        return logits.log_softmax(-1).gather(-1, torch.from_numpy(targets.copy())[:, None])[:, 0]

    def train(self, steps: list[tuple[list[Batch], Adam]]) -> list[tuple[list[float], float]]:
        """(losses of the batches, gradient norm) of each step."""
        first = steps[0][1]
        optimizer = torch.optim.AdamW(
            self.parameters, lr=first.learning_rate, betas=(first.beta1, first.beta2), eps=first.eps,
            weight_decay=first.weight_decay,
        )  # fmt: skip
        seen = []
        for batches, adam in steps:
            losses = []
            for batch in batches:
                loss = self.loss(batch)
                loss.backward()
                losses.append(loss.item())
            limit = adam.grad_clip_norm or float("inf")
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit).item()
            optimizer.step()
            optimizer.zero_grad()
            seen.append((losses, norm))
        return seen

    def loss(self, batch: Batch) -> Tensor:
        total = torch.zeros(())
        for datum in batch.data:
            tokens, targets = (np.frombuffer(raw, "<i8") for raw in (datum.tokens, datum.targets))
            lp = self.logprobs(tokens, targets)
            w, q, a = (_numbers(raw) for raw in (datum.weights, datum.logprobs, datum.advantages))
            w = torch.ones_like(lp) if w is None else w
            spec = batch.losses[datum.loss]
            for i in range(len(lp)):
                if w[i] != 0:
                    total = total + w[i] * _token_loss(spec.kind, spec.config, lp[i], q, a, i)
        return total


def _numbers(raw: bytes) -> Tensor | None:
    return torch.from_numpy(np.frombuffer(raw, "<f4").copy()) if raw else None


def _token_loss(kind: str, config: dict[str, float], lp: Tensor, q: Any, a: Any, i: int) -> Tensor:
    """One token's loss, written out."""
    if kind == "cross_entropy":
        return -lp
    ratio = torch.exp(lp - q[i])
    if kind == "importance_sampling":
        return -(ratio * a[i])
    if kind == "ppo":
        low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
        return -min(ratio * a[i], ratio.clamp(low, high) * a[i], key=lambda value: value.item())
    if kind == "cispo":
        low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0)
        return -(min(max(ratio.item(), low), high) * lp * a[i])
    assert kind == "dro"
    return -(lp * a[i] - config["beta"] / 2 * (lp - q[i]) ** 2)


class PeftReference(Reference):
    """What PEFT loads from the unpacked revision."""

    def __init__(self, base: Path, file: RevisionFile, folder: Path) -> None:
        import peft

        write_peft(file.buffer, folder)
        self._model = peft.PeftModel.from_pretrained(_load(base), folder, is_trainable=True)
        self.parameters = [value for value in self._model.parameters() if value.requires_grad]

    def logits(self, tokens: Tensor) -> Tensor:
        return self._model(tokens).logits


class MergedReference(Reference):
    """The base with ``W + scale B A`` in place of each adapted weight, experts' included, differentiable in A and B."""

    def __init__(self, base: Path, file: RevisionFile) -> None:
        self._model = _load(base)
        self._weights = {name: value.detach() for name, value in self._model.named_parameters()}
        tensors = {name: value.requires_grad_() for name, value in load(bytes(file.buffer)).items()}
        self.parameters = list(tensors.values())
        self._pairs = [
            (pair.place, tensors[f"{pair.place}.A"], tensors[f"{pair.place}.B"], file.scale(pair))
            for pair in file.pairs
        ]

    def logits(self, tokens: Tensor) -> Tensor:
        merged = dict(self._weights)
        fused: dict[str, dict[str, Tensor]] = {}
        for place, a, b, scale in self._pairs:
            delta = scale * (b @ a)
            if place.expert:
                fused.setdefault(f"model.layers.{place.layer}.mlp.experts.", {})[place.module[8:]] = delta
            else:
                name = _weight_name(place)
                merged[name] = merged[name] + delta
        for prefix, deltas in fused.items():
            both = torch.cat([deltas["gate"], deltas["up"]], dim=1)
            merged[f"{prefix}gate_up_proj"] = merged[f"{prefix}gate_up_proj"] + both
            merged[f"{prefix}down_proj"] = merged[f"{prefix}down_proj"] + deltas["down"]
        return torch.func.functional_call(self._model, merged, (tokens,)).logits


def _weight_name(place: Place) -> str:
    home = "self_attn" if place.module in "qkvo" else "mlp"
    return f"model.layers.{place.layer}.{home}.{place.module}_proj.weight"
