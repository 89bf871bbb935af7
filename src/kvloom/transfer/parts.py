"""How a slot becomes records of a tier: runs of whole layers, so that the first layers can be read first.

A slot holds all layers of its group one after the other.  Large ones are stored as several records, each a run of
layers; small slots and snapshots as one.  In a tier part ``p`` of the object of column ``c`` has the column
``c * parts + p``, so tiers know nothing of parts, and every part is verified on its own.

Where slots are cut follows from the spec alone.  Once any is cut, the cuts themselves are part of the layout under
which the tiers know the objects: what was cut in another way is not found, and never taken for something else.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvloom.core.allocation import columns_of
from kvloom.spec.model_spec import GroupSpec, ModelSpec
from kvloom.types import AnyArray, IntArray

SMALLEST = 256 << 10
"""Bytes that every part of a cut slot has at least."""
MOST = 16


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the slots of a model are cut.

    Attributes:
        count: int64 ``[groups]``, parts of a slot.
        columns: int64 ``[groups]``, objects of a node.
        begin, size: int64 ``[groups, MOST]``, bytes within the slot.
        first_layer: int64 ``[groups, MOST]``, the first model layer that a part has.
        of_layer: int64 ``[groups, layers]``, the part of the n-th layer of a group; it has ``depth`` layers.
    """

    count: IntArray
    columns: IntArray
    begin: IntArray
    size: IntArray
    first_layer: IntArray
    of_layer: IntArray
    depth: IntArray

    @classmethod
    def of(cls, spec: ModelSpec) -> Parts:
        """Those of ``spec``."""
        groups = spec.groups
        count = np.array([_count(group) for group in groups], dtype=np.int64)
        columns = np.array([columns_of(group, spec.segment_tokens) for group in groups], dtype=np.int64)
        begin, size, first_layer = np.zeros((3, len(groups), MOST), dtype=np.int64)
        of_layer = np.zeros((len(groups), max(len(group.layers) for group in groups)), dtype=np.int64)
        for g, group in enumerate(groups):
            cuts = [len(group.layers) * p // int(count[g]) for p in range(int(count[g]) + 1)]
            for p, (first, last) in enumerate(pairwise(cuts)):
                begin[g, p], size[g, p] = first * group.layer_stride, (last - first) * group.layer_stride
                first_layer[g, p] = group.layers[first]
                of_layer[g, first:last] = p
        depth = np.array([len(group.layers) for group in groups], dtype=np.int64)
        return cls(count, columns, begin, size, first_layer, of_layer, depth)

    @property
    def whole(self) -> bool:
        """Whether no slot is cut."""
        return bool((self.count == 1).all())

    def layout(self, layout: bytes) -> bytes:
        """The layout, 32 bytes, under which tiers know the objects of ``layout``."""
        if self.whole:
            return layout
        cuts = np.concatenate([self.count, self.begin.ravel(), self.size.ravel()]).astype("<i8")
        return hashlib.blake2b(b"kvloom parts\0" + layout + cuts.tobytes(), digest_size=32).digest()

    def known(self, group: AnyArray, column: AnyArray) -> AnyArray:
        """Which records (numbers as a tier has them) name a part of an object of this model; bool ``[n]``."""
        known: AnyArray = group < len(self.count)
        g = np.where(known, group, 0).astype(np.int64)
        known &= column < self.columns[g] * self.count[g]
        return known

    def layers(self, group: int, part: int) -> slice:
        """The layers of a group, by their place in it, that a part has."""
        first, last = np.searchsorted(self.of_layer[group, : self.depth[group]], [part, part + 1])
        return slice(int(first), int(last))


def _count(group: GroupSpec) -> int:
    if group.is_snapshot:
        return 1
    layers = -(-SMALLEST // group.layer_stride)
    return max(1, min(MOST, len(group.layers) // layers))
