"""The resident base as a Megatron model: this rank's stage and shards, frozen, without weights yet."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.nn.attention import SDPBackend, sdpa_kernel

from wire.outcomes import InvalidRequest

from .experts import GroupedExperts
from .gated import GatedMLP
from .head import score
from .hf_config import BaseConfig
from .rotary import rotate
from .topology import Topology

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RMSNorm(torch.nn.Module):
    """Root mean square norm (arXiv 1910.07467), computed in fp32 as Hugging Face does.

    Megatron's own refuses sequence parallelism. ``weight`` is the same on every tensor rank, and frozen.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


# the others give other bits each time
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class ScoringModel(GPTModel):  # type: ignore[misc]
    """A GPTModel whose last stage gives -log p of the labels, (batch, sequence) in fp32, without holding all logits."""

    def _postprocess(self, hidden_states: torch.Tensor, *, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states)
        targets = labels.transpose(0, 1).reshape(-1)
        nll = score(hidden.reshape(len(targets), -1), self.output_layer.weight, targets)
        return nll.view(hidden.shape[:2]).transpose(0, 1)


class CausalAttention(torch.nn.Module):
    """Causal attention with grouped heads on torch's own kernels, which never hold the square of scores."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, **_: Any
    ) -> torch.Tensor:
        """(s, b, heads, d) with (s, b, kv heads, d) twice -> (s, b, heads * d)."""
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if k.shape[1] != q.shape[1]:
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        with sdpa_kernel(_KERNELS):
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


def build_model(base: BaseConfig, topology: Topology, device: torch.device, dtype: str, *, recompute: bool) -> GPTModel:
    """A model whose parameters are uninitialised, on ``device``."""
    # without TransformerEngine, megatron-core 0.16.1 leaves this name undefined and uses it all the same
    moe_utils.te_general_gemm = None
    # the place of TransformerEngine's kernel
    rope_utils.fused_apply_rotary_pos_emb = rotate
    config = _config(base, topology, device, DTYPES[dtype], recompute=recompute)
    layers = topology.layers(base.layers)
    norm = _norm(device)
    specs = [_layer(base, norm, moe=base.moe_layers[layer]) for layer in layers]
    model = ScoringModel(
        config,
        TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm),
        vocab_size=base.vocabulary,
        max_sequence_length=base.context,
        pre_process=topology.first_stage,
        post_process=topology.last_stage,
        # tied weights are loaded twice or shared by weights.py: nothing trains them
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=base.rope_base,
    )
    model.requires_grad_(False)
    if topology.first_stage:
        # full recompute gives gradients of 0 behind an input that needs none
        model.embedding.register_forward_hook(_needs_grad)
    return model.to(device)


def _needs_grad(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


def _config(
    base: BaseConfig, topology: Topology, device: torch.device, dtype: torch.dtype, *, recompute: bool
) -> TransformerConfig:
    options: dict[str, Any] = {}
    if recompute:
        options.update(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return TransformerConfig(
        num_layers=base.layers,
        hidden_size=base.hidden,
        ffn_hidden_size=base.dense_inner,
        num_attention_heads=base.heads,
        num_query_groups=base.kv_heads,
        kv_channels=base.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=base.norm_eps,
        qk_layernorm=base.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=topology.tensor,
        sequence_parallel=topology.sequence,
        pipeline_model_parallel_size=topology.pipeline,
        expert_model_parallel_size=topology.expert,
        expert_tensor_parallel_size=1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # the schedule must not divide by the number of micro-batches: our losses are sums
        calculate_per_token_loss=True,
        # the dispatcher is named also for dense bases: sequences of any length are refused with the default one
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # noqa: S106
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=True,
        **options,
        **(_of_experts(base) if base.experts else {}),
    )


def _of_experts(base: BaseConfig) -> dict[str, Any]:
    return {
        "num_moe_experts": base.experts,
        "moe_ffn_hidden_size": base.expert_inner,
        "moe_layer_freq": [int(moe) for moe in base.moe_layers],
        "moe_router_topk": base.experts_per_token,
        "moe_router_pre_softmax": not base.normalised_routing,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": 0.0,
    }


def _norm(device: torch.device) -> type[RMSNorm]:
    if device.type != "cuda":
        return RMSNorm
    try:
        from .cuda_norm import FusedRMSNorm
    except ImportError as error:
        raise InvalidRequest(f"training on CUDA needs the extra megatron-cuda: {error}", field="device") from None
    return FusedRMSNorm


def _layer(base: BaseConfig, norm: type[RMSNorm], *, moe: bool) -> ModuleSpec:
    head_norm = norm if base.qk_norm else IdentityOp
    mlp = (
        ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=GroupedExperts))
        if moe
        else ModuleSpec(
            module=GatedMLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        )
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=CausalAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
