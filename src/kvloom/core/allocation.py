"""Making the arrays of the metadata core for a model and an arena."""

from __future__ import annotations

from dataclasses import astuple
from math import lcm

import numpy as np

from kvloom.core.arrays import Arrays
from kvloom.core.bitmap import level_words, mark_range_free
from kvloom.core.fields import (
    BIT_BASE,
    BIT_LEVELS,
    BLOCK_SHIFT,
    BUSY,
    COL_BASE,
    COLUMNS,
    FREE_NODES,
    FREE_PAGES,
    GHOST_HEAD,
    GHOST_TAIL,
    GRAVE_HEAD,
    GRAVE_TAIL,
    HELD,
    KEY_ADDRESS,
    LEASED,
    NEED,
    NTOKENS,
    PAGE_BASE,
    PAGE_GROUP,
    PAGE_PINNED,
    PAGE_SHIFT,
    PAGE_USED,
    PAGES,
    PART_HEAD,
    PINNED,
    POLICY_NUMBERS,
    RATIO_SHIFT,
    RECYCLED,
    REST_INTERVAL,
    RULES,
    SCALARS,
    SCORED_AT,
    SLOT_BASE,
    SLOTS_PER_PAGE,
    STATIC,
    USED,
)
from kvloom.core.policies import CLASSES, ROWS, Order
from kvloom.core.reuse import SCRATCH_COLUMNS, SCRATCH_ROWS, TRIAL_COLUMNS
from kvloom.kinds import state_of
from kvloom.plan import ArenaGeometry
from kvloom.spec.model_spec import GroupSpec, ModelSpec
from kvloom.types import Kind

REST_SHARE = 8
"""Rests weigh at most this part of their path."""


def _shift(value: int) -> int:
    """Base-2 logarithm of a power of two, else -1: a division that hot loops turn into a shift."""
    return value.bit_length() - 1 if value > 0 and value & (value - 1) == 0 else -1


def columns_of(group: GroupSpec, segment: int) -> int:
    """Columns that a group has in a node."""
    return 1 if group.is_snapshot else segment // group.block_tokens


def _keep_every(spec: ModelSpec, group: GroupSpec) -> int:
    """Segment ends that keep a snapshot unasked: all for tails, every ``snapshot_interval`` for recurrent state."""
    return (spec.snapshot_interval or spec.segment_tokens) if group.kind is Kind.RECURRENT else 1


def rest_interval(spec: ModelSpec) -> int:
    """Tokens of path that weigh ``REST_SHARE`` times what a boundary does: see ``next_rest``.

    0 when nothing is kept besides the path, or nothing but that.
    """
    chunks = [g.window for g in spec.groups if g.window and g.chunked]
    unit = lcm(spec.snapshot_interval or spec.segment_tokens, *chunks)
    path = boundary = 0.0
    for group in spec.groups:
        if group.is_snapshot:
            multiple = group.needed_unless_multiple_of
            boundary += group.slot_bytes if multiple == 0 or unit % multiple else 0
        elif group.window:
            rows = 0 if group.chunked else group.window - 1
            boundary += group.slot_bytes * -(-rows // group.block_tokens)
        else:
            path += group.slot_bytes / group.block_tokens
    if not path or not boundary:
        return 0
    return -(-int(-(-REST_SHARE * boundary // path)) // unit) * unit


def allocate(
    spec: ModelSpec, geometry: ArenaGeometry, max_nodes: int, rules: Order = Order.STAMP, key_address: int = 0
) -> Arrays:
    """All arrays for ``spec`` on an arena of this geometry, with room for ``max_nodes`` index nodes.

    ``rules`` is the order in which leaves go; ``key_address`` that of the compiled key function for ``Order.KEY``.
    """
    count = len(spec.groups)
    columns = [columns_of(g, spec.segment_tokens) for g in spec.groups]
    pages = count if geometry.static_split else int(geometry.num_slots[0] // geometry.slots_per_page[0])
    total = int(geometry.num_slots.sum())
    words = level_words(total)
    buckets = 1 << max(4, (2 * max_nodes - 1).bit_length())
    stamps = np.zeros(max_nodes, dtype=np.int64)
    by_stamp = rules in (Order.STAMP, Order.CLASSES)
    heaps = ROWS.get(rules, 1)
    arrays = Arrays(
        group=np.full((count, 32), -1, dtype=np.int32),
        page=np.full((pages, 8), -1, dtype=np.int32),
        slot=np.zeros((total, 7), dtype=np.int32),
        generation=np.zeros(total, dtype=np.int32),
        trunk=np.zeros((max_nodes, 4), dtype=np.int32),
        node=np.zeros((max_nodes, 12), dtype=np.int32),
        tokens=np.zeros((max_nodes, spec.segment_tokens), dtype=np.int32),
        columns=np.zeros((max_nodes, sum(columns)), dtype=np.int32),
        table=np.full(buckets, -1, dtype=np.int32),
        heap=np.zeros((heaps, max_nodes), dtype=np.int32),
        order=stamps if by_stamp else np.zeros(max_nodes, dtype=np.int64),
        heat=np.zeros((max_nodes, 8), dtype=np.int32),
        policy=np.zeros(POLICY_NUMBERS, dtype=np.int64),
        trials=np.zeros((CLASSES, TRIAL_COLUMNS), dtype=np.int64),
        scratch=np.zeros((SCRATCH_ROWS, SCRATCH_COLUMNS), dtype=np.float64),
        free_bits=np.zeros(sum(words), dtype=np.int64),
        free_pages=np.arange(pages - 1, -1, -1, dtype=np.int32),
        free_nodes=np.arange(max_nodes - 1, -1, -1, dtype=np.int32),
        worth=np.zeros(total, dtype=np.int32),
        slot_stamp=np.zeros(total, dtype=np.int64),
        node_stamp=stamps,
        reached=np.zeros(max_nodes, dtype=np.int64),
        page_stamp=np.zeros(pages, dtype=np.int64),
        counters=np.zeros((count, 6), dtype=np.int64),
        scalars=np.zeros(SCALARS, dtype=np.int64),
    )
    arrays.scalars[[FREE_PAGES, FREE_NODES]] = pages, max_nodes
    arrays.scalars[[GHOST_HEAD, GHOST_TAIL, GRAVE_HEAD, GRAVE_TAIL]] = -1
    arrays.scalars[RECYCLED] = max(1, min(64, max_nodes // 16))
    arrays.policy[[RULES, KEY_ADDRESS, SCORED_AT]] = rules, key_address, -1
    arrays.scalars[REST_INTERVAL] = rest_interval(spec) if rules is Order.CLASSES else 0
    arrays.scalars[STATIC] = geometry.static_split
    arrays.scalars[BIT_LEVELS] = len(words)
    arrays.scalars[BIT_BASE : BIT_BASE + len(words)] = [sum(words[:i]) for i in range(len(words))]
    arrays.trunk[:, NTOKENS] = -1
    for g, group in enumerate(spec.groups):
        row = arrays.group[g]
        row[:8] = astuple(state_of(group).rule_row(_keep_every(spec, group)))
        row[SLOT_BASE] = int(geometry.num_slots[:g].sum())
        row[COL_BASE], row[COLUMNS] = sum(columns[:g]), columns[g]
        row[SLOTS_PER_PAGE] = geometry.slots_per_page[g]
        row[PAGE_SHIFT] = _shift(int(geometry.slots_per_page[g]))
        row[PAGE_BASE] = g if geometry.static_split else 0
        row[[USED, PAGES, NEED, HELD, BUSY, PINNED, LEASED]] = 0
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
        mark_range_free(a, first, first + slots)
        a.group[g, PART_HEAD] = g
    a.scalars[FREE_PAGES] = 0
