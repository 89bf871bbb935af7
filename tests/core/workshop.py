"""Tools of the core's tests: small managers, squeezed memory, what a manager holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from tests.core.toy_engine import ToyEngine

from kvloom.config import Device
from kvloom.core.block_pool import release, take_slot
from kvloom.core.fields import ALLOCS, ANCHORS, NTOKENS, OWNER, PINS, RESIDENT, SLOT_BASE, STATE
from kvloom.core.geometry import split_statically
from kvloom.core.lifecycle import COMMITTED
from kvloom.core.page_table import FIRST, LAST, Rows, place
from kvloom.manager import CachedSequence, Manager
from kvloom.manager.tickets import Copy
from kvloom.plan import CopyPlan
from kvloom.spec.model_spec import ModelSpec

KIB = 1024


def engine(spec: ModelSpec, kib: int, **options: Any) -> ToyEngine:
    """A toy engine on a fresh manager with an arena of ``kib`` KiB."""
    return ToyEngine(Manager(spec, [Device(kib * KIB)], **options))


def cut_statically() -> AbstractContextManager[Any]:
    """While inside, new managers split their arenas statically, although pages could move in them."""
    return patch("kvloom.manager.books.plan_geometry", split_statically)


def split_engine(spec: ModelSpec, kib: int, **options: Any) -> ToyEngine:
    """A toy engine on an arena of ``kib`` KiB that is split statically, so that one group alone can be short."""
    with cut_statically():
        e = engine(spec, kib, **options)
    assert e.manager.geometry.static_split
    return e


def prompt_of(length: int, variant: int = 0) -> list[int]:
    """``length`` tokens; other variants differ from the first token on."""
    return [(variant + i * (variant + 1)) % 50 for i in range(length)]


@contextmanager
def squeezed(manager: Manager, group: int, leave: int) -> Iterator[None]:
    """While inside, ``group`` can only get ``leave`` more slots: plans in flight hold what is free or evictable."""
    arrays = manager.arrays
    first = int(arrays.group[group, SLOT_BASE])
    mine = range(first, first + int(manager.geometry.num_slots[group]))
    evictable = [s for s in mine if arrays.slot[s, STATE] == COMMITTED and arrays.slot[s, PINS] == 0]
    plans: list[CopyPlan] = [manager.tickets.issue([Copy(group, -1, slot)]) for slot in evictable]
    taken: list[int] = []
    while (slot := int(take_slot(arrays, group))) >= 0:
        taken.append(slot)
    plans += [manager.tickets.issue([Copy(group, -1, slot)]) for slot in taken[leave:]]
    for slot in taken:
        release(arrays, group, slot)
    try:
        yield
    finally:
        for plan in plans:
            manager.abandon(plan)


def allocations(manager: Manager) -> list[int]:
    """Slots taken so far, per group."""
    taken: list[int] = manager.arrays.counters[:, ALLOCS].tolist()
    return taken


def holdings(manager: Manager) -> dict[str, Any]:
    """Who holds what: slots with holders, block tables, plans, living index nodes.  Order and clocks are left out."""
    arrays, rows = manager.arrays, manager.rows
    running = [sequence.row for sequence in manager.running()]
    return {
        "holders": arrays.slot[:, PINS].tolist(),
        "states": arrays.slot[:, STATE].tolist(),
        "owners": arrays.slot[:, OWNER].tolist(),
        "tables": [_entries(rows, row, g) for row in running for g in range(len(rows.shape))],
        "bounds": rows.span[running].tolist(),
        "rows": running,
        "plans": sorted(manager.tickets._open),
        "nodes": {
            n: (objects, anchors)
            for n, (objects, anchors) in enumerate(arrays.node[:, [RESIDENT, ANCHORS]].tolist())
            if arrays.trunk[n, NTOKENS] >= 0 and objects + anchors > 0
        },
        "in use": manager.in_use(),
    }


def _entries(rows: Rows, row: int, group: int) -> list[int]:
    """The local slots of the blocks in use."""
    first, last = rows.span[row, group, [FIRST, LAST]].tolist()
    return [int(rows.table[row, place(rows, group, block)]) for block in range(first, last)]


def view(manager: Manager, sequence: CachedSequence) -> dict[str, Any]:
    """What a sequence shows."""
    rows = manager.rows
    groups = range(len(rows.shape))
    return {
        "numbers": (sequence.length, sequence.reused, sequence.grade, sequence.broken, sequence.closed, sequence.node),
        "tokens": sequence.tokens.tolist(),
        "tables": [_entries(rows, sequence.row, g) for g in groups],
        "bounds": [(sequence.first_block(g), sequence.num_blocks(g)) for g in groups],
    }


def reason_list(sequence: CachedSequence) -> list[tuple[Any, ...]]:
    """The limits of an explanation as tuples: (reason, position, tier, kind, group)."""
    return [(x.reason, x.position, x.tier, x.kind, x.group) for x in sequence.explanation.limits]


def ids(tokens: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Tokens as the manager takes them."""
    return np.array(tokens, dtype=np.int32)
