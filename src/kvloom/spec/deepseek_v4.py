"""KV cache groups of DeepSeek-V4 as transformers' ``DeepseekV4CSACache`` / ``DeepseekV4HCACache`` keep them.

Every layer has a sliding window whose single head is key and value at once.  CSA and HCA layers add
compressed entries (one per ``ratio`` tokens) and the rows of the entry that is not complete yet; CSA
layers add an indexer with its own entries and rows, and the Ca half of the last complete group, which
the next entry overlaps.  The rows of CSA are twice as wide as its entries (Ca and Cb side by side).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.errors import SpecError
from kvloom.spec.attention import window_group
from kvloom.spec.config_view import ConfigView
from kvloom.spec.layers import NOTHING, V4_CSA, V4_HCA, LayerView
from kvloom.spec.model_spec import GroupSpec, TensorSpec
from kvloom.types import Kind

_DEFAULT_RATIOS = {V4_CSA: 4, V4_HCA: 128}
_LEGACY_RATIO_KEYS = {V4_CSA: "compress_rate_csa", V4_HCA: "compress_rate_hca"}


@dataclass(frozen=True, slots=True)
class V4Format:
    """How the entries are stored; the rows that are not compressed yet are plain tensors of ``row_dtype``.

    Attributes:
        window: ``(shape, dtype)`` of one window entry, without the entry axis, which comes before the last.
        entry: of one compressed entry.
        indexer: of one indexer entry.
        row_dtype: of rows that are not compressed yet, and of the overlap.
        gate_dtype: of the gates of the overlap, to which the position bias has been added.
    """

    window: tuple[tuple[int, ...], str]
    entry: tuple[tuple[int, ...], str]
    indexer: tuple[tuple[int, ...], str]
    row_dtype: str
    gate_dtype: str


def transformers_format(config: ConfigView, dtype: str) -> V4Format:
    """Everything in the dtype of the activations, but the overlap's gates.

    ``from_pretrained`` keeps ``position_bias`` in float32 when the model is bfloat16 or float16, so the sum of
    gate and bias is float32.  (A model made by ``from_config`` keeps nothing apart: ``tensor_dtypes`` says so.)
    """
    head, index = config.integer("head_dim"), config.integer("index_head_dim")
    gates = "float32" if dtype in ("bfloat16", "float16") else dtype
    return V4Format(((1, head), dtype), ((head,), dtype), ((index,), dtype), dtype, gates)


def v4_groups(layers: list[LayerView], config: ConfigView, fmt: V4Format, block_size: int) -> list[GroupSpec]:
    """All groups of the model: window, compressed entries, indexer, overlap, pending rows."""
    held = tuple(layer.index for layer in layers if layer.layer_type != NOTHING)
    other = [x for x in layers if x.layer_type not in (V4_CSA, V4_HCA, "sliding_attention", NOTHING)]
    if other:
        raise SpecError(f"layer {other[0].index}: layer type {other[0].layer_type!r} is not part of deepseek_v4")
    window = config.integer("sliding_window")
    shape, dtype = fmt.window
    keys = TensorSpec("keys", shape, dtype, entry_axis=len(shape) - 1)
    groups = [window_group(f"window.{window}", held, (keys,), window, block_size, chunked=False)]
    for name, layer_type in (("csa", V4_CSA), ("hca", V4_HCA)):
        indices = tuple(layer.index for layer in layers if layer.layer_type == layer_type)
        if indices:
            groups += _compressed(name, indices, config, fmt, block_size, _ratio(config, layer_type))
    return sorted(groups, key=lambda g: _ORDER.index(g.kind))


_ORDER = (Kind.WINDOW, Kind.COMPRESSED, Kind.INDEXER, Kind.TAIL)


def _compressed(
    name: str, layers: tuple[int, ...], config: ConfigView, fmt: V4Format, block_size: int, ratio: int
) -> list[GroupSpec]:
    overlapping = name == "csa"
    block = ratio * max(1, block_size // ratio)
    entry = TensorSpec("compressed_kv.compressor", *fmt.entry, entry_axis=0)
    groups = [GroupSpec(name, Kind.COMPRESSED, layers, (entry,), ratio=ratio, block_tokens=block)]
    widths = {"compressor": config.integer("head_dim")}
    if overlapping:
        widths["indexer"] = config.integer("index_head_dim")
        keys = TensorSpec("compressed_kv.indexer", *fmt.indexer, entry_axis=0)
        groups.append(GroupSpec("csa.indexer", Kind.INDEXER, layers, (keys,), ratio=ratio, block_tokens=block))
        overlap = _rows("overlap", widths, (ratio, 1), (fmt.row_dtype, fmt.gate_dtype))
        groups.append(GroupSpec("tail.overlap", Kind.TAIL, layers, overlap, ratio=ratio, first_needed=ratio))
    pending = _rows("buffer", widths, (ratio, 2 if overlapping else 1), (fmt.row_dtype, fmt.row_dtype))
    groups.append(GroupSpec(f"tail.{name}", Kind.TAIL, layers, pending, ratio=ratio, needed_unless_multiple_of=ratio))
    return groups


def _rows(what: str, widths: dict[str, int], shape: tuple[int, int], dtypes: tuple[str, str]) -> tuple[TensorSpec, ...]:
    """Rows of KV and gate for each owner; ``shape``: (rows, times the width of an entry)."""
    rows, halves = shape
    return tuple(
        TensorSpec(f"{what}_{part}.{owner}", (rows, halves * width), dtype)
        for owner, width in widths.items()
        for part, dtype in zip(("kv", "gate"), dtypes, strict=True)
    )


def _ratio(config: ConfigView, layer_type: str) -> int:
    rates = {**_DEFAULT_RATIOS, **(config.get("compress_rates") or {})}
    legacy = None if config.is_object else config.given(_LEGACY_RATIO_KEYS[layer_type])
    ratio = rates[layer_type] if legacy is None else legacy
    if not isinstance(ratio, int) or ratio < 1:
        raise SpecError(f"deepseek_v4: the compression rate of {layer_type} must be a whole number >= 1, not {ratio!r}")
    return ratio
