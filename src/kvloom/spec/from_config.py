"""From a model config to its :class:`~kvloom.spec.model_spec.ModelSpec`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.errors import ConfigError, SpecError
from kvloom.spec.attention import attention_groups, recurrent_groups
from kvloom.spec.config_view import ConfigLoader, ConfigView, load_config
from kvloom.spec.deepseek_v4 import transformers_format, v4_groups
from kvloom.spec.families import Attention, Family
from kvloom.spec.identity import identity_pairs
from kvloom.spec.layers import layer_views, resolve_family, unstated
from kvloom.spec.model_spec import GroupSpec, ModelSpec, round_up
from kvloom.types import Kind

MOST_BLOCK_TOKENS = 65_536
"""Largest block: an object of more tokens would hardly ever be shared."""
MOST_SEGMENT_TOKENS = 1 << 20
"""Largest segment: the index keeps the ids of every known one."""
MOST_POSITIONS = 1 << 30
"""Longest span of tokens (window, ratio, snapshot interval) that the 32-bit numbers of the core hold."""
_MOST_SLOT_BYTES = 1 << 40
ACTIVATION_DTYPES = ("bfloat16", "float16", "float32", "float64")
"""What models compute in; single tensors may be stored otherwise."""
_GLOBAL_KINDS = (Kind.COMPRESSED, Kind.INDEXER)


def spec_from_config(
    config: Any,
    *,
    block_size: int = 128,
    segment: int | None = None,
    dtype: str | None = None,
    snapshot_interval: int | None = None,
    name: str | None = None,
    tensor_dtypes: Mapping[str, str] | None = None,
    complete: ConfigLoader | None = None,
) -> ModelSpec:
    """Describe the cached state of a model.

    Args:
        config: a transformers config object, a dict, a ``config.json`` or a directory that holds one.
        block_size: tokens per block of ratio-1 groups.
        segment: tokens per segment, a multiple of the LCM; by default the smallest that is >= ``block_size``.
        dtype: dtype of the activations (``"bfloat16"``); by default the config's, else ``float32``.
        snapshot_interval: tokens between recurrent snapshots, a multiple of the segment; by default so many
            that the snapshots weigh no more than the KV of the tokens between them.
        name: by default the ``model_type``.
        tensor_dtypes: tensor name -> dtype, where a loaded model stores another dtype than ``from_pretrained`` would.
        complete: reads a path whose config leaves out what is not known here, such as
            :func:`kvloom.adapters.auto_config.auto_config`; without it such a config is an error.

    Raises:
        InputError: the config cannot be read.
        ConfigError: an option is out of range.
        SpecError: a layer type, state or geometry that is not understood; nothing is guessed.
    """
    check_block_size(block_size)
    view, family = resolve_family(load_config(config, lacks=unstated, complete=complete))
    dtype = activation_dtype(view, dtype)
    try:
        groups = _groups(view, family, dtype, block_size)
    except (
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
    ) as error:  # a value of a type nobody expects
        raise SpecError(f"config of {view.model_type or 'the model'} is malformed: {error}") from error
    groups = [_with_dtypes(group, tensor_dtypes or {}) for group in groups]
    label = name or view.model_type or "model"
    if not groups:
        raise SpecError(f"model {label!r}: no layer keeps any state, so there is nothing to cache")
    return finish_spec(
        label,
        groups,
        block_size=block_size,
        segment=segment,
        snapshot_interval=snapshot_interval,
        max_positions=_count(view, "max_position_embeddings"),
        vocab_size=_count(view, "vocab_size"),
        identity=identity_pairs(view, groups, dtype),
    )


def _groups(view: ConfigView, family: Family, dtype: str, block_size: int) -> list[GroupSpec]:
    layers = layer_views(view, family)
    if family.attention is Attention.DEEPSEEK_V4:
        return v4_groups(layers, view, transformers_format(view, dtype), block_size)
    return attention_groups(layers, family, dtype, block_size) + recurrent_groups(layers, family, dtype)


def finish_spec(
    name: str,
    groups: list[GroupSpec],
    *,
    block_size: int,
    segment: int | None,
    snapshot_interval: int | None,
    max_positions: int,
    vocab_size: int,
    identity: tuple[tuple[str, str], ...] = (),
    form: str = "transformers",
) -> ModelSpec:
    """Choose the segment and the snapshot interval and put the spec together."""
    _check_spans(name, groups)
    lcm = math.lcm(*(g.block_tokens for g in groups if not g.is_snapshot), 1)
    for group in groups:
        if group.slot_bytes > _MOST_SLOT_BYTES:
            holds = f"a block of {group.block_tokens} tokens" if group.block_tokens else "a snapshot"
            raise SpecError(
                f"model {name!r}, group {group.name!r}: {holds} takes {group.slot_bytes} bytes, more than a terabyte; "
                "correct the sizes in the config, or use a smaller block_size"
            )
    if lcm > MOST_SEGMENT_TOKENS:
        raise ConfigError(
            f"block_size: {block_size} tokens make the LCM of all blocks {lcm} tokens, more than the "
            f"{MOST_SEGMENT_TOKENS} that a segment may have; use a smaller one"
        )
    if segment is None:
        segment = round_up(block_size, lcm)
    _check_whole("segment", segment)
    if segment < 1 or segment % lcm:
        raise ConfigError(
            f"segment: {segment} is not a positive multiple of the LCM of all blocks, {lcm} tokens; "
            f"use {lcm} or {2 * lcm}"
        )
    if segment > MOST_SEGMENT_TOKENS:
        raise ConfigError(
            f"segment: {segment} tokens are more than the {MOST_SEGMENT_TOKENS} that a segment may have; "
            f"use a smaller multiple of {lcm}"
        )
    spec = ModelSpec(
        name=name,
        groups=tuple(groups),
        block_size=block_size,
        segment_tokens=segment,
        format=form,
        max_positions=max_positions,
        vocab_size=vocab_size,
        exact_replay_tokens=sum(g.window * len(g.layers) for g in groups if g.kind is Kind.WINDOW),
        identity=identity,
    )
    return replace(spec, snapshot_interval=_snapshot_interval(spec, snapshot_interval))


def check_block_size(block_size: int) -> None:
    """ConfigError unless ``block_size`` is a whole number from 1 to ``MOST_BLOCK_TOKENS``."""
    _check_whole("block_size", block_size)
    if not 1 <= block_size <= MOST_BLOCK_TOKENS:
        raise ConfigError(f"block_size: must be from 1 to {MOST_BLOCK_TOKENS} tokens, not {block_size}")


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: must be a whole number of tokens, not {value!r}")


def _check_spans(name: str, groups: list[GroupSpec]) -> None:
    """SpecError for a geometry beyond the integers of the core."""
    for group in groups:
        for what, tokens in (("window", group.window), ("ratio", group.ratio), ("block", group.block_tokens)):
            if tokens > MOST_POSITIONS:
                raise SpecError(
                    f"model {name!r}, group {group.name!r}: a {what} of {tokens} tokens is more than the "
                    f"{MOST_POSITIONS} that kvloom can count"
                )


def activation_dtype(view: ConfigView, dtype: str | None) -> str:
    """The dtype given, else the config's, else float32 (as torch does); checked."""
    value = dtype
    for key in ("dtype", "torch_dtype"):
        value = value if value is not None else view.get(key)
    text = "float32" if value is None else str(value).removeprefix("torch.")
    if text not in ACTIVATION_DTYPES:
        raise ConfigError(f"dtype: {text!r} is not a dtype of activations; use one of {', '.join(ACTIVATION_DTYPES)}")
    return text


def _snapshot_interval(spec: ModelSpec, asked: int | None) -> int:
    snapshots = sum(g.entry_bytes for g in spec.of_kind(Kind.RECURRENT))
    segment = spec.segment_tokens
    if asked is not None:
        _check_whole("snapshot_interval", asked)
        if asked > MOST_POSITIONS:
            raise ConfigError(f"snapshot_interval: {asked} is more than {MOST_POSITIONS} tokens")
        if asked < 0 or asked % segment:
            raise ConfigError(f"snapshot_interval: {asked} is not a multiple of the segment, {segment} tokens")
        return asked
    if not snapshots:
        return 0
    per_token = sum(g.bytes_per_token for g in spec.of_kind(*_GLOBAL_KINDS))
    if not per_token:
        return segment
    return min(round_up(math.ceil(snapshots / per_token), segment), MOST_POSITIONS // segment * segment)


def _with_dtypes(group: GroupSpec, dtypes: Mapping[str, str]) -> GroupSpec:
    return replace(group, tensors=tuple(replace(t, dtype=dtypes.get(t.name, t.dtype)) for t in group.tensors))


def _count(view: ConfigView, name: str) -> int:
    """A limit; 0 where there is none, or one that no sequence of int32 ids can reach."""
    value = view.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else 0
