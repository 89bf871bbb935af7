"""A disk store as recovery asks it: what it has of a chain, and bringing some of that in while it is worth waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvloom.adapters.cold import SlotMemory
from kvloom.core.allocation import columns_of
from kvloom.manager import Manager
from kvloom.manager.ways import Arrived
from kvloom.plan import Chain, StoredObjects, TransferPlan
from kvloom.tiers.disk import DiskStore, PayloadForm, Places
from kvloom.tiers.values import Result
from kvloom.types import AnyArray, Grade, IntArray

_PROBED = 256 << 10
"""Bytes from which on a load begins with an eighth, to see whether the disk is as fast as was thought."""


class StoreSource:
    """One disk store behind one arena.  Belongs to the manager's thread.

    Args:
        memory: of the arena.
        store: opened and closed by the caller.
        clock: seconds.

    Attributes:
        names: of its only tier.
    """

    names: tuple[str, ...] = ("disk",)

    def __init__(self, manager: Manager, memory: SlotMemory, store: DiskStore, clock: Callable[[], float]) -> None:
        self._manager, self._memory, self._store, self._clock = manager, memory, store, clock
        groups, segment = manager.spec.groups, manager.spec.segment_tokens
        self._sizes = np.array([group.slot_bytes for group in groups])
        self._columns = np.array([columns_of(group, segment) for group in groups])
        self._found: Places | None = None

    def find(self, chain: Chain) -> Sequence[StoredObjects]:
        """What the store has of a chain that this model can use."""
        places = self._store.lookup(self._manager.layout, chain.digests).places
        entries = places.entries
        fits = (entries["form"] == PayloadForm.RAW) & (entries["grade"] <= int(Grade.CANONICAL))
        fits &= entries["group"] < len(self._sizes)
        group = entries["group"][fits].astype(np.int64)
        fits[fits] &= (entries["length"][fits] == self._sizes[group]) & (entries["column"][fits] < self._columns[group])
        self._found = places = places if fits.all() else places.take(fits)
        columns = (places.rows, *(places.entries[name] for name in ("group", "column", "grade")))
        return (StoredObjects(*(np.ascontiguousarray(column, dtype=np.int32) for column in columns)),)

    def fetch(
        self, plan: TransferPlan, wanted: npt.NDArray[np.bool_], give_up: Callable[[float, float], bool]
    ) -> Arrived:
        """Read the objects ``wanted`` into their slots."""
        assert self._found is not None
        which = np.flatnonzero(wanted)
        places = self._found.take(_order(plan, which, self._found))
        lengths, offsets = places.entries["length"].astype(np.int64), self._offsets(plan)[which]
        results = np.full(len(which), Result.STOPPED, dtype=np.uint8)
        began, came, given_up = self._clock(), 0, False
        total = int(lengths.sum())

        def stop() -> bool:
            nonlocal given_up  # by threads of the store, which only ever set it
            given_up = given_up or give_up(self._clock() - began, came / total)
            return given_up

        for part in _parts(lengths):
            if came and stop():
                break
            results[part] = self._read(places.take(part), lengths[part], offsets[part], stop)
            came = int(lengths[results == Result.OK].sum())
        good = np.zeros(len(plan), dtype=np.bool_)
        good[which] = results == Result.OK
        return Arrived(good, ((0, came, self._clock() - began),), given_up)

    def _read(
        self, places: Places, lengths: IntArray, offsets: IntArray, stop: Callable[[], bool]
    ) -> npt.NDArray[np.uint8]:
        memory = self._memory.host_memory()
        if memory is not None:
            return self._store.read(places, memory, offsets, stop).results
        staging = np.zeros(int(lengths.sum()), dtype=np.uint8)
        results = self._store.read(places, staging, np.cumsum(lengths) - lengths, stop).results
        self._memory.write_slots(offsets, lengths, staging)
        return results

    def _offsets(self, plan: TransferPlan) -> IntArray:
        offsets = np.zeros(len(plan), dtype=np.int64)
        for g in np.unique(plan.group).tolist():
            mine = plan.group == g
            offsets[mine] = self._manager.geometry.slot_offsets(g, plan.slot[mine])
        return offsets


def _parts(lengths: IntArray) -> list[IntArray]:
    """A first part that shows how fast the disk is now, where it is worth it, and the rest."""
    total = int(lengths.sum())
    if total < _PROBED:
        return [np.arange(len(lengths))]
    first = 1 + int(np.searchsorted(np.cumsum(lengths), total // 8))
    return [np.arange(first), np.arange(first, len(lengths))]


def _order(plan: TransferPlan, which: IntArray, places: Places) -> IntArray:
    """For every object ``which`` of the plan its index in ``places``."""
    entries = places.entries
    columns = 1 + int(entries["column"].max(initial=0))
    groups = 1 + int(entries["group"].max(initial=0))

    def keys(row: AnyArray, group: AnyArray, column: AnyArray) -> IntArray:
        made: IntArray = (row.astype(np.int64) * groups + group.astype(np.int64)) * columns + column.astype(np.int64)
        return made

    stored = keys(places.rows, entries["group"], entries["column"])
    order = np.argsort(stored, kind="stable")
    found: IntArray = order[
        np.searchsorted(stored[order], keys(plan.row[which], plan.group[which], plan.column[which]))
    ]
    return found
