"""Counters and fill levels as plain values, per kind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvloom.core.arrays import Arrays
from kvloom.core.fields import (
    ALLOCS,
    COMMITS,
    EVICTIONS,
    HITS,
    MISSES,
    NODES_USED,
    SLOT_BASE,
    STATE,
    UNKEPT,
    USED,
)
from kvloom.core.lifecycle import COMMITTED
from kvloom.manager.tickets import Tickets
from kvloom.plan import ArenaGeometry
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import Kind


@dataclass(frozen=True, slots=True)
class KindStats:
    """Counters of one kind since the manager was made, in objects; ``bytes`` are those committed now.

    ``misses`` counts objects that resuming just before the last prompt token would have needed beyond the hit;
    ``unkept`` commits that were skipped for lack of room.
    """

    hits: int
    misses: int
    evictions: int
    commits: int
    allocations: int
    unkept: int
    objects: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of a manager.

    Attributes:
        kinds: per kind, only kinds that the model has.
        cap, arena, used: bytes that the tier may use, that the arena spans, that slots in use take now.
        nodes: places of the prefix index in use.
        plans_open, completions_ignored: transfers in flight, and completions that nobody waited for.
    """

    kinds: dict[Kind, KindStats]
    cap: int
    arena: int
    used: int
    nodes: int
    plans_open: int
    completions_ignored: int


def collect_stats(spec: ModelSpec, arrays: Arrays, geometry: ArenaGeometry, cap: int, tickets: Tickets) -> Stats:
    """Fold the arrays of the core into ``Stats``."""
    totals: dict[Kind, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
    for g, group in enumerate(spec.groups):
        first = int(arrays.group[g, SLOT_BASE])
        here = slice(first, first + int(geometry.num_slots[g]))
        objects = int(np.count_nonzero(arrays.slot[here, STATE] == COMMITTED))
        counters = arrays.counters[g]
        row = [int(counters[i]) for i in (HITS, MISSES, EVICTIONS, COMMITS, ALLOCS, UNKEPT)]
        row += [objects, objects * group.slot_bytes]
        so_far = totals.get(group.kind, np.zeros(8, dtype=np.int64))
        totals[group.kind] = so_far + np.array(row, dtype=np.int64)
    return Stats(
        kinds={kind: KindStats(*(int(v) for v in values)) for kind, values in totals.items()},
        cap=cap,
        arena=geometry.arena_bytes,
        used=int((arrays.group[:, USED] * geometry.slot_bytes).sum()),
        nodes=int(arrays.scalars[NODES_USED]),
        plans_open=len(tickets),
        completions_ignored=tickets.ignored,
    )
