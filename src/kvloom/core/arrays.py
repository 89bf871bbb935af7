"""All arrays of the metadata core, in one named tuple that the compiled functions take.

Structure of arrays: no object per block exists.  Index spaces:

* ``g``  KV cache group, order of ``ModelSpec.groups``.
* ``s``  global slot = ``slot_base[g]`` + slot local to the group.  Columns and block tables hold local slots.
* ``p``  page of the arena (one page belongs to one group at a time).
* ``n``  node of the prefix index: the root of a namespace, one segment, or one checkpoint.
* ``c``  column of a node: ``col_base[g]`` + block of the group within the segment (snapshots: one column).
* ``q``  row of a running sequence.

Links are int32 with -1 for none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvloom.plan import ArenaGeometry
from kvloom.spec.model_spec import GroupSpec, ModelSpec
from kvloom.types import AnyArray, Kind

RULE_PREFIX = 0
RULE_WINDOW = 1
RULE_SNAPSHOT = 2

CLOCK, FREE_PAGES, FREE_NODES, GHOST_HEAD, GHOST_TAIL, NODES_USED = range(6)
"""Places in ``scalars``."""

ALLOCS, EVICTIONS, HITS, MISSES, COMMITS, UNKEPT = range(6)
"""Columns of ``counters[g]``: objects allocated, evicted, leased, missing, committed, not kept for lack of room."""


class Arrays(NamedTuple):
    """See the module docstring for index spaces.  Owned and mutated by the core only."""

    # per group
    rule: AnyArray  # int8: RULE_*
    ratio: AnyArray  # int32 tokens per entry
    block_tokens: AnyArray  # int32, 0 = snapshot
    window: AnyArray  # int32
    chunked: AnyArray  # bool
    unless_multiple: AnyArray  # int32: snapshots needed only off multiples of this; 0 = everywhere
    first_needed: AnyArray  # int32
    interval: AnyArray  # int32: snapshots of segment ends are kept at multiples of this
    slot_base: AnyArray  # int32 [G + 1]
    slots_per_page: AnyArray  # int32
    page_base: AnyArray  # int32: page of local slot 0
    col_base: AnyArray  # int32 [G + 1]
    lru_head: AnyArray  # int32 [G] global slot, least recently released first
    lru_tail: AnyArray  # int32 [G]
    part_head: AnyArray  # int32 [G] first page with a free slot
    used: AnyArray  # int32 [G] slots not free
    counters: AnyArray  # int64 [G, 6]
    # per page
    page_group: AnyArray  # int16, -1 = free
    page_free: AnyArray  # int32 first free slot (global)
    page_used: AnyArray  # int32
    page_pinned: AnyArray  # int32 slots of the page that cannot be evicted now
    page_prev: AnyArray  # int32 list of pages of a group with free slots
    page_next: AnyArray  # int32
    free_pages: AnyArray  # int32 stack
    static_pages: AnyArray  # bool [1]
    # per slot
    state: AnyArray  # uint8 ObjectState
    grade: AnyArray  # uint8 Grade
    generation: AnyArray  # uint32, grows at every allocation and every free
    pins: AnyArray  # int32 holders (sequences, transfers)
    stamp: AnyArray  # int64 clock of the last release
    owner: AnyArray  # int32 node whose column names this slot, -1 = private
    owner_col: AnyArray  # int32
    prev: AnyArray  # int32 LRU list
    next: AnyArray  # int32 LRU list, or the free list of the page
    # per node
    parent: AnyArray  # int32, -1 for a root or an unused node
    root: AnyArray  # int32 the namespace this node belongs to
    depth: AnyArray  # int32 segments from the root to the end of this node (checkpoint: of its parent)
    ntokens: AnyArray  # int32: segment, or fewer for a checkpoint; 0 = root; -1 = unused
    tokens: AnyArray  # int32 [N, S]
    columns: AnyArray  # int32 [N, C] local slot, or why there is none
    resident: AnyArray  # int32 number of columns that name a slot
    weight: AnyArray  # int32 resident objects + live children + live checkpoints + holders; 0 = a ghost
    first_child: AnyArray  # int32
    first_checkpoint: AnyArray  # int32
    sibling_prev: AnyArray  # int32
    sibling_next: AnyArray  # int32
    key: AnyArray  # uint64 hash of (parent, a sample of the tokens)
    ghost_prev: AnyArray  # int32 list of nodes of weight 0, in the order they lost it
    ghost_next: AnyArray  # int32
    is_ghost: AnyArray  # bool
    free_nodes: AnyArray  # int32 stack
    table: AnyArray  # int32 open-addressing hash table of segment nodes, -1 = empty
    scalars: AnyArray  # int64


def rule_of(group: GroupSpec) -> int:
    """Which of the three match rules a group follows."""
    if group.is_snapshot:
        return RULE_SNAPSHOT
    return RULE_WINDOW if group.kind is Kind.WINDOW else RULE_PREFIX


def columns_of(group: GroupSpec, segment: int) -> int:
    """Columns that a group has in a node."""
    return 1 if group.is_snapshot else segment // group.block_tokens


def _per_group(values: list[int], dtype: type) -> AnyArray:
    return np.array(values, dtype=dtype)


def allocate(spec: ModelSpec, geometry: ArenaGeometry, max_nodes: int) -> Arrays:
    """All arrays for ``spec`` on an arena of this geometry, with room for ``max_nodes`` index nodes."""
    groups = spec.groups
    count = len(groups)
    slot_base = np.concatenate([[0], np.cumsum(geometry.num_slots)]).astype(np.int32)
    total = int(slot_base[-1])
    pages_of = geometry.num_slots // geometry.slots_per_page
    pages = count if geometry.static_split else int(pages_of[0])
    page_base = np.arange(count, dtype=np.int32) if geometry.static_split else np.zeros(count, dtype=np.int32)
    col_base = np.cumsum([0] + [columns_of(g, spec.segment_tokens) for g in groups]).astype(np.int32)
    buckets = 1 << max(4, (2 * max_nodes - 1).bit_length())
    none = np.int32(-1)

    def links(size: int) -> AnyArray:
        return np.full(size, none, dtype=np.int32)

    arrays = Arrays(
        rule=_per_group([rule_of(g) for g in groups], np.int8),
        ratio=_per_group([g.ratio for g in groups], np.int32),
        block_tokens=_per_group([g.block_tokens for g in groups], np.int32),
        window=_per_group([g.window for g in groups], np.int32),
        chunked=_per_group([g.chunked for g in groups], np.bool_),
        unless_multiple=_per_group([g.needed_unless_multiple_of for g in groups], np.int32),
        first_needed=_per_group([g.first_needed for g in groups], np.int32),
        interval=_per_group(
            [(spec.snapshot_interval or spec.segment_tokens) if g.kind is Kind.RECURRENT else 1 for g in groups], np.int32
        ),
        slot_base=slot_base,
        slots_per_page=geometry.slots_per_page.astype(np.int32),
        page_base=page_base,
        col_base=col_base,
        lru_head=links(count),
        lru_tail=links(count),
        part_head=links(count),
        used=np.zeros(count, dtype=np.int32),
        counters=np.zeros((count, 6), dtype=np.int64),
        page_group=np.full(pages, -1, dtype=np.int16),
        page_free=links(pages),
        page_used=np.zeros(pages, dtype=np.int32),
        page_pinned=np.zeros(pages, dtype=np.int32),
        page_prev=links(pages),
        page_next=links(pages),
        free_pages=np.arange(pages - 1, -1, -1, dtype=np.int32),
        static_pages=np.array([geometry.static_split]),
        state=np.zeros(total, dtype=np.uint8),
        grade=np.zeros(total, dtype=np.uint8),
        generation=np.zeros(total, dtype=np.uint32),
        pins=np.zeros(total, dtype=np.int32),
        stamp=np.zeros(total, dtype=np.int64),
        owner=links(total),
        owner_col=links(total),
        prev=links(total),
        next=links(total),
        parent=links(max_nodes),
        root=links(max_nodes),
        depth=np.zeros(max_nodes, dtype=np.int32),
        ntokens=links(max_nodes),
        tokens=np.zeros((max_nodes, spec.segment_tokens), dtype=np.int32),
        columns=np.zeros((max_nodes, int(col_base[-1])), dtype=np.int32),
        resident=np.zeros(max_nodes, dtype=np.int32),
        weight=np.zeros(max_nodes, dtype=np.int32),
        first_child=links(max_nodes),
        first_checkpoint=links(max_nodes),
        sibling_prev=links(max_nodes),
        sibling_next=links(max_nodes),
        key=np.zeros(max_nodes, dtype=np.uint64),
        ghost_prev=links(max_nodes),
        ghost_next=links(max_nodes),
        is_ghost=np.zeros(max_nodes, dtype=np.bool_),
        free_nodes=np.arange(max_nodes - 1, -1, -1, dtype=np.int32),
        table=links(buckets),
        scalars=np.array([0, pages, max_nodes, -1, -1, 0], dtype=np.int64),
    )
    if geometry.static_split:
        _own_static_pages(arrays)
    return arrays


def _own_static_pages(a: Arrays) -> None:
    """In a static split page ``g`` belongs to group ``g`` for ever."""
    for g in range(len(a.rule)):
        first, last = int(a.slot_base[g]), int(a.slot_base[g + 1])
        a.page_group[g] = g
        a.page_free[g] = first
        a.next[first:last] = np.arange(first + 1, last + 1, dtype=np.int32)
        a.next[last - 1] = -1
        a.part_head[g] = g
    a.scalars[FREE_PAGES] = 0
