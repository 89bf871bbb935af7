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

from dataclasses import astuple
from typing import NamedTuple

import numpy as np

from kvloom.kinds import MatchRule, state_of
from kvloom.plan import ArenaGeometry
from kvloom.spec.model_spec import GroupSpec, ModelSpec
from kvloom.types import AnyArray, Kind

RULE_PREFIX = int(MatchRule.PREFIX)
RULE_WINDOW = int(MatchRule.RUN)
RULE_SNAPSHOT = int(MatchRule.POINT)

CLOCK, FREE_PAGES, FREE_NODES, GHOST_HEAD, GHOST_TAIL, NODES_USED, FRUGAL = range(7)
"""Places in ``scalars``."""

ALLOCS, EVICTIONS, HITS, MISSES, COMMITS, UNKEPT = range(6)
"""Columns of ``counters[g]``: objects allocated, evicted, leased, missing, committed, not kept for lack of room."""


# rows of ``group``: int32 [17, G]
RULE = 0  # RULE_*
RATIO = 1  # tokens per entry
BLOCK_TOKENS = 2  # 0 = snapshot
WINDOW = 3
CHUNKED = 4  # 1 for chunked local attention
UNLESS_MULTIPLE = 5  # snapshots needed only off multiples of this; 0 = everywhere
FIRST_NEEDED = 6
INTERVAL = 7  # snapshots of segment ends are kept at multiples of this
SLOTS_PER_PAGE = 8
PAGE_BASE = 9  # page of local slot 0
LRU_HEAD = 10  # global slot, least recently released first
LRU_TAIL = 11
PART_HEAD = 12  # first page with a free slot
USED = 13  # slots not free
PINNED = 14  # slots in use that cannot be evicted now
PINNED_PAGES = 15  # pages with such a slot
NEED = 16  # scratch: slots that an operation is about to take

# rows of ``page``: int32 [6, P]
PAGE_GROUP = 0  # -1 = free
PAGE_FREE = 1  # first free slot (global)
PAGE_USED = 2
PAGE_PINNED = 3  # slots of the page that cannot be evicted now
PAGE_PREV = 4  # list of the pages of a group with free slots
PAGE_NEXT = 5  # the same list, forwards

# rows of ``slot``: int32 [8, S]
STATE = 0  # ObjectState
GRADE = 1  # Grade
GENERATION = 2  # grows at every allocation and every free
PINS = 3  # holders (sequences, transfers)
OWNER = 4  # node whose column names this slot, -1 = private
OWNER_COL = 5
PREV = 6  # LRU list
NEXT = 7  # LRU list, or the free list of the page

# rows of ``node``: int32 [13, N]
PARENT = 0  # -1 for a root or an unused node
ROOT = 1  # the namespace this node belongs to
DEPTH = 2  # segments from the root to the end of this node (checkpoint: of its parent)
NTOKENS = 3  # segment, or fewer for a checkpoint; 0 = root; -1 = unused
RESIDENT = 4  # number of columns that name a slot
WEIGHT = 5  # resident objects + live children + live checkpoints + holders; 0 = a ghost
FIRST_CHILD = 6
FIRST_CHECKPOINT = 7
SIBLING_PREV = 8
SIBLING_NEXT = 9
GHOST_PREV = 10  # list of nodes of weight 0, in the order they lost it
GHOST_NEXT = 11
IS_GHOST = 12  # 1 when in the ghost list


class Arrays(NamedTuple):
    """See the module docstring for index spaces.  Owned and mutated by the core only.

    Few arrays with many rows, since compile time grows with the number of arrays a function takes.
    """

    group: AnyArray  # int32 [17, G]
    page: AnyArray  # int32 [6, P]
    slot: AnyArray  # int32 [8, S]
    node: AnyArray  # int32 [13, N]
    slot_base: AnyArray  # int32 [G + 1]
    col_base: AnyArray  # int32 [G + 1]
    counters: AnyArray  # int64 [G, 6]
    stamp: AnyArray  # int64 [S] clock of the last release
    tokens: AnyArray  # int32 [N, segment]
    columns: AnyArray  # int32 [N, C] local slot, or a code that says why there is none
    key: AnyArray  # uint64 [N] hash of (parent, a sample of the tokens)
    free_pages: AnyArray  # int32 [P] stack
    free_nodes: AnyArray  # int32 [N] stack
    table: AnyArray  # int32, open-addressing hash table of segment nodes, -1 = empty
    scalars: AnyArray  # int64 [7]
    static_pages: AnyArray  # bool [1]

    # Rows by name, for code that is not compiled.

    @property
    def rule(self) -> AnyArray:
        return self.group[RULE]

    @property
    def ratio(self) -> AnyArray:
        return self.group[RATIO]

    @property
    def block_tokens(self) -> AnyArray:
        return self.group[BLOCK_TOKENS]

    @property
    def window(self) -> AnyArray:
        return self.group[WINDOW]

    @property
    def chunked(self) -> AnyArray:
        return self.group[CHUNKED]

    @property
    def unless_multiple(self) -> AnyArray:
        return self.group[UNLESS_MULTIPLE]

    @property
    def first_needed(self) -> AnyArray:
        return self.group[FIRST_NEEDED]

    @property
    def interval(self) -> AnyArray:
        return self.group[INTERVAL]

    @property
    def slots_per_page(self) -> AnyArray:
        return self.group[SLOTS_PER_PAGE]

    @property
    def page_base(self) -> AnyArray:
        return self.group[PAGE_BASE]

    @property
    def lru_head(self) -> AnyArray:
        return self.group[LRU_HEAD]

    @property
    def lru_tail(self) -> AnyArray:
        return self.group[LRU_TAIL]

    @property
    def part_head(self) -> AnyArray:
        return self.group[PART_HEAD]

    @property
    def used(self) -> AnyArray:
        return self.group[USED]

    @property
    def page_group(self) -> AnyArray:
        return self.page[PAGE_GROUP]

    @property
    def page_free(self) -> AnyArray:
        return self.page[PAGE_FREE]

    @property
    def page_used(self) -> AnyArray:
        return self.page[PAGE_USED]

    @property
    def page_pinned(self) -> AnyArray:
        return self.page[PAGE_PINNED]

    @property
    def page_prev(self) -> AnyArray:
        return self.page[PAGE_PREV]

    @property
    def page_next(self) -> AnyArray:
        return self.page[PAGE_NEXT]

    @property
    def state(self) -> AnyArray:
        return self.slot[STATE]

    @property
    def grade(self) -> AnyArray:
        return self.slot[GRADE]

    @property
    def generation(self) -> AnyArray:
        return self.slot[GENERATION]

    @property
    def pins(self) -> AnyArray:
        return self.slot[PINS]

    @property
    def owner(self) -> AnyArray:
        return self.slot[OWNER]

    @property
    def owner_col(self) -> AnyArray:
        return self.slot[OWNER_COL]

    @property
    def prev(self) -> AnyArray:
        return self.slot[PREV]

    @property
    def next(self) -> AnyArray:
        return self.slot[NEXT]

    @property
    def parent(self) -> AnyArray:
        return self.node[PARENT]

    @property
    def root(self) -> AnyArray:
        return self.node[ROOT]

    @property
    def depth(self) -> AnyArray:
        return self.node[DEPTH]

    @property
    def ntokens(self) -> AnyArray:
        return self.node[NTOKENS]

    @property
    def resident(self) -> AnyArray:
        return self.node[RESIDENT]

    @property
    def weight(self) -> AnyArray:
        return self.node[WEIGHT]

    @property
    def first_child(self) -> AnyArray:
        return self.node[FIRST_CHILD]

    @property
    def first_checkpoint(self) -> AnyArray:
        return self.node[FIRST_CHECKPOINT]

    @property
    def sibling_prev(self) -> AnyArray:
        return self.node[SIBLING_PREV]

    @property
    def sibling_next(self) -> AnyArray:
        return self.node[SIBLING_NEXT]

    @property
    def ghost_prev(self) -> AnyArray:
        return self.node[GHOST_PREV]

    @property
    def ghost_next(self) -> AnyArray:
        return self.node[GHOST_NEXT]

    @property
    def is_ghost(self) -> AnyArray:
        return self.node[IS_GHOST]


def _keep_every(spec: ModelSpec, group: GroupSpec) -> int:
    """Segment ends that keep a snapshot unasked: all for tails, every ``snapshot_interval`` for recurrent state."""
    return (spec.snapshot_interval or spec.segment_tokens) if group.kind is Kind.RECURRENT else 1


def columns_of(group: GroupSpec, segment: int) -> int:
    """Columns that a group has in a node."""
    return 1 if group.is_snapshot else segment // group.block_tokens


def allocate(spec: ModelSpec, geometry: ArenaGeometry, max_nodes: int) -> Arrays:
    """All arrays for ``spec`` on an arena of this geometry, with room for ``max_nodes`` index nodes."""
    groups = spec.groups
    count = len(groups)
    slot_base = np.concatenate([[0], np.cumsum(geometry.num_slots)]).astype(np.int32)
    total = int(slot_base[-1])
    pages = count if geometry.static_split else int(geometry.num_slots[0] // geometry.slots_per_page[0])
    col_base = np.cumsum([0] + [columns_of(g, spec.segment_tokens) for g in groups]).astype(np.int32)
    buckets = 1 << max(4, (2 * max_nodes - 1).bit_length())
    group = np.array(
        [
            *zip(*(astuple(state_of(g).rule_row(_keep_every(spec, g))) for g in groups), strict=True),
            geometry.slots_per_page.tolist(),
            list(range(count)) if geometry.static_split else [0] * count,
            [-1] * count,
            [-1] * count,
            [-1] * count,
            *[[0] * count] * 4,
        ],
        dtype=np.int32,
    )
    arrays = Arrays(
        group=group,
        page=np.zeros((6, pages), dtype=np.int32),
        slot=np.zeros((8, total), dtype=np.int32),
        node=np.zeros((13, max_nodes), dtype=np.int32),
        slot_base=slot_base,
        col_base=col_base,
        counters=np.zeros((count, 6), dtype=np.int64),
        stamp=np.zeros(total, dtype=np.int64),
        tokens=np.zeros((max_nodes, spec.segment_tokens), dtype=np.int32),
        columns=np.zeros((max_nodes, int(col_base[-1])), dtype=np.int32),
        key=np.zeros(max_nodes, dtype=np.uint64),
        free_pages=np.arange(pages - 1, -1, -1, dtype=np.int32),
        free_nodes=np.arange(max_nodes - 1, -1, -1, dtype=np.int32),
        table=np.full(buckets, -1, dtype=np.int32),
        scalars=np.array([0, pages, max_nodes, -1, -1, 0, 0], dtype=np.int64),
        static_pages=np.array([geometry.static_split]),
    )
    arrays.page[[PAGE_GROUP, PAGE_FREE, PAGE_PREV, PAGE_NEXT]] = -1
    arrays.slot[[OWNER, OWNER_COL, PREV, NEXT]] = -1
    links = [PARENT, ROOT, NTOKENS, FIRST_CHILD, FIRST_CHECKPOINT, SIBLING_PREV, SIBLING_NEXT, GHOST_PREV, GHOST_NEXT]
    arrays.node[links] = -1
    if geometry.static_split:
        _own_static_pages(arrays)
    return arrays


def _own_static_pages(a: Arrays) -> None:
    """In a static split page ``g`` belongs to group ``g`` for ever."""
    for g in range(len(a.rule)):
        first, last = int(a.slot_base[g]), int(a.slot_base[g + 1])
        a.page_group[g] = g
        if first == last:  # a tiny arena may have no slot at all for a group that short sequences do not need
            continue
        a.page_free[g] = first
        a.next[first:last] = np.arange(first + 1, last + 1, dtype=np.int32)
        a.next[last - 1] = -1
        a.part_head[g] = g
    a.scalars[FREE_PAGES] = 0
