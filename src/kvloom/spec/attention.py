"""KV cache groups of ordinary attention: full, sliding, chunked, latent (MLA), and DSA indexers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from kvloom.errors import SpecError
from kvloom.spec.config_view import ConfigView
from kvloom.spec.families import Attention, Family
from kvloom.spec.layers import CHUNKED, FULL, RECURRENT, SLIDING, LayerView
from kvloom.spec.model_spec import GroupSpec, TensorSpec
from kvloom.types import Kind

_SMALLEST_WINDOW_BLOCK = 16
_T = TypeVar("_T")


def kv_tensors(config: ConfigView, family: Family, dtype: str) -> tuple[TensorSpec, ...]:
    """The tensors that a full or sliding layer appends to, entry axis before the last."""
    if family.attention is Attention.DEEPSEEK_V4:
        return (TensorSpec("keys", (1, config.integer("head_dim")), dtype, entry_axis=1),)
    if family.attention is Attention.LATENT:
        keys, values = (1, config.integer("kv_lora_rank")), (1, config.integer("qk_rope_head_dim"))
    else:
        keys = values = (_kv_heads(config), _head_dim(config))
    return TensorSpec("keys", keys, dtype, entry_axis=1), TensorSpec("values", values, dtype, entry_axis=1)


def attention_groups(layers: list[LayerView], family: Family, dtype: str, block_size: int) -> list[GroupSpec]:
    """The groups of full, sliding and chunked layers, and of the indexers that ride on full ones."""
    full: dict[tuple[TensorSpec, ...], list[int]] = {}
    local: dict[tuple[int, bool, tuple[TensorSpec, ...]], list[int]] = {}
    for layer in layers:
        if layer.layer_type in FULL:
            full.setdefault(kv_tensors(layer.config, family, dtype), []).append(layer.index)
        elif layer.layer_type in SLIDING | CHUNKED:
            chunked = layer.layer_type in CHUNKED
            key = (_window(layer, chunked), chunked, kv_tensors(layer.config, family, dtype))
            local.setdefault(key, []).append(layer.index)
    groups = [
        GroupSpec(name, Kind.COMPRESSED, tuple(indices), tensors, block_tokens=block_size)
        for name, (tensors, indices) in numbered("full", full.items())
    ]
    names: dict[str, int] = {}
    for (window, chunked, tensors), indices in local.items():
        base = f"{'chunk' if chunked else 'window'}.{window}"
        names[base] = names.get(base, 0) + 1
        name = base if names[base] == 1 else f"{base}.{names[base]}"
        groups.append(window_group(name, tuple(indices), tensors, window, block_size, chunked))
    return groups + indexer_groups(layers, dtype, block_size)


def window_group(
    name: str, layers: tuple[int, ...], tensors: tuple[TensorSpec, ...], window: int, block_size: int, chunked: bool
) -> GroupSpec:
    """A WINDOW group; blocks of short windows are smaller, but always divide ``block_size``."""
    block = window_block(window, block_size)
    return GroupSpec(name, Kind.WINDOW, layers, tensors, block_tokens=block, window=window, chunked=chunked)


def window_block(window: int, block_size: int) -> int:
    """Tokens per block of a window: ``block_size``, or its largest divisor that is no longer than the window."""
    if window >= block_size:
        return block_size
    limit = max(window, _SMALLEST_WINDOW_BLOCK)
    return max(d for d in range(1, block_size + 1) if block_size % d == 0 and d <= limit)


def indexer_groups(layers: list[LayerView], dtype: str, block_size: int) -> list[GroupSpec]:
    """DSA: one key per token in every layer that runs its own indexer (others reuse its choice)."""
    found: dict[tuple[TensorSpec, ...], list[int]] = {}
    for layer in layers:
        if layer.layer_type == "indexed_attention" and _indexer_mode(layer) == "full":
            tensor = TensorSpec("indexer_keys", (layer.config.integer("index_head_dim"),), dtype, entry_axis=0)
            found.setdefault((tensor,), []).append(layer.index)
    return [
        GroupSpec(name, Kind.INDEXER, tuple(indices), tensors, block_tokens=block_size)
        for name, (tensors, indices) in numbered("indexer", found.items())
    ]


def recurrent_groups(layers: list[LayerView], family: Family, dtype: str) -> list[GroupSpec]:
    """One snapshot group per state geometry."""
    found: dict[tuple[TensorSpec, ...], list[int]] = {}
    for layer in layers:
        if layer.layer_type in RECURRENT and family.recurrent is not None:
            found.setdefault(family.recurrent(layer.config, dtype), []).append(layer.index)
    return [
        GroupSpec(name, Kind.RECURRENT, tuple(indices), tensors)
        for name, (tensors, indices) in numbered("recurrent", found.items())
    ]


def numbered(base: str, items: Iterable[_T]) -> Iterable[tuple[str, _T]]:
    """``base``, ``base.2``, ``base.3``, ... with the items."""
    return ((base if i == 0 else f"{base}.{i + 1}", item) for i, item in enumerate(items))


def _kv_heads(config: ConfigView) -> int:
    return config.integer("num_attention_heads" if config.get("num_key_value_heads") is None else "num_key_value_heads")


def _head_dim(config: ConfigView) -> int:
    if config.get("head_dim") is not None:
        return config.integer("head_dim")
    return config.integer("hidden_size") // config.integer("num_attention_heads")


def _window(layer: LayerView, chunked: bool) -> int:
    name = "attention_chunk_size" if chunked else "sliding_window"
    if layer.config.get("use_sliding_window", True) is False or layer.config.get(name) is None:
        raise SpecError(f"layer {layer.index}: a {layer.layer_type} layer, but the config sets no {name}")
    return layer.config.integer(name)


def _indexer_mode(layer: LayerView) -> str:
    """``full``: the layer has an indexer; ``shared``: it uses the choice of an earlier layer."""
    modes = layer.config.get("indexer_types")
    if modes is None:
        modes = _indexer_schedule(layer.config, layer.index + 1)
    mode = modes[layer.index]
    if mode not in ("full", "shared"):
        raise SpecError(f"layer {layer.index}: indexer type {mode!r} is not understood; known: full, shared")
    return str(mode)


def _indexer_schedule(config: ConfigView, count: int) -> list[str]:
    """GLM's defaults when ``indexer_types`` is not stated."""
    pattern = config.get("index_topk_pattern")
    if isinstance(pattern, str):
        return [{"F": "full", "S": "shared"}.get(c, c) for c in pattern]
    if pattern is not None:
        return list(pattern)
    every, offset = max(config.get("index_topk_freq", 1), 1), config.get("index_skip_topk_offset", 2)
    return ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(count)]
