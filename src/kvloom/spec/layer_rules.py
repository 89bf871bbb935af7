"""How a config class derives ``layer_types`` when the config does not state them, per family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvloom.errors import SpecError
from kvloom.spec.config_view import ConfigView

LayerRule = Callable[[ConfigView, int], list[str]]
"""(config, number of layers) -> layer type of each layer."""


def _every(period: int, *, here: str, elsewhere: str, key: str | None = None) -> LayerRule:
    """Every ``period``-th layer (1-based) is ``here``; ``key`` names a config value that replaces the period."""

    def rule(view: ConfigView, layers: int) -> list[str]:
        n = int(view.get(key) or period) if key else period
        return [here if (i + 1) % n == 0 else elsewhere for i in range(layers)]

    return rule


def sliding_every(period: int, key: str | None = None) -> LayerRule:
    """Every ``period``-th layer is full, the others slide (gpt-oss, Gemma, OLMo 3, Cohere 2)."""
    return _every(period, here="full_attention", elsewhere="sliding_attention", key=key)


def linear_every(period: int) -> LayerRule:
    """Every ``period``-th layer is full, the others are linear (Qwen3-Next, Qwen3.5)."""
    return _every(period, here="full_attention", elsewhere="linear_attention", key="full_attention_interval")


def uniform(layer_type: str) -> LayerRule:
    """All layers are the same."""
    return lambda view, layers: [layer_type] * layers


def ministral(view: ConfigView, layers: int) -> list[str]:
    """All layers slide, if there is a window."""
    return ["full_attention" if view.get("sliding_window") is None else "sliding_attention"] * layers


def qwen(view: ConfigView, layers: int) -> list[str]:
    """The first ``max_window_layers`` are full, the rest slide if ``use_sliding_window`` is set."""
    sliding = bool(view.get("use_sliding_window")) and view.get("sliding_window") is not None
    first = int(view.get("max_window_layers") or 0)
    return ["sliding_attention" if sliding and i >= first else "full_attention" for i in range(layers)]


def qwen3_moe(view: ConfigView, layers: int) -> list[str]:
    """All layers slide if ``use_sliding_window`` is set, else none."""
    sliding = bool(view.get("use_sliding_window")) and view.get("sliding_window") is not None
    return ["sliding_attention" if sliding else "full_attention"] * layers


def exaone4(view: ConfigView, layers: int) -> list[str]:
    """Every ``sliding_window_pattern``-th layer is full; transformers knows no other way to derive them."""
    pattern = view.get("sliding_window_pattern")
    if view.get("sliding_window") is None or not isinstance(pattern, int) or pattern < 1:
        raise SpecError(
            f"exaone4: no layer_types, and sliding_window_pattern {pattern!r} does not give them; "
            "state layer_types in the config"
        )
    return sliding_every(pattern)(view, layers)


def gemma4_full_layers(view: ConfigView) -> dict[str, Any]:
    """Gemma 4's full layers have wider heads and may have fewer of them."""
    values = {"head_dim": view.get("global_head_dim")}
    if view.get("attention_k_eq_v") and view.get("num_global_key_value_heads") is not None:
        values["num_key_value_heads"] = view.get("num_global_key_value_heads")
    return values


def llama4(view: ConfigView, layers: int) -> list[str]:
    """Layers with rotary positions are chunked, those without are full."""
    interval = view.integer("no_rope_layer_interval")
    rope = view.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    return ["chunked_attention" if r else "full_attention" for r in rope]


def kimi(view: ConfigView, layers: int) -> list[str]:
    """The checkpoint's lists of (1-based) layers, else every fourth layer but the first is full."""
    nested = view.get("linear_attn_config") or {}
    if "full_attn_layers" in nested and "kda_layers" in nested:
        types = [""] * layers
        for name, layer_type in (("full_attn_layers", "full_attention"), ("kda_layers", "linear_attention")):
            for layer in nested[name]:
                types[layer - 1] = layer_type
        return types
    return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(layers)]


def lfm2(view: ConfigView, layers: int) -> list[str]:
    """``full_attn_idxs`` are full, the rest short convolutions."""
    full = view.get("full_attn_idxs")
    return ["full_attention" if full is None or i in full else "conv" for i in range(layers)]


def lfm3(view: ConfigView, layers: int) -> list[str]:
    """Convolutions at odd layers, full and sliding ones in turn at even layers."""
    return [
        "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 and i > 0 else "conv"
        for i in range(layers)
    ]


_V4_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def deepseek_v4(view: ConfigView, layers: int) -> list[str]:
    """By ``compress_ratios``, else two HCA layers and then HCA and CSA in turn."""
    ratios = view.get("compress_ratios")
    if ratios is None:
        csa, hca = _V4_TYPES[4], _V4_TYPES[128]
        return ([hca, hca] + [csa if i % 2 else hca for i in range(max(layers - 2, 0))])[:layers]
    for i, ratio in enumerate(ratios[:layers]):
        if ratio not in _V4_TYPES:
            raise SpecError(f"deepseek_v4: layer {i} has compression ratio {ratio!r}; known: 0, 4 and 128")
    return [_V4_TYPES[r] for r in ratios[:layers]]
