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

from kvloom.errors import SpecError
from kvloom.spec.config_view import ConfigView
from kvloom.spec.recurrent import RecurrentShapes, gated_delta, kimi_delta, mamba2, mamba2_own_width, short_conv

LayerRule = Callable[[ConfigView, int], list[str]]


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
    """Defaults and rules of one ``model_type``."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    layer_types: LayerRule | None = None
    attention: Attention = Attention.GROUPED
    recurrent: RecurrentShapes | None = None
    indexer: bool = False
    last_is_full: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)


def _every(period: int, *, here: str, elsewhere: str, key: str | None = None) -> LayerRule:
    """Every ``period``-th layer (1-based) is ``here``; ``key`` names a config value that replaces the period."""

    def rule(view: ConfigView, layers: int) -> list[str]:
        n = int(view.get(key) or period) if key else period
        return [here if (i + 1) % n == 0 else elsewhere for i in range(layers)]

    return rule


def _sliding_every(period: int, key: str | None = None) -> LayerRule:
    return _every(period, here="full_attention", elsewhere="sliding_attention", key=key)


def _linear_every(period: int) -> LayerRule:
    return _every(period, here="full_attention", elsewhere="linear_attention", key="full_attention_interval")


def _all(layer_type: str) -> LayerRule:
    return lambda view, layers: [layer_type] * layers


def _ministral(view: ConfigView, layers: int) -> list[str]:
    return ["full_attention" if view.get("sliding_window") is None else "sliding_attention"] * layers


def _qwen(view: ConfigView, layers: int) -> list[str]:
    sliding = bool(view.get("use_sliding_window")) and view.get("sliding_window") is not None
    first = int(view.get("max_window_layers") or 0)
    return ["sliding_attention" if sliding and i >= first else "full_attention" for i in range(layers)]


def _exaone4(view: ConfigView, layers: int) -> list[str]:
    pattern = view.get("sliding_window_pattern")
    if view.get("sliding_window") is None or not isinstance(pattern, int) or pattern < 1:
        raise SpecError(
            f"exaone4: no layer_types, and sliding_window_pattern {pattern!r} does not give them; "
            "state layer_types in the config"
        )
    return _sliding_every(pattern)(view, layers)


def _llama4(view: ConfigView, layers: int) -> list[str]:
    interval = view.integer("no_rope_layer_interval")
    rope = view.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    return ["chunked_attention" if r else "full_attention" for r in rope]


def _kimi(view: ConfigView, layers: int) -> list[str]:
    nested = view.get("linear_attn_config") or {}
    if "full_attn_layers" in nested and "kda_layers" in nested:
        types = [""] * layers
        for name, layer_type in (("full_attn_layers", "full_attention"), ("kda_layers", "linear_attention")):
            for layer in nested[name]:
                types[layer - 1] = layer_type
        return types
    return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(layers)]


def _lfm2(view: ConfigView, layers: int) -> list[str]:
    full = view.get("full_attn_idxs")
    return ["full_attention" if full is None or i in full else "conv" for i in range(layers)]


def _lfm3(view: ConfigView, layers: int) -> list[str]:
    return [
        "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 and i > 0 else "conv"
        for i in range(layers)
    ]


_V4_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def _deepseek_v4(view: ConfigView, layers: int) -> list[str]:
    ratios = view.get("compress_ratios")
    if ratios is None:
        csa, hca = _V4_TYPES[4], _V4_TYPES[128]
        return ([hca, hca] + [csa if i % 2 else hca for i in range(max(layers - 2, 0))])[:layers]
    for i, ratio in enumerate(ratios[:layers]):
        if ratio not in _V4_TYPES:
            raise SpecError(f"deepseek_v4: layer {i} has compression ratio {ratio!r}; known: 0, 4 and 128")
    return [_V4_TYPES[r] for r in ratios[:layers]]


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
        "ministral": Family(_gqa(4096, 32, 32, 8, 32000, 131_072, sliding_window=4096), _ministral),
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
                use_sliding_window=False,
                sliding_window=4096,
                max_window_layers=28,
            ),
            _qwen,
        ),
        "gemma2": Family(_gqa(2304, 26, 8, 4, 256_000, 8192, head_dim=256, sliding_window=4096), _sliding_every(2)),
        "gemma3_text": Family(
            _gqa(2304, 26, 8, 4, 262_208, 131_072, head_dim=256, sliding_window=4096),
            _sliding_every(6, "sliding_window_pattern"),
        ),
        "gemma3n_text": Family(_GEMMA3N, _sliding_every(5)),
        "gemma4_text": Family(_GEMMA4, _sliding_every(6), last_is_full=True),
        "gpt_oss": Family(_gqa(2880, 36, 64, 8, 201_088, 131_072, head_dim=64, sliding_window=128), _sliding_every(2)),
        "llama4_text": Family(
            _gqa(5120, 48, 40, 8, 202_048, 131_072, head_dim=128, attention_chunk_size=8192, no_rope_layer_interval=4),
            _llama4,
        ),
        "olmo3": Family(_gqa(4096, 32, 32, None, 50_304, 2048, sliding_window=4096), _sliding_every(4)),
        "cohere2": Family(
            _gqa(8192, 40, 64, None, 256_000, 8192, sliding_window=4096), _sliding_every(4, "sliding_window_pattern")
        ),
        "exaone4": Family(
            _gqa(4096, 32, 32, 32, 102_400, 2048, sliding_window=4096, sliding_window_pattern=4), _exaone4
        ),
        "deepseek_v3": Family(_gqa(7168, 61, 128, 128, 129_280, 4096, **_MLA), None, Attention.LATENT),
        "deepseek_v32": Family(
            _gqa(7168, 61, 128, 128, 129_280, 163_840, index_head_dim=128, **_MLA),
            _all("indexed_attention"),
            Attention.LATENT,
            indexer=True,
        ),
        "glm_moe_dsa": Family(
            _gqa(6144, 78, 64, 64, 154_880, 202_752, index_head_dim=128, **_MLA),
            _all("indexed_attention"),
            Attention.LATENT,
            indexer=True,
        ),
        "deepseek_v4": Family(
            _gqa(4096, 43, 64, 1, 129_280, 1_048_576, head_dim=512, sliding_window=128, index_head_dim=128),
            _deepseek_v4,
            Attention.DEEPSEEK_V4,
        ),
        "qwen3_next": Family(_gqa(2048, 48, 16, 2, 151_936, 32_768, **_DELTA), _linear_every(4), recurrent=gated_delta),
        "qwen3_5_text": Family(
            _gqa(4096, 32, 16, 4, 248_320, 32_768, **_DELTA), _linear_every(4), recurrent=gated_delta
        ),
        "qwen3_5_moe_text": Family(
            _gqa(2048, 40, 16, 2, 248_320, 32_768, **_DELTA), _linear_every(4), recurrent=gated_delta
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
            _kimi,
            Attention.LATENT,
            kimi_delta,
            aliases={"max_position_embeddings": "model_max_length"},
        ),
        "lfm2": Family(_gqa(2560, 32, 32, 8, 65_536, 128_000, conv_L_cache=3), _lfm2, recurrent=short_conv),
        "lfm3": Family(
            _gqa(2048, 24, 16, 4, 128_000, 128_000, head_dim=128, sliding_window=256, conv_L_cache=7),
            _lfm3,
            recurrent=short_conv,
        ),
        "falcon_h1": Family(
            _gqa(4096, 32, 32, 8, 128_000, 8192, **_MAMBA, mamba_d_ssm=1024),
            _all("hybrid"),
            recurrent=mamba2_own_width,
            aliases={"layer_types": "layers_block_type"},
        ),
        "granitemoehybrid": Family(
            _gqa(4096, 32, 32, None, 32_000, 2048, **_MAMBA),
            _all("linear_attention"),
            recurrent=mamba2,
            aliases={"layer_types": "layers_block_type"},
        ),
    }
)
"""Every family with its own rules, by ``model_type`` of the text config."""
