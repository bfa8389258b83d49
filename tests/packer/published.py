"""What the published ``config.json`` of well-known models says about their shape.

Each is named for its repository on Hugging Face, and holds that file's values; fields that say nothing about shapes
are left out.
"""

from __future__ import annotations

from typing import Any

_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_DEEPSEEK = {
    **_LATENT, "architectures": ["DeepseekV3ForCausalLM"], "qk_nope_head_dim": 128, "v_head_dim": 128,
    "moe_layer_freq": 1,
}  # fmt: skip
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 152064,
    },
    "Qwen/Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "hidden_size": 4096,
        "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 36,
        "vocab_size": 151936,
    },
    "Qwen/Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_size": 2048, "intermediate_size": 6144, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "num_attention_heads": 32, "num_experts": 128, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "vocab_size": 151936,
    },
    "mistralai/Mixtral-8x7B-Instruct-v0.1": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "vocab_size": 32000,
    },
    "deepseek-ai/DeepSeek-V3": {
        **_DEEPSEEK, "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536, "vocab_size": 129280,
    },
    "moonshotai/Moonlight-16B-A3B": {
        **_DEEPSEEK, "model_type": "deepseek_v3", "first_k_dense_replace": 1, "hidden_size": 2048,
        "intermediate_size": 11264, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0,
        "q_lora_rank": None, "vocab_size": 163840,
    },
    "moonshotai/Kimi-K2-Instruct": {
        **_DEEPSEEK, "model_type": "kimi_k2", "first_k_dense_replace": 1, "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1,
        "num_attention_heads": 64, "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
        "q_lora_rank": 1536, "vocab_size": 163840,
    },
    "zai-org/GLM-5": {
        **_LATENT, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "first_k_dense_replace": 3,
        "head_dim": 64, "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32, "intermediate_size": 12288,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_attention_heads": 64, "num_hidden_layers": 78, "num_key_value_heads": 64, "num_nextn_predict_layers": 1,
        "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "vocab_size": 154880,
    },
    "openai/gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "openai/gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
}  # fmt: skip

# thousand millions of weights, embeddings included and layers that predict further tokens not, as the cards say
BILLIONS = {
    "meta-llama/Llama-3.1-8B-Instruct": 8.03,
    "Qwen/Qwen2.5-7B-Instruct": 7.61,
    "Qwen/Qwen3-8B": 8.2,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46.7,
    "deepseek-ai/DeepSeek-V3": 671,
    "moonshotai/Moonlight-16B-A3B": 16,
    "moonshotai/Kimi-K2-Instruct": 1040,
    "zai-org/GLM-5": 744,
    "openai/gpt-oss-20b": 20.9,
    "openai/gpt-oss-120b": 116.8,
}
