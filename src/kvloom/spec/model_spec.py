"""Frozen descriptions of a model's cached state: tensors, KV cache groups, the model.

A *KV cache group* is a set of (layer, state tensor) pairs with the same kind, geometry and block
size; all its layers share one block table and one *slot* holds all of them for one block (or one
snapshot).  Byte counts without "slot" in their name are payload bytes, without alignment.

Slot layout, which kernels, adapters and the disk format share: layers one after the other, each
``layer_stride`` bytes (a multiple of 256) apart; within a layer the tensors in order, each at an
offset that is a multiple of 64.  A tensor of a block group is stored C-contiguous with the entry axis
inserted at ``entry_axis`` (K/V: ``[heads, entries, head_dim]``); a snapshot tensor is stored with
its dimensions permuted to ``order`` (memory order, outermost first) and viewed back as ``shape``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from kvloom.errors import SpecError
from kvloom.types import DTYPE_BYTES, Kind

LAYER_ALIGN = 256
TENSOR_ALIGN = 64


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is >= ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One state tensor of one layer.

    Attributes:
        name: what transformers calls it (``keys``, ``values``, ``compressed_kv``, ``indexer_keys``,
            ``conv_states.0``, ``recurrent_states.0``, ``buffer_kv.compressor``, ...).
        shape: without the batch axis; for block groups also without the entry axis.
        dtype: a key of ``DTYPE_BYTES``.
        entry_axis: where the entry axis is inserted into ``shape`` (block groups); None: snapshot.
        order: memory order of a snapshot's dimensions; None means C order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    entry_axis: int | None = None
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(f"tensor {self.name!r}: unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        if any(d < 1 for d in self.shape):
            raise SpecError(f"tensor {self.name!r}: shape {self.shape} has a dimension below 1")
        if self.order is not None and sorted(self.order) != list(range(len(self.shape))):
            raise SpecError(f"tensor {self.name!r}: order {self.order} is not a permutation of {self.shape}")

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry (block groups) or of the whole snapshot."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV cache group.

    Attributes:
        name: unique within the model (``full``, ``window.128``, ``csa``, ``tail.overlap``, ...).
        kind: the strategy that answers what must be present to resume.
        layers: model layer indices, ascending.
        tensors: the state tensors of each of these layers.
        ratio: tokens per entry (1 for ordinary attention, 4 / 128 for CSA / HCA).
        block_tokens: tokens per object, a multiple of ``ratio``; 0 for snapshot groups.
        window: WINDOW: attention reads the last ``window`` tokens including the current one, so
            to resume at P the rows of [max(0, P - window + 1), P) must be present.
        chunked: WINDOW: chunked local attention; only rows of [P // window * window, P) matter.
        needed_unless_multiple_of: snapshot groups: 0 = the snapshot is needed at every boundary;
            n = only at positions that are not a multiple of n (V4's pending tail rows).
        first_needed: snapshot groups: no snapshot exists or is needed below this position.
    """

    name: str
    kind: Kind
    layers: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    ratio: int = 1
    block_tokens: int = 0
    window: int = 0
    chunked: bool = False
    needed_unless_multiple_of: int = 0
    first_needed: int = 1

    @property
    def is_snapshot(self) -> bool:
        """True when an object is a snapshot at one position instead of a block of tokens."""
        return self.block_tokens == 0

    @property
    def block_entries(self) -> int:
        """Entries per block (1 for snapshot groups)."""
        return 1 if self.is_snapshot else self.block_tokens // self.ratio

    @property
    def entry_bytes(self) -> int:
        """Payload bytes of one entry over all layers of the group (or of one snapshot)."""
        return len(self.layers) * sum(t.entry_bytes for t in self.tensors)

    @property
    def bytes_per_token(self) -> float:
        """Payload bytes per token over all layers; 0 for snapshot groups."""
        return 0.0 if self.is_snapshot else self.entry_bytes / self.ratio

    @property
    def tensor_offsets(self) -> tuple[int, ...]:
        """Byte offset of each tensor within a layer's part of a slot."""
        offsets, at = [], 0
        for tensor in self.tensors:
            offsets.append(at)
            at = round_up(at + tensor.entry_bytes * self.block_entries, TENSOR_ALIGN)
        return tuple(offsets)

    @property
    def layer_stride(self) -> int:
        """Bytes between two layers within a slot (a multiple of 256)."""
        last = self.tensors[-1]
        return round_up(self.tensor_offsets[-1] + last.entry_bytes * self.block_entries, LAYER_ALIGN)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, alignment included (a multiple of 256)."""
        return self.layer_stride * len(self.layers)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as the manager sees it: its KV cache groups and the tokens they are cut at.

    Attributes:
        name: preset name or architecture.
        groups: the KV cache groups; their order is the group index used everywhere.
        block_size: tokens per block of ratio-1 groups.
        segment_tokens: unit of identity, verification and commit; a multiple of ``lcm_tokens``.
        format: which byte format is counted ("transformers", "deepseek-v4-fp8", ...).
        max_positions: longest sequence the model allows; 0 = not known.
        vocab_size: ids are in [0, vocab_size); 0 = not known.
        snapshot_interval: RECURRENT snapshots are kept at multiples of this many tokens
            (a multiple of the segment) besides checkpoints.
        exact_replay_tokens: tokens to run to rebuild every window exactly (sum of W over the windowed layers).
        identity: sorted (name, value) pairs that go into the layout identity (kernel ABI level).
    """

    name: str
    groups: tuple[GroupSpec, ...]
    block_size: int
    segment_tokens: int
    format: str = "transformers"
    max_positions: int = 0
    vocab_size: int = 0
    snapshot_interval: int = 0
    exact_replay_tokens: int = 0
    identity: tuple[tuple[str, str], ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.groups:
            raise SpecError(f"model {self.name!r}: no layer keeps any state, so there is nothing to cache")
        names = [g.name for g in self.groups]
        if len(set(names)) != len(names):
            raise SpecError(f"model {self.name!r}: group names are not unique: {names}")
        if self.segment_tokens < 1 or self.segment_tokens % self.lcm_tokens:
            raise SpecError(
                f"model {self.name!r}: segment of {self.segment_tokens} tokens is not a multiple of the LCM, "
                f"{self.lcm_tokens}; use a multiple of {self.lcm_tokens}"
            )

    @property
    def lcm_tokens(self) -> int:
        """Least common multiple of the token spans of all groups' blocks."""
        return math.lcm(*(g.block_tokens for g in self.groups if not g.is_snapshot), 1)

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> ModelSpec:
        """:func:`kvloom.spec.from_config.spec_from_config`, where the options are described."""
        from kvloom.spec.from_config import spec_from_config

        return spec_from_config(config, **options)

    def with_segment(self, segment_tokens: int) -> ModelSpec:
        """The same model cut at another segment length."""
        return replace(self, segment_tokens=segment_tokens)

    def group_index(self, name: str) -> int:
        """Index of the group called ``name``; raises SpecError if there is none."""
        for i, group in enumerate(self.groups):
            if group.name == name:
                return i
        raise SpecError(f"model {self.name!r} has no group {name!r}; it has {[g.name for g in self.groups]}")

    def of_kind(self, *kinds: Kind) -> Iterable[GroupSpec]:
        """The groups of these kinds, in order."""
        return (g for g in self.groups if g.kind in kinds)
