"""Tiny transformers configs: the shared ones, and more families and variants that the spec must describe."""

from __future__ import annotations

from typing import Any

from kvloom.testing.families import FAMILIES, tiny_config

_BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SHARING: dict[str, Any] = {
    "head_dim": 12,
    "sliding_window": 24,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
}

_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral_full": ("MistralConfig", {"sliding_window": None}),
    "ministral3": ("Ministral3Config", {"head_dim": 12}),
    "qwen3_sliding": (
        "Qwen3Config",
        {"head_dim": 12, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    ),
    "gemma3n": ("Gemma3nTextConfig", {**_SHARING, "laurel_rank": 4}),
    "gemma4_kv_heads": (
        "Gemma4TextConfig",
        {**_SHARING, "global_head_dim": 20, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "cohere2": ("Cohere2Config", {"sliding_window": 24}),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            "head_dim": 16,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 10,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
}

_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
_MORE |= {
    "deepseek_v2": ("DeepseekV2Config", _MLA),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", _MLA),
    "minicpm3": ("MiniCPM3Config", {k: v for k, v in _MLA.items() if "expert" not in k and "group" not in k}),
    "bamba": (
        "BambaConfig",
        {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "attn_layer_indices": [1, 3]},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "head_dim": 12,
            "mamba_num_heads": 8,
            "mamba_head_dim": 6,
            "n_groups": 2,
            "ssm_state_size": 10,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "num_key_value_heads": 4,
            "mamba_d_state": 6,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "num_mem_blocks": 1,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_dense_layers": 1,
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": 24}),
    "smollm3": ("SmolLM3Config", {}),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": None}),
}

NAMES: tuple[str, ...] = (*FAMILIES, *_MORE)
"""Every name that ``tiny`` knows."""


def tiny(name: str) -> Any:
    """A fresh tiny config object."""
    if name not in _MORE:
        return tiny_config(name)
    import transformers

    class_name, settings = _MORE[name]
    present = {key: value for key, value in (_BASE | settings).items() if value is not None or key == "sliding_window"}
    return getattr(transformers, class_name)(**present)
