"""What makes the bytes of two models interchangeable, apart from their weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from kvloom.spec.config_view import ConfigView
from kvloom.spec.model_spec import GroupSpec

_NAMED = (
    "model_type",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "quantization_config",
    "sliding_window",
    "attention_chunk_size",
    "compress_rates",
    "_attn_implementation",
)
# Keys that say how a model is shipped or run, not what it computes.
_IGNORED = frozenset(
    {
        "architectures",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def identity_pairs(view: ConfigView, groups: Sequence[GroupSpec], dtype: str) -> tuple[tuple[str, str], ...]:
    """Sorted (name, value) pairs: what is worth reading, the layout of the groups, a digest of the whole config."""
    pairs = {name.lstrip("_"): view.get(name) for name in _NAMED}
    named = {name: _text(value) for name, value in pairs.items() if value is not None}
    named["dtype"] = dtype
    named["groups"] = _digest([_layout(g) for g in groups])
    named["config"] = _digest({k: v for k, v in view.as_dict().items() if k not in _IGNORED and not k.startswith("_")})
    return tuple(sorted(named.items()))


def _layout(group: GroupSpec) -> list[Any]:
    tensors = [[t.name, list(t.shape), t.dtype, t.entry_axis, t.order] for t in group.tensors]
    return [group.name, int(group.kind), list(group.layers), tensors, group.ratio, group.block_tokens, group.window]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
