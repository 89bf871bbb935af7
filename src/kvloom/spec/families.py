"""What transformers' config classes fill in, per family, and which rules describe their layers.

Only values that decide the cached state are listed.  The tests compare every entry with the class it
was taken from, so a new transformers version that changes a default shows up there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from kvloom.spec import layer_rules as rules
from kvloom.spec import recurrent
from kvloom.spec.config_view import ConfigView
from kvloom.spec.layer_rules import LayerRule
from kvloom.spec.recurrent import RecurrentShapes


class Attention(Enum):
    """What a full or sliding layer of the family puts into ``keys`` and ``values``."""

    GROUPED = "grouped"
    """K and V of ``num_key_value_heads`` heads of ``head_dim``."""
    LATENT = "latent"
    """MLA: ``keys`` is the latent (1, kv_lora_rank), ``values`` the rotary key (1, qk_rope_head_dim)."""
    DEEPSEEK_V4 = "deepseek_v4"
    """One shared key head that is the value, too."""


@dataclass(frozen=True, slots=True)
class Family:
    """Defaults and rules of one ``model_type``.

    Attributes:
        defaults: values of missing keys.  Without any, a plain dict of this family must state everything.
        layer_types: how the config class derives them; None: by the general rule.
        attention: what full and sliding layers keep.
        recurrent: shapes of the state of linear, convolution and hybrid layers; None: not known.
        indexer: indexed layers keep one indexer key per token.
        last_is_full: the last layer is full whatever ``layer_types`` says.
        full_layers: values that differ in full layers, when the config has no ``per_layer_config``.
        aliases: name asked for -> name in the config.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    layer_types: LayerRule | None = None
    attention: Attention = Attention.GROUPED
    recurrent: RecurrentShapes | None = None
    indexer: bool = False
    last_is_full: bool = False
    full_layers: Callable[[ConfigView], Mapping[str, Any]] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)


def _gqa(
    hidden: int, layers: int, heads: int, kv: int | None, vocab: int, positions: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        **more,
    }


_BLOCK_TYPES = {"layer_types": "layers_block_type"}
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_DELTA = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MAMBA = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA3N = _gqa(2048, 35, 8, 2, 262_400, 32_768, head_dim=256, sliding_window=512, num_kv_shared_layers=15)
_GEMMA4 = _gqa(
    2304,
    30,
    8,
    4,
    262_144,
    131_072,
    head_dim=256,
    sliding_window=512,
    global_head_dim=512,
    attention_k_eq_v=False,
    num_kv_shared_layers=0,
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(_gqa(4096, 32, 32, None, 32000, 2048)),
        "mistral": Family(_gqa(4096, 32, 32, 8, 32000, 131_072, sliding_window=4096)),
        "ministral": Family(_gqa(4096, 32, 32, 8, 32000, 131_072, sliding_window=4096), rules.ministral),
        "ministral3": Family(_gqa(4096, 34, 32, 8, 131_072, 262_144, head_dim=128, sliding_window=None)),
        "qwen3": Family(
            _gqa(
                4096,
                32,
                32,
                32,
                151_936,
                32_768,
                head_dim=128,
                **_QWEN_WINDOW,
            ),
            rules.qwen,
        ),
        "mixtral": Family(_gqa(4096, 32, 32, 8, 32_000, 131_072, sliding_window=None)),
        "phi3": Family(_gqa(3072, 32, 32, None, 32_064, 4096, sliding_window=None)),
        "granite": Family(_gqa(4096, 32, 32, None, 32_000, 2048)),
        "gemma": Family(_gqa(3072, 28, 16, 16, 256_000, 8192, head_dim=256)),
        "olmo2": Family(_gqa(4096, 32, 32, None, 50_304, 2048)),
        "cohere": Family(_gqa(8192, 40, 64, None, 256_000, 8192)),
        "starcoder2": Family(_gqa(3072, 30, 24, 2, 49_152, 4096, sliding_window=None)),
        "glm4": Family(_gqa(4096, 40, 32, 2, 151_552, 131_072, head_dim=128)),
        "glm4_moe": Family(_gqa(4096, 46, 96, 8, 151_552, 131_072)),
        "seed_oss": Family(_gqa(4096, 64, 80, 8, 155_136, 524_288, head_dim=128)),
        "qwen2": Family(_gqa(4096, 32, 32, 32, 151_936, 32_768, **_QWEN_WINDOW), rules.qwen),
        "qwen3_moe": Family(
            _gqa(2048, 24, 32, 4, 151_936, 32_768, use_sliding_window=False, sliding_window=4096), rules.qwen3_moe
        ),
        "lfm2_moe": Family(recurrent=recurrent.short_conv),
        "gemma2": Family(
            _gqa(2304, 26, 8, 4, 256_000, 8192, head_dim=256, sliding_window=4096), rules.sliding_every(2)
        ),
        "gemma3_text": Family(
            _gqa(2304, 26, 8, 4, 262_208, 131_072, head_dim=256, sliding_window=4096),
            rules.sliding_every(6, "sliding_window_pattern"),
        ),
        "gemma3n_text": Family(_GEMMA3N, rules.sliding_every(5)),
        "gemma4_text": Family(_GEMMA4, rules.sliding_every(6), last_is_full=True, full_layers=rules.gemma4_full_layers),
        "gpt_oss": Family(
            _gqa(2880, 36, 64, 8, 201_088, 131_072, head_dim=64, sliding_window=128), rules.sliding_every(2)
        ),
        "llama4_text": Family(
            _gqa(5120, 48, 40, 8, 202_048, 131_072, head_dim=128, attention_chunk_size=8192, no_rope_layer_interval=4),
            rules.llama4,
        ),
        "olmo3": Family(_gqa(4096, 32, 32, None, 50_304, 2048, sliding_window=4096), rules.sliding_every(4)),
        "cohere2": Family(
            _gqa(8192, 40, 64, None, 256_000, 8192, sliding_window=4096),
            rules.sliding_every(4, "sliding_window_pattern"),
        ),
        "exaone4": Family(
            _gqa(4096, 32, 32, 32, 102_400, 2048, sliding_window=4096, sliding_window_pattern=4), rules.exaone4
        ),
        "deepseek_v3": Family(_gqa(7168, 61, 128, 128, 129_280, 4096, **_MLA), None, Attention.LATENT),
        "deepseek_v32": Family(
            _gqa(7168, 61, 128, 128, 129_280, 163_840, index_head_dim=128, **_MLA),
            rules.uniform("indexed_attention"),
            Attention.LATENT,
            indexer=True,
        ),
        "glm_moe_dsa": Family(
            _gqa(6144, 78, 64, 64, 154_880, 202_752, index_head_dim=128, **_MLA),
            rules.uniform("indexed_attention"),
            Attention.LATENT,
            indexer=True,
        ),
        "deepseek_v4": Family(
            _gqa(4096, 43, 64, 1, 129_280, 1_048_576, head_dim=512, sliding_window=128, index_head_dim=128),
            rules.deepseek_v4,
            Attention.DEEPSEEK_V4,
        ),
        "qwen3_next": Family(
            _gqa(2048, 48, 16, 2, 151_936, 32_768, **_DELTA), rules.linear_every(4), recurrent=recurrent.gated_delta
        ),
        "qwen3_5_text": Family(
            _gqa(4096, 32, 16, 4, 248_320, 32_768, **_DELTA), rules.linear_every(4), recurrent=recurrent.gated_delta
        ),
        "qwen3_5_moe_text": Family(
            _gqa(2048, 40, 16, 2, 248_320, 32_768, **_DELTA), rules.linear_every(4), recurrent=recurrent.gated_delta
        ),
        "kimi_linear": Family(
            _gqa(
                2304,
                27,
                32,
                32,
                163_840,
                1_048_576,
                linear_head_dim=128,
                linear_num_heads=32,
                linear_conv_kernel_dim=4,
                **_MLA,
            ),
            rules.kimi,
            Attention.LATENT,
            recurrent.kimi_delta,
            aliases={"max_position_embeddings": "model_max_length"},
        ),
        "lfm2": Family(
            _gqa(2560, 32, 32, 8, 65_536, 128_000, conv_L_cache=3), rules.lfm2, recurrent=recurrent.short_conv
        ),
        "lfm3": Family(
            _gqa(2048, 24, 16, 4, 128_000, 128_000, head_dim=128, sliding_window=256, conv_L_cache=7),
            rules.lfm3,
            recurrent=recurrent.short_conv,
        ),
        "falcon_h1": Family(
            _gqa(4096, 32, 32, 8, 128_000, 8192, **_MAMBA, mamba_d_ssm=1024),
            rules.uniform("hybrid"),
            recurrent=recurrent.mamba2_own_width,
            aliases=_BLOCK_TYPES,
        ),
        "granitemoehybrid": Family(
            _gqa(4096, 32, 32, None, 32_000, 2048, **_MAMBA),
            rules.uniform("linear_attention"),
            recurrent=recurrent.mamba2,
            aliases=_BLOCK_TYPES,
        ),
        # Families whose every value must come from transformers' config object (or be stated).
        **{
            name: Family(attention=Attention.LATENT)
            for name in ("axk1", "deepseek_v2", "glm4_moe_lite", "longcat_flash", "minicpm3", "mistral4", "youtu")
        },
        "bamba": Family(recurrent=recurrent.mamba2, aliases=_BLOCK_TYPES),
        "nemotron_h": Family(recurrent=recurrent.mamba2_nemotron, aliases=_BLOCK_TYPES),
        "zamba2": Family(recurrent=recurrent.mamba2_zamba, aliases={**_BLOCK_TYPES, "head_dim": "attention_head_dim"}),
    }
)
"""Every family with its own rules, by ``model_type`` of the text config."""
