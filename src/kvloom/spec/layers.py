"""Which kind of cache layer each model layer has: the rule that transformers itself applies.

It follows ``transformers.cache_utils.get_layer_types_and_kwargs``: ``layer_types`` if the config has
them, else by ``sliding_window`` / ``attention_chunk_size``; layers that reuse another layer's KV and
layers without attention keep nothing.  Everything else must be known here, or it is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.errors import SpecError
from kvloom.spec.config_view import ConfigView
from kvloom.spec.families import FAMILIES, Attention, Family

NOTHING = "dummy"
"""Layer type of layers that keep no state."""

_LEGACY = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "moe": NOTHING,
    "mlp": NOTHING,
}
FULL = frozenset({"full_attention", "indexed_attention", "hybrid"})
SLIDING = frozenset({"sliding_attention", "hybrid_sliding"})
CHUNKED = frozenset({"chunked_attention"})
RECURRENT = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
V4_CSA = "compressed_sparse_attention"
V4_HCA = "heavily_compressed_attention"
KNOWN_TYPES = FULL | SLIDING | CHUNKED | RECURRENT | {V4_CSA, V4_HCA, NOTHING}

_USUAL_ALIASES = {"layer_types": "layers_block_type"}
_MUST_BE_STATED = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "layer_types")
# Values that change what a layer keeps; in a family without rules of its own their meaning is not known.
_UNKNOWN_GEOMETRY = (
    "kv_lora_rank",
    "v_head_dim",
    "multi_query",
    "num_kv_heads",
    "new_decoder_architecture",
    "block_configs",
    "cross_attention_layers",
    "linear_attn_config",
)
# Families that transformers runs without a cache, or with one of their own.
_NO_CACHE = frozenset({"openai-gpt", "xlm", "reformer", "rwkv", "xlstm"})
# Causal families whose config nevertheless says ``is_decoder: false``.
_ALWAYS_CAUSAL = frozenset({"gpt_neox", "gpt_neox_japanese", "trocr"})
_MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class LayerView:
    """One model layer: its index, cache layer type and config."""

    index: int
    layer_type: str
    config: ConfigView


def resolve_family(view: ConfigView) -> tuple[ConfigView, Family]:
    """The family of a config, and the config completed by its defaults.

    A family that has no entry is described by the general rule alone.  A plain dict of such a family
    must state everything, because a missing key may have any default; SpecError names what is missing.
    """
    family = FAMILIES.get(view.model_type) or Family(aliases=_USUAL_ALIASES)
    view = view.with_family(family.defaults, family.aliases)
    label = view.model_type or "(no model_type)"
    if view.model_type not in FAMILIES:
        _refuse_unknown_geometry(view, label)
    missing = unstated(view)
    if missing:
        raise SpecError(
            f"the defaults of family {label} are not known, and its config leaves out {', '.join(missing)}; "
            "pass transformers' config object, which has them"
        )
    return view, family


def unstated(view: ConfigView) -> list[str]:
    """What the config leaves out although the defaults of its family are not known here."""
    family = FAMILIES.get(view.model_type) or Family(aliases=_USUAL_ALIASES)
    if family.defaults or view.is_object:
        return []
    view = view.with_family(family.defaults, family.aliases)
    return [name for name in _MUST_BE_STATED if not view.has(name)]


def layer_views(view: ConfigView, family: Family) -> list[LayerView]:
    """Every layer with its cache layer type, in order; SpecError names the first that is not understood."""
    _refuse_bidirectional(view)
    count = view.integer("num_hidden_layers")
    if count > _MOST_LAYERS:
        raise SpecError(f"{view.model_type}: {count} layers are more than any model has")
    configs = [view.layer(i) for i in range(count)]
    types = _explicit_types(view, family, count)
    if types is None:
        types = family.layer_types(view, count) if family.layer_types else [_inferred_type(c) for c in configs]
    if family.last_is_full and types[-1] != "full_attention":
        types[-1] = "full_attention"
    types = [_LEGACY.get(t, t) for t in types]
    if family.full_layers is not None and not view.has("per_layer_config"):
        special = family.full_layers(view)
        configs = [c.with_values(special) if t in FULL else c for t, c in zip(types, configs, strict=True)]
    reusing = _reusing_layers(view, count)
    types = [NOTHING if i in reusing else t for i, t in enumerate(types)]
    layers = [LayerView(i, t, c) for i, (t, c) in enumerate(zip(types, configs, strict=True))]
    for layer in layers:
        _check(layer, family)
    return layers


def _explicit_types(view: ConfigView, family: Family, count: int) -> list[str] | None:
    types = view.given("layer_types")
    if types is None:
        return None
    types = [str(t) for t in types]
    if family.attention is Attention.DEEPSEEK_V4:
        types = types[:count]
    if len(types) != count:
        raise SpecError(f"{view.model_type}: {len(types)} layer_types for {count} layers")
    return types


def _inferred_type(config: ConfigView) -> str:
    if config.get("sliding_window") is not None:
        return "sliding_attention"
    if config.get("attention_chunk_size") is not None:
        return "chunked_attention"
    return "full_attention"


def _reusing_layers(view: ConfigView, count: int) -> frozenset[int]:
    """Layers that read the KV of another layer."""
    modes = view.given("kv_sharing_modes")
    if modes is not None:
        return frozenset(i for i, mode in enumerate(modes) if mode == "reuse")
    shared = view.get("num_kv_shared_layers") or 0
    if shared and view.model_type not in FAMILIES:
        raise SpecError(f"family {view.model_type}: {shared} layers share KV, but how is not known")
    if not 0 <= shared < count:
        raise SpecError(f"{view.model_type}: {shared} of {count} layers cannot share the KV of another")
    return frozenset(range(count - shared, count))


def _check(layer: LayerView, family: Family) -> None:
    where = f"layer {layer.index} of {layer.config.model_type or 'the model'}"
    if layer.layer_type not in KNOWN_TYPES:
        raise SpecError(f"{where}: layer type {layer.layer_type!r} is not understood; known: {sorted(KNOWN_TYPES)}")
    if layer.layer_type in RECURRENT and family.recurrent is None:
        raise SpecError(
            f"{where}: layer type {layer.layer_type!r} keeps a recurrent state, and its shape is not known for this "
            "family, which is therefore not supported"
        )
    if layer.layer_type in RECURRENT and layer.config.get("number_of_conv_states", 1) != 1:
        raise SpecError(f"{where}: layer type {layer.layer_type!r} keeps several convolution states; not understood")
    if layer.layer_type == "indexed_attention" and not family.indexer:
        raise SpecError(f"{where}: layer type 'indexed_attention' of this family is not known here")
    if layer.layer_type in (V4_CSA, V4_HCA) and family.attention is not Attention.DEEPSEEK_V4:
        raise SpecError(f"{where}: layer type {layer.layer_type!r} is known in deepseek_v4 only")
    if layer.config.get("skip"):
        raise SpecError(f"{where}: the config skips parts of this layer ({layer.config.get('skip')}); not understood")


def _refuse_unknown_geometry(view: ConfigView, label: str) -> None:
    if label in _NO_CACHE:
        raise SpecError(f"family {label}: transformers keeps no KV cache of the usual kind for it")
    for name in _UNKNOWN_GEOMETRY:
        if view.get(name) not in (None, False):
            raise SpecError(f"family {label} is not known, and its config has {name!r}, which changes what layers keep")


def _refuse_bidirectional(view: ConfigView) -> None:
    encoder = view.given("is_decoder") is False and view.model_type not in _ALWAYS_CAUSAL
    if encoder or view.get("use_bidirectional_attention") in (True, "all") or view.get("is_causal", True) is False:
        raise SpecError(f"{view.model_type}: attends in both directions, so a prefix cannot be reused")
