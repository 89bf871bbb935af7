"""All arrays of the metadata core, in one named tuple that the compiled functions take.

No object per block exists: a block is a row of ``slot``, a segment a row of ``node``, ``tokens`` and ``columns``.
See ``kvloom.core.fields`` for what the columns mean.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import NamedTuple

import numpy as np

from kvloom.core.fields import (
    BLOCK_SHIFT,
    BUSY,
    COL_BASE,
    COLUMNS,
    FREE_NODES,
    FREE_PAGES,
    GHOST_HEAD,
    GHOST_PREV,
    GHOST_TAIL,
    GRAVE_HEAD,
    GRAVE_TAIL,
    HELD,
    NEED,
    NEXT,
    NTOKENS,
    OWNER,
    PAGE_BASE,
    PAGE_FREE,
    PAGE_GROUP,
    PAGE_PINNED,
    PAGE_USED,
    PAGES,
    PART_HEAD,
    RATIO_SHIFT,
    SLOT_BASE,
    SLOTS_PER_PAGE,
    USED,
)
from kvloom.kinds import state_of
from kvloom.plan import ArenaGeometry
from kvloom.spec.model_spec import GroupSpec, ModelSpec
from kvloom.types import AnyArray, Kind


class Arrays(NamedTuple):
    """Owned and mutated by the core only."""

    group: AnyArray  # int32 [G, 25]
    page: AnyArray  # int32 [P, 9]
    slot: AnyArray  # int32 [S, 8]
    node: AnyArray  # int32 [N, 16]
    tokens: AnyArray  # int32 [N, segment]
    columns: AnyArray  # int32 [N, C] local slot, or a code that says why there is none
    table: AnyArray  # int32, open-addressing hash table of all children but the first, -1 = empty
    heap: AnyArray  # int32 [N] binary heap of evictable leaves
    free_pages: AnyArray  # int32 [P] stack
    free_nodes: AnyArray  # int32 [N] stack
    slot_stamp: AnyArray  # int64 [S] clock of the last release of an auxiliary object
    node_stamp: AnyArray  # int64 [N] clock of the last use of the node or of anything below it
    reached: AnyArray  # int64 [N] scratch: pass << 32 | anchors that can go
    page_stamp: AnyArray  # int64 [P] clock at which the page could last be emptied
    counters: AnyArray  # int64 [G, 6]
    scalars: AnyArray  # int64 [12]
    static_pages: AnyArray  # bool [1]


def _shift(value: int) -> int:
    """Base-2 logarithm of a power of two, else -1: a division that hot loops turn into a shift."""
    return value.bit_length() - 1 if value > 0 and value & (value - 1) == 0 else -1


def columns_of(group: GroupSpec, segment: int) -> int:
    """Columns that a group has in a node."""
    return 1 if group.is_snapshot else segment // group.block_tokens


def _keep_every(spec: ModelSpec, group: GroupSpec) -> int:
    """Segment ends that keep a snapshot unasked: all for tails, every ``snapshot_interval`` for recurrent state."""
    return (spec.snapshot_interval or spec.segment_tokens) if group.kind is Kind.RECURRENT else 1


def allocate(spec: ModelSpec, geometry: ArenaGeometry, max_nodes: int) -> Arrays:
    """All arrays for ``spec`` on an arena of this geometry, with room for ``max_nodes`` index nodes."""
    count = len(spec.groups)
    columns = [columns_of(g, spec.segment_tokens) for g in spec.groups]
    pages = count if geometry.static_split else int(geometry.num_slots[0] // geometry.slots_per_page[0])
    total = int(geometry.num_slots.sum())
    buckets = 1 << max(4, (2 * max_nodes - 1).bit_length())
    arrays = Arrays(
        group=np.full((count, 25), -1, dtype=np.int32),
        page=np.full((pages, 9), -1, dtype=np.int32),
        slot=np.zeros((total, 8), dtype=np.int32),
        node=np.zeros((max_nodes, 16), dtype=np.int32),
        tokens=np.zeros((max_nodes, spec.segment_tokens), dtype=np.int32),
        columns=np.zeros((max_nodes, sum(columns)), dtype=np.int32),
        table=np.full(buckets, -1, dtype=np.int32),
        heap=np.zeros(max_nodes, dtype=np.int32),
        free_pages=np.arange(pages - 1, -1, -1, dtype=np.int32),
        free_nodes=np.arange(max_nodes - 1, -1, -1, dtype=np.int32),
        slot_stamp=np.zeros(total, dtype=np.int64),
        node_stamp=np.zeros(max_nodes, dtype=np.int64),
        reached=np.zeros(max_nodes, dtype=np.int64),
        page_stamp=np.zeros(pages, dtype=np.int64),
        counters=np.zeros((count, 6), dtype=np.int64),
        scalars=np.zeros(12, dtype=np.int64),
        static_pages=np.array([geometry.static_split]),
    )
    arrays.scalars[[FREE_PAGES, FREE_NODES]] = pages, max_nodes
    arrays.scalars[[GHOST_HEAD, GHOST_TAIL, GRAVE_HEAD, GRAVE_TAIL]] = -1
    arrays.node[:, [NTOKENS, GHOST_PREV]] = -1, -2
    arrays.slot[:, OWNER] = -1
    for g, group in enumerate(spec.groups):
        row = arrays.group[g]
        row[:8] = astuple(state_of(group).rule_row(_keep_every(spec, group)))
        row[SLOT_BASE] = int(geometry.num_slots[:g].sum())
        row[COL_BASE], row[COLUMNS] = sum(columns[:g]), columns[g]
        row[SLOTS_PER_PAGE] = geometry.slots_per_page[g]
        row[PAGE_BASE] = g if geometry.static_split else 0
        row[[USED, PAGES, NEED, HELD, BUSY]] = 0
        row[RATIO_SHIFT], row[BLOCK_SHIFT] = _shift(group.ratio), _shift(group.block_tokens)
    if geometry.static_split:
        _own_static_pages(arrays, geometry)
    return arrays


def _own_static_pages(a: Arrays, geometry: ArenaGeometry) -> None:
    """In a static split page ``g`` belongs to group ``g`` for ever."""
    for g, slots in enumerate(geometry.num_slots.tolist()):
        first = int(a.group[g, SLOT_BASE])
        a.page[g, PAGE_GROUP] = g
        a.group[g, PAGES] = 1
        a.page[g, [PAGE_USED, PAGE_PINNED]] = 0
        if slots == 0:  # so small an arena has no room for this group
            continue
        a.slot[first : first + slots, NEXT] = np.arange(first + 1, first + slots + 1, dtype=np.int32)
        a.slot[first + slots - 1, NEXT] = -1
        a.page[g, PAGE_FREE] = first
        a.group[g, PART_HEAD] = g
    a.scalars[FREE_PAGES] = 0
