"""What the layers of each known architecture hold, from the fields of a ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from packer.modules import (
    DENSE_PATHS,
    EXPERT_PATHS,
    INDEXER_PATHS,
    MAX_EXPERTS,
    MAX_LAYERS,
    MLA_PATHS,
    MTP_PATHS,
    ROUTER_PATHS,
    SHARED_PATHS,
)
from packer.strict_json import brief
from wire.outcomes import InvalidRequest

_MAX_DIMENSION = 1 << 24
_MAX_MTP_LAYERS = 64
# Qwen3's own default where its config.json leaves the field out
_QWEN3_HEAD_DIM = 128


class ModuleShape(msgspec.Struct, frozen=True):
    """A linear module: its path inside a layer and its input and output dimension.

    ``experts`` is how many of them are stacked under one name, 0 where there is just the one. ``interleaved`` says
    that the outputs of a fused gate_up alternate between gate and up, ``transposed`` that the base keeps the stack's
    weights as (experts, in, out).
    """

    path: str
    inputs: int
    outputs: int
    experts: int = 0
    interleaved: bool = False
    transposed: bool = False


Layer = Mapping[str, ModuleShape]


class Layers(NamedTuple):
    """All layers of a base, and how many at the end predict further tokens (MTP) and are not part of its usual pass."""

    modules: tuple[Layer, ...]
    mtp: int = 0


class Fields:
    """Typed access to a config's fields; what is missing or absurd is refused by name."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def architecture(self) -> str:
        names = self._values.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise InvalidRequest("config.json must name exactly one architecture", field="architectures")
        return names[0]

    def size(self, name: str, default: int | None = None, *, least: int = 1, most: int = _MAX_DIMENSION) -> int:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise InvalidRequest(f"config.json lacks {name}", field=name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise InvalidRequest(f"config.json: {name} is {brief(value)}, not between {least} and {most}", field=name)
        return value

    def either(self, name: str, other: str) -> str:
        """``other`` where the config has only that one: what newer releases of transformers save it as."""
        return other if self.has(other) and not self.has(name) else name

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def layers(self, name: str) -> frozenset[int]:
        """A list of layer numbers, empty if absent."""
        return frozenset(self._list(name, int))

    def words(self, name: str, known: frozenset[str]) -> list[str]:
        """A list with one of the ``known`` words for each layer, empty if absent."""
        words: list[str] = self._list(name, str)
        unknown = next((word for word in words if word not in known), None)
        if unknown is not None:
            raise InvalidRequest(f"config.json: {name} holds {brief(unknown)}, which is not known", field=name)
        return words

    def _list(self, name: str, kind: type) -> list[Any]:
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            raise InvalidRequest(f"config.json: {name} is {brief(value)}, not a list of {kind.__name__}", field=name)
        return value


def _layers(fields: Fields) -> int:
    return fields.size("num_hidden_layers", most=MAX_LAYERS)


def _attention(fields: Fields, *, kv_heads: int | None, head_dim: int) -> dict[str, ModuleShape]:
    hidden = fields.size("hidden_size")
    queries = fields.size("num_attention_heads") * fields.size("head_dim", head_dim)
    keys = fields.size("num_key_value_heads", kv_heads) * fields.size("head_dim", head_dim)
    sizes = {"q": (hidden, queries), "k": (hidden, keys), "v": (hidden, keys), "o": (queries, hidden)}
    return {name: ModuleShape(DENSE_PATHS[name], *size) for name, size in sizes.items()}


def _mlp(paths: Mapping[str, str], hidden: int, inner: int) -> dict[str, ModuleShape]:
    """Gate, up and down under the names of ``paths``, which has them in this order."""
    sizes = ((hidden, inner), (hidden, inner), (inner, hidden))
    return {name: ModuleShape(path, *size) for (name, path), size in zip(paths.items(), sizes, strict=True)}


def _experts(
    hidden: int, inner: int, experts: int, *, paths: Mapping[str, str] = EXPERT_PATHS, alternating: bool = False
) -> dict[str, ModuleShape]:
    """The separate modules and the fused one; ``alternating`` as gpt-oss keeps them, transposed and interleaved."""
    sizes = {
        "experts.gate": (hidden, inner),
        "experts.gate_up": (hidden, 2 * inner),
        "experts.up": (hidden, inner),
        "experts.down": (inner, hidden),
    }
    return {
        name: ModuleShape(
            paths[name], *size, experts, interleaved=alternating and name == "experts.gate_up", transposed=alternating
        )
        for name, size in sizes.items()
    }


def _router(hidden: int, experts: int, path: str = ROUTER_PATHS["router"]) -> dict[str, ModuleShape]:
    return {"router": ModuleShape(path, hidden, experts)}


def _split_heads(fields: Fields) -> int:
    return fields.size("hidden_size") // fields.size("num_attention_heads")


def _dense(fields: Fields, attention: Layer) -> Layers:
    dense = _mlp(_DENSE_MLP, fields.size("hidden_size"), fields.size("intermediate_size"))
    return Layers(({**attention, **dense},) * _layers(fields))


_DENSE_MLP = {name: DENSE_PATHS[name] for name in ("gate", "up", "down")}


def _llama(fields: Fields) -> Layers:
    heads = fields.size("num_attention_heads")
    return _dense(fields, _attention(fields, kv_heads=heads, head_dim=_split_heads(fields)))


def _qwen2(fields: Fields) -> Layers:
    return _dense(fields, _attention(fields, kv_heads=None, head_dim=_split_heads(fields)))


def _qwen3(fields: Fields) -> Layers:
    return _dense(fields, _attention(fields, kv_heads=None, head_dim=_QWEN3_HEAD_DIM))


def _qwen3_moe(fields: Fields) -> Layers:
    hidden = fields.size("hidden_size")
    experts = fields.size(fields.either("num_experts", "num_local_experts"), most=MAX_EXPERTS)
    attention = _attention(fields, kv_heads=None, head_dim=_split_heads(fields))
    dense = _mlp(_DENSE_MLP, hidden, fields.size("intermediate_size"))
    sparse = {
        **_router(hidden, experts),
        **_experts(hidden, fields.size("moe_intermediate_size"), experts),
    }
    step, only_dense = fields.size("decoder_sparse_step", 1), fields.layers("mlp_only_layers")
    return Layers(
        tuple(
            {**attention, **(sparse if layer not in only_dense and (layer + 1) % step == 0 else dense)}
            for layer in range(_layers(fields))
        )
    )


def _mixtral(fields: Fields) -> Layers:
    hidden, experts = fields.size("hidden_size"), fields.size("num_local_experts", most=MAX_EXPERTS)
    paths = {
        "experts.gate": "block_sparse_moe.experts.{}.w1",
        "experts.up": "block_sparse_moe.experts.{}.w3",
        "experts.down": "block_sparse_moe.experts.{}.w2",
        "experts.gate_up": EXPERT_PATHS["experts.gate_up"],
    }
    layer = {
        **_attention(fields, kv_heads=None, head_dim=_split_heads(fields)),
        **_router(hidden, experts, "block_sparse_moe.gate"),
        **_experts(hidden, fields.size("intermediate_size"), experts, paths=paths),
    }
    return Layers((layer,) * _layers(fields))


def _gpt_oss(fields: Fields) -> Layers:
    hidden, experts = fields.size("hidden_size"), fields.size("num_local_experts", most=MAX_EXPERTS)
    layer = {
        **_attention(fields, kv_heads=None, head_dim=_split_heads(fields)),
        **_router(hidden, experts, "mlp.router"),
        **_experts(hidden, fields.size("intermediate_size"), experts, alternating=True),
    }
    return Layers((layer,) * _layers(fields))


def _latent_attention(fields: Fields) -> dict[str, ModuleShape]:
    """Queries and keys through low-rank projections of the base's own; without q_lora_rank the query's is direct."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    rope, nope = fields.size("qk_rope_head_dim"), fields.size("qk_nope_head_dim")
    latent, value = fields.size("kv_lora_rank"), fields.size("v_head_dim")
    queries = heads * (rope + nope)
    sizes = {
        "kv_a": (hidden, latent + rope),
        "kv_b": (latent, heads * (nope + value)),
    }
    if fields.has("q_lora_rank"):
        rank = fields.size("q_lora_rank")
        sizes.update(q_a=(hidden, rank), q_b=(rank, queries))
    modules = {name: ModuleShape(MLA_PATHS[name], *size) for name, size in sizes.items()}
    if not fields.has("q_lora_rank"):
        modules["q"] = ModuleShape(DENSE_PATHS["q"], hidden, queries)
    modules["o"] = ModuleShape(DENSE_PATHS["o"], heads * value, hidden)
    return modules


def _indexer(fields: Fields) -> dict[str, ModuleShape]:
    hidden, heads = fields.size("hidden_size"), fields.size("index_n_heads")
    width = fields.size("index_head_dim")
    sizes = {
        "indexer.q": (fields.size("q_lora_rank"), heads * width),
        "indexer.k": (hidden, width),
        "indexer.weights": (hidden, heads),
    }
    return {name: ModuleShape(INDEXER_PATHS[name], *size) for name, size in sizes.items()}


def _deepseek(fields: Fields) -> Layers:
    """DeepSeek-V3 and its kin: latent attention, the first layers dense, shared experts, layers that predict further.

    Such an extra layer is one of experts with a projection of its own in front.
    """
    attention = _latent_attention(fields)
    hidden, inner = fields.size("hidden_size"), fields.size("moe_intermediate_size")
    dense = {**attention, **_mlp(_DENSE_MLP, hidden, fields.size("intermediate_size"))}
    experts = fields.size(fields.either("n_routed_experts", "num_local_experts"), most=MAX_EXPERTS)
    sparse = {**attention, **_router(hidden, experts), **_experts(hidden, inner, experts)}
    shared = fields.size("n_shared_experts", 1, least=0)
    if shared:
        sparse.update(_mlp(SHARED_PATHS, hidden, shared * inner))
    layers, first = _layers(fields), fields.size("first_k_dense_replace", 0, least=0)
    every = fields.size("moe_layer_freq", 1)
    kinds = fields.words("mlp_layer_types", frozenset({"dense", "sparse"})) or [
        "sparse" if layer >= first and layer % every == 0 else "dense" for layer in range(layers)
    ]
    if len(kinds) != layers:
        raise InvalidRequest(f"config.json: mlp_layer_types is for {len(kinds)} layers", field="mlp_layer_types")
    further_layers = fields.either("num_nextn_predict_layers", "num_mtp_layers")
    mtp = fields.size(further_layers, 0, least=0, most=_MAX_MTP_LAYERS)
    further = {"eh": ModuleShape(MTP_PATHS["eh"], 2 * hidden, hidden), **sparse}
    usual = tuple(sparse if kind == "sparse" else dense for kind in kinds)
    return Layers(usual + (further,) * mtp, mtp)


def _glm_dsa(fields: Fields) -> Layers:
    """DeepSeek's layers with an indexer in those that choose their own keys; the others reuse the choice before."""
    layers, mtp = _deepseek(fields)
    indexer = _indexer(fields)
    kinds = fields.words("indexer_types", frozenset({"full", "shared"})) or ["full"] * (len(layers) - mtp)
    if len(kinds) != len(layers) - mtp:
        raise InvalidRequest(f"config.json: indexer_types is for {len(kinds)} layers", field="indexer_types")
    kinds += ["full"] * mtp
    return Layers(
        tuple({**layer, **indexer} if kind == "full" else layer for layer, kind in zip(layers, kinds, strict=True)),
        mtp,
    )


ARCHITECTURES: dict[str, Callable[[Fields], Layers]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "DeepseekV3ForCausalLM": _deepseek,
    "KimiK2ForCausalLM": _deepseek,
    "GlmMoeDsaForCausalLM": _glm_dsa,
    "GptOssForCausalLM": _gpt_oss,
}
