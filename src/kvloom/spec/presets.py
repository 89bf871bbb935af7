"""Real models by name, for planning without their files.

Geometry comes from the published configs.  DeepSeek-V4 is counted in the FP8 format of its report, as
the engines that serve it store it; every other model in transformers' format (activations' dtype).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any

from kvloom.errors import ConfigError, InputError
from kvloom.spec.config_view import ConfigLoader, load_config
from kvloom.spec.deepseek_v4 import V4Format, v4_groups
from kvloom.spec.from_config import check_block_size, finish_spec, spec_from_config
from kvloom.spec.identity import identity_pairs
from kvloom.spec.layers import layer_views, resolve_family
from kvloom.spec.model_spec import ModelSpec


class IndexerFormat(StrEnum):
    """How DeepSeek-V4's indexer entries are stored."""

    FP8 = "fp8"
    FP4 = "fp4"


_INDEXER_ENTRY_BYTES = {IndexerFormat.FP8: 132, IndexerFormat.FP4: 68}
_V4_ENTRY_BYTES = 584  # 448 FP8 values + 64 bfloat16 values + 7 scales + 1 pad


@dataclass(frozen=True, slots=True)
class Preset:
    """One model: what ``config.json`` would say, and a line for people."""

    summary: str
    config: Mapping[str, Any]

    @property
    def is_v4(self) -> bool:
        """True when the model is counted in the V4 FP8 format."""
        return bool(self.config["model_type"] == "deepseek_v4")


def _preset(summary: str, model_type: str, **config: Any) -> Preset:
    return Preset(summary, MappingProxyType({"model_type": model_type, "dtype": "bfloat16", **config}))


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "deepseek-v4-flash": _preset(
            "2 window-only, 21 CSA and 20 HCA layers, window 128",
            "deepseek_v4",
            num_hidden_layers=43,
            compress_ratios=[0, 0, *[4, 128] * 20, 4],
        ),
        "deepseek-v4-pro": _preset(
            "30 CSA and 31 HCA layers, window 128",
            "deepseek_v4",
            hidden_size=7168,
            num_hidden_layers=61,
            num_attention_heads=128,
            compress_ratios=[128, 128, *[4, 128] * 29, 4],
        ),
        "deepseek-v3.2": _preset("61 latent (MLA) layers, each with an indexer", "deepseek_v32"),
        "gpt-oss-20b": _preset("12 full and 12 sliding layers (128), attention sinks", "gpt_oss", num_hidden_layers=24),
        "gpt-oss-120b": _preset("18 full and 18 sliding layers (128), attention sinks", "gpt_oss"),
        "gemma-3-27b": _preset(
            "10 full and 52 sliding layers (1024)",
            "gemma3_text",
            hidden_size=5376,
            num_hidden_layers=62,
            num_attention_heads=32,
            num_key_value_heads=16,
            head_dim=128,
            sliding_window=1024,
        ),
        "llama-4-scout": _preset(
            "12 full and 36 chunked layers (8192)", "llama4_text", max_position_embeddings=10_485_760
        ),
        "qwen3-next-80b": _preset("12 full and 36 gated-delta layers", "qwen3_next", max_position_embeddings=262_144),
        "kimi-linear-48b": _preset(
            "7 latent (MLA) and 20 Kimi-delta layers",
            "kimi_linear",
            linear_attn_config={
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [i for i in range(1, 28) if i not in (4, 8, 12, 16, 20, 24, 27)],
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
        ),
        "mistral-7b": _preset("32 sliding layers (4096), v0.1", "mistral", max_position_embeddings=32_768),
        "llama-3.1-8b": _preset(
            "32 full layers",
            "llama",
            num_key_value_heads=8,
            vocab_size=128_256,
            max_position_embeddings=131_072,
        ),
        "llama-3.1-70b": _preset(
            "80 full layers",
            "llama",
            hidden_size=8192,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            vocab_size=128_256,
            max_position_embeddings=131_072,
        ),
    }
)
"""Every preset by name."""


def load_preset(
    name: str,
    *,
    block_size: int = 128,
    segment: int | None = None,
    dtype: str | None = None,
    snapshot_interval: int | None = None,
    indexer_format: IndexerFormat = IndexerFormat.FP8,
) -> ModelSpec:
    """The spec of a preset; the other options are those of :func:`~kvloom.spec.from_config.spec_from_config`.

    Args:
        name: a key of ``PRESETS``, in any case.
        block_size: tokens per block of ratio-1 groups.
        segment: tokens per segment; None chooses.
        dtype: dtype of the activations; DeepSeek-V4 has a fixed format instead.
        snapshot_interval: tokens between recurrent snapshots; None chooses.
        indexer_format: of DeepSeek-V4's indexer entries; the other presets have no choice.

    Raises:
        InputError: no such preset; the message offers close names.
        ConfigError: an option is out of range, or has no meaning for this preset.
    """
    preset = PRESETS.get(name.lower())
    if preset is None:
        raise InputError(f"unknown preset {name!r}; {_suggestion(name)}")
    if preset.is_v4:
        if dtype is not None:
            raise ConfigError(f"dtype: preset {name} has a fixed FP8 format")
        return _load_v4(name.lower(), preset, block_size, segment, IndexerFormat(indexer_format))
    if indexer_format is not IndexerFormat.FP8:
        raise ConfigError(f"indexer_format: preset {name} has no choice of formats")
    return spec_from_config(
        dict(preset.config),
        block_size=block_size,
        segment=segment,
        dtype=dtype,
        snapshot_interval=snapshot_interval,
        name=name.lower(),
    )


def resolve(
    model: str,
    *,
    block_size: int = 128,
    segment: int | None = None,
    dtype: str | None = None,
    snapshot_interval: int | None = None,
    complete: ConfigLoader | None = None,
) -> ModelSpec:
    """The spec of a preset name, a directory with a ``config.json``, or such a file.

    A name that exists as a preset wins over a directory of the same name (``./name`` means the directory).
    ``complete`` reads the configs of families that are not known here; see ``spec_from_config``.
    """
    load: Callable[..., ModelSpec] = partial(spec_from_config, complete=complete)
    is_preset = model.lower() in PRESETS
    if is_preset:
        load = load_preset
    try:
        return load(model, block_size=block_size, segment=segment, dtype=dtype, snapshot_interval=snapshot_interval)
    except InputError as error:
        looks_like_a_name = "/" not in model and not model.endswith(".json")
        if not is_preset and looks_like_a_name and "no such file" in str(error):
            raise InputError(f"{model!r} is neither a preset nor a path; {_suggestion(model)}") from None
        raise


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"presets: {', '.join(PRESETS)}"


def _load_v4(name: str, preset: Preset, block_size: int, segment: int | None, indexer: IndexerFormat) -> ModelSpec:
    check_block_size(block_size)
    view, family = resolve_family(load_config(dict(preset.config)))
    entry = ((_V4_ENTRY_BYTES,), "uint8")
    fmt = V4Format(entry, entry, ((_INDEXER_ENTRY_BYTES[indexer],), "uint8"), "float32", "float32")
    groups = v4_groups(layer_views(view, family), view, fmt, block_size)
    return finish_spec(
        name,
        groups,
        block_size=block_size,
        segment=segment,
        snapshot_interval=None,
        max_positions=view.integer("max_position_embeddings"),
        vocab_size=view.integer("vocab_size"),
        identity=identity_pairs(view, groups, "bfloat16"),
        form="deepseek-v4-fp8" if indexer is IndexerFormat.FP8 else "deepseek-v4-fp8-fp4-indexer",
    )
