"""Tiny random models of every supported family, for tests, demos and ``verify-model --random-init``.

A tiny configuration keeps every layer kind of its family, windows and chunks of 32 to 48 tokens (so that
a few hundred tokens hold several of them) and fewer index entries per query than there are entries.
``random_model`` initialises *every* parameter from one seed, so that windows, gates, sinks, convolutions
and routing all change the logits; transformers leaves some of them at zero.

Importing this module needs neither torch nor transformers; calling its functions needs both.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvloom.errors import InputError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
_DSA: dict[str, Any] = {**_MLA, "index_topk": 24, "index_head_dim": 16, "index_n_heads": 16}
_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_SLIDING_FULL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_LINEAR_FULL = ["linear_attention", "full_attention", "linear_attention", "full_attention"]

# family -> (model_type of the text model, settings that differ from _SIZES; None removes a setting)
_TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 3}),
    "mistral": ("mistral", {"num_hidden_layers": 3, "sliding_window": 40}),
    "qwen3": ("qwen3", {"num_hidden_layers": 3}),
    "gemma2": (
        "gemma2",
        {"layer_types": _SLIDING_FULL, "sliding_window": 40, "query_pre_attn_scalar": 16},
    ),
    "gemma3": (
        "gemma3_text",
        {"layer_types": _SLIDING_FULL, "sliding_window": 40, "query_pre_attn_scalar": 16},
    ),
    "gemma4": (
        "gemma4_text",
        {
            # Layers 4 and 5 read the keys and values of layers 2 and 3; full layers have wider heads.
            "layer_types": [*_SLIDING_FULL, "sliding_attention", "full_attention"],
            "sliding_window": 40,
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": 320,
            "hidden_size_per_layer_input": 16,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {"layer_types": _SLIDING_FULL, "sliding_window": 40, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama4": (
        "llama4_text",
        {
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0, 1, 0],
            "attention_chunk_size": 48,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "moe_layers": [1, 3],
            "floor_scale": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "olmo3": ("olmo3", {"head_dim": None, "layer_types": _SLIDING_FULL, "sliding_window": 40}),
    "exaone4": (
        "exaone4",
        {"layer_types": _SLIDING_FULL, "sliding_window": 40, "sliding_window_pattern": 2},
    ),
    "ministral": ("ministral", {"layer_types": _SLIDING_FULL, "sliding_window": 40}),
    "deepseek_v3": ("deepseek_v3", {**_MLA, "head_dim": None, "num_hidden_layers": 3, "first_k_dense_replace": 1}),
    "deepseek_v32": ("deepseek_v32", {**_DSA, "head_dim": None, "num_hidden_layers": 3, "first_k_dense_replace": 1}),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {
            **_DSA,
            "head_dim": None,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 1,
            "indexer_types": ["full", "shared", "full", "shared"],
        },
    ),
    "deepseek_v4": (
        "deepseek_v4",
        {
            "intermediate_size": None,
            "num_key_value_heads": 1,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
            "sliding_window": 32,
            "partial_rotary_factor": 0.5,
            "q_lora_rank": 32,
            "o_groups": 2,
            "o_lora_rank": 16,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 4,
            # Few index heads give exactly equal scores (a sum of few ReLUs is often 0): ties flip the top-k.
            "index_n_heads": 16,
            "index_head_dim": 16,
            "index_topk": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **_DELTA,
            "layer_types": _LINEAR_FULL,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3_5": ("qwen3_5_text", {**_DELTA, "layer_types": _LINEAR_FULL}),
    "kimi_linear": (
        "kimi_linear",
        {
            **{k: v for k, v in _MLA.items() if k not in ("n_routed_experts", "q_lora_rank")},
            "head_dim": None,
            "max_position_embeddings": None,
            "model_max_length": 4096,
            "num_local_experts": 8,
            "layer_types": _LINEAR_FULL,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "linear_head_dim": 16,
            "linear_num_heads": 4,
        },
    ),
    "lfm2": ("lfm2", {"head_dim": None, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    "lfm3": (
        "lfm3",
        {
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
            "conv_L_cache": 5,
            "sliding_window": 40,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            "head_dim": None,
            "num_hidden_layers": 3,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_chunk_size": 32,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            "head_dim": None,
            "layer_types": _LINEAR_FULL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_chunk_size": 32,
            "attention_multiplier": 0.25,
            "position_embedding_type": "rope",
        },
    ),
}

FAMILIES: tuple[str, ...] = tuple(_TINY)
"""The families that ``tiny_config`` knows, in the order of the documentation."""

REAL_V4_RATIOS: dict[str, int] = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""The ratios of the real DeepSeek-V4, to pass as ``tiny_config("deepseek_v4", compress_rates=...)``."""


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """Configuration of a tiny model of ``family``; ``overrides`` replace single settings.

    Raises InputError for a family that is not in ``FAMILIES``.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if family not in _TINY:
        raise InputError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")
    model_type, own = _TINY[family]
    settings = {**_SIZES, **own, **overrides}
    for name in ("head_dim", "intermediate_size", "max_position_embeddings"):
        if settings[name] is None:
            del settings[name]
    if settings.get("layer_types") is not None:
        settings["layer_types"] = list(settings["layer_types"])
        settings["num_hidden_layers"] = len(settings["layer_types"])
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**settings)
    return config


def random_model(config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype | str = "float32") -> PreTrainedModel:
    """Model of ``config`` in eval mode with every parameter and routing table drawn from ``seed``.

    The values depend only on ``seed``, the names and the shapes of the parameters, not on the dtype
    (lower precision rounds the same values) or on the global random state.
    """
    import torch
    from transformers import AutoModelForCausalLM

    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=wanted)
    # from_pretrained keeps these in float32 when the model is half precision; from_config does not.
    keep = tuple(model._keep_in_fp32_modules_strict or ()) if wanted in (torch.float16, torch.bfloat16) else ()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and any(part in name for part in keep):
            tensor.data = tensor.data.float()
    tied = bool(config.tie_word_embeddings)
    with torch.no_grad():
        for index, (name, tensor) in enumerate(model.named_parameters()):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
            tensor.copy_(_draw(name, tensor, generator, tied=tied) * _gain(config, name))
        for index, (name, tensor) in enumerate(model.named_buffers()):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + 500_009 + index)
            if name.endswith("tid2eid"):  # V4: token id -> experts of the hash-routed layers, distinct per token
                experts = int(config.n_routed_experts)
                rows = torch.rand(tensor.shape[0], experts, generator=generator).argsort(dim=1)
                tensor.copy_(rows[:, : tensor.shape[1]].to(tensor.dtype))
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
    return model.eval()


def _draw(name: str, tensor: torch.Tensor, generator: torch.Generator, *, tied: bool) -> torch.Tensor:
    """Random values for one parameter: unit-gain matrices, norms around their neutral value, small vectors."""
    import torch

    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "A_log":
        return torch.rand(tensor.shape, generator=generator).mul(4.0).add(0.5).log()
    if leaf == "dt_bias":
        return noise * 0.5 - 1.0
    if "embed" in name:  # an embedding that is the head as well has unit gain, or the logits would saturate
        return noise * (tensor.shape[-1] ** -0.5 if tied else 1.0)
    if tensor.dim() >= 2 and leaf not in ("position_bias", "base"):
        fan_in = math.prod(tensor.shape[2:]) if "conv" in name and tensor.dim() > 2 else tensor.shape[-1]
        return noise * (1.0 / math.sqrt(fan_in))
    if "norm" in name or leaf in ("D", "scale", "layer_scalar", "hc_scale"):
        return 0.1 * noise + _neutral(tensor)
    return 0.3 * noise


def _gain(config: PreTrainedConfig, name: str) -> float:
    """Gemma 4 does not scale its attention scores: trained query norms do it, so random ones must."""
    return 0.3 if config.model_type == "gemma4_text" and "q_norm" in name else 1.0


def _neutral(tensor: torch.Tensor) -> float:
    """Value that transformers initialised a norm or scale with: 1, or 0 where the model adds 1 itself."""
    return 0.0 if float(tensor.float().abs().max()) == 0.0 else 1.0
