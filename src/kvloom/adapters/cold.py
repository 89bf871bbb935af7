"""A device arena and a disk store behind it: prefixes are looked for there, and ends of requests kept there.

The manager decides what moves; this joins its plans with the bytes.  Loads come before the request that waits for them;
stores run in a thread of their own, a few at a time, while their slots are held.  Nothing that the disk does stops a
request: what cannot be found, read or stored is counted and computed again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvloom.core.allocation import columns_of
from kvloom.core.namespace import ExtraKey
from kvloom.manager import Manager
from kvloom.manager.sequence import CachedSequence
from kvloom.plan import Chain, StoredObjects, TransferPlan
from kvloom.spec.model_spec import ModelSpec
from kvloom.tiers.disk import DiskStore, Fill, Found, Need, NewObject, PayloadForm, Places, Published, Unit
from kvloom.tiers.values import Result
from kvloom.types import AnyArray, Grade, Int32Array, IntArray

_TRIES = 4
"""Loads for one request: after one that did not arrive whole, what is left is tried."""


class SlotMemory(Protocol):
    """The bytes of an arena, as a transfer needs them."""

    def settle(self) -> None:
        """Wait until all that was queued to change the arena is done: the next reads come from another thread."""

    def read_slot(self, offset: int, into: memoryview) -> None:
        """Copy ``len(into)`` bytes from ``offset`` of the arena to host memory."""

    def host_memory(self) -> npt.NDArray[np.uint8] | None:
        """The arena itself where it is host memory, so that nothing need be copied twice; else None."""

    def write_slots(self, offsets: IntArray, lengths: IntArray, data: npt.NDArray[np.uint8]) -> None:
        """Copy pieces of ``data`` that lie one after the other to ``offsets`` of the arena."""


MOST_QUEUED = 8
"""Ends of sequences that may wait to be stored; more are left out and counted as ``busy``."""


CLOSE_PATIENCE, ROOM_PATIENCE = 60.0, 2.0
"""Seconds that closing, and a request without room, wait at most for what is being stored."""


@dataclass(slots=True)
class ColdStats:
    """What went to and came from the store.

    Attributes:
        bytes_loaded, bytes_stored: of objects, by kind.
        objects_loaded: by group.
        loads, stores: prefix units that moved.
        failed: objects that were looked up and did not arrive, by reason.
        not_stored: units that the store did not take, by reason.
    """

    bytes_loaded: Counter[str] = field(default_factory=Counter)
    bytes_stored: Counter[str] = field(default_factory=Counter)
    objects_loaded: Counter[str] = field(default_factory=Counter)
    loads: int = 0
    stores: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    not_stored: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "loads": self.loads,
            "stores": self.stores,
            "bytes_loaded": dict(self.bytes_loaded),
            "bytes_stored": dict(self.bytes_stored),
            "failed": dict(self.failed),
            "not_stored": dict(self.not_stored),
        }


class ColdTier:
    """One manager's disk store.  Belongs to the manager's thread.

    Args:
        memory: of the device arena.
        store: opened and closed by the caller.
    """

    def __init__(self, manager: Manager, memory: SlotMemory, store: DiskStore) -> None:
        self._manager, self._memory, self.store = manager, memory, store
        self.spec: ModelSpec = manager.spec
        self._worker = ThreadPoolExecutor(1, "kvloom-store")
        self._queued: deque[tuple[list[TransferPlan], Future[list[Published]]]] = deque()
        groups, segment = manager.spec.groups, manager.spec.segment_tokens
        self._sizes = np.array([group.slot_bytes for group in groups])
        self._columns = np.array([columns_of(group, segment) for group in groups])
        self.stats = ColdStats()

    # ---------------------------------------------------------------- loading

    def restore(self, tokens: Int32Array, salt: bytes, extra_keys: Sequence[ExtraKey], floor: Grade) -> int:
        """Bring to the device what lets a prompt resume further on; returns the bytes that were read.

        ``tokens``: the whole prompt.  Call it right before ``Manager.open``.
        """
        if len(tokens) < 2:
            return 0
        self.collect()
        manager = self._manager
        chain = manager.chain(tokens[:-1], salt=salt, extra_keys=extra_keys)
        total = 0
        for _ in range(_TRIES):  # damaged objects are not found again, but something shorter may be
            found = self._lookup(chain)
            if found is None:
                break
            stored = _objects(found.places)
            plan = manager.plan_load(chain.tokens, stored, salt=salt, extra_keys=extra_keys, floor=floor)
            if plan is None:
                break
            results = np.full(len(plan), Result.STOPPED, dtype=np.uint8)
            try:
                results = self._read(plan, found.places)
            finally:
                manager.finish_load(plan, results == Result.OK)
            total += self._count(plan, results == Result.OK, self.stats.bytes_loaded)
            for g in plan.group[results == Result.OK].tolist():
                self.stats.objects_loaded[self.spec.groups[g].name] += 1
            if not results.any():
                row = -(-plan.position // chain.segment) - 1
                self.store.touch(manager.layout, chain.digests[row].tobytes())
                self.stats.loads += 1
            if not results.any() or (results == Result.IO_ERROR).any():  # that may pass: not asked again at once
                break
        return total

    def _lookup(self, chain: Chain) -> Found | None:
        """What is stored of a chain; None when that is nothing."""
        found = self.store.lookup(self._manager.layout, chain.digests)
        entries = found.places.entries
        fits = (entries["form"] == PayloadForm.RAW) & (entries["grade"] <= int(Grade.CANONICAL))
        fits &= entries["group"] < len(self.spec.groups)
        group = entries["group"][fits].astype(np.int64)
        fits[fits] &= (entries["length"][fits] == self._sizes[group]) & (entries["column"][fits] < self._columns[group])
        places = found.places if fits.all() else found.places.take(fits)
        return Found(found.known, found.boundary, places) if len(places) else None

    def _read(self, plan: TransferPlan, places: Places) -> npt.NDArray[np.uint8]:
        """Read the objects of a plan into their slots; the ``Result`` of each."""
        places = places.take(_order(plan, places))
        offsets, lengths = self._offsets(plan), places.entries["length"].astype(np.int64)
        memory = self._memory.host_memory()
        if memory is not None:
            results = self.store.read(places, memory, offsets).results
        else:
            staging = np.zeros(int(lengths.sum()), dtype=np.uint8)
            results = self.store.read(places, staging, np.cumsum(lengths) - lengths).results
            self._memory.write_slots(offsets, lengths, staging)
        for code in results[results != Result.OK].tolist():
            self.stats.failed[Result(code).name.lower()] += 1
        return results

    def _offsets(self, plan: TransferPlan) -> IntArray:
        offsets = np.zeros(len(plan), dtype=np.int64)
        for g in np.unique(plan.group).tolist():
            mine = plan.group == g
            offsets[mine] = self._manager.geometry.slot_offsets(g, plan.slot[mine])
        return offsets

    # ---------------------------------------------------------------- storing

    def keep(self, sequence: CachedSequence, salt: bytes, extra_keys: Sequence[ExtraKey]) -> None:
        """Store the present end of a sequence, which has just been kept resumable, and its last canonical boundary.

        Returns at once; the bytes are read from the slots later, in another thread.
        """
        self.collect()
        tokens = sequence.tokens
        if not len(tokens):
            return
        if len(self._queued) >= MOST_QUEUED:
            self.stats.not_stored["busy"] += 1
            return
        manager = self._manager
        chain = manager.chain(tokens, salt=salt, extra_keys=extra_keys)
        found = self._lookup(chain)
        stored = _NOTHING if found is None else _objects(found.places)
        plans: list[TransferPlan] = []
        for floor in (Grade.CANONICAL, Grade.FAITHFUL):
            plan = manager.plan_store(sequence, stored, floor)
            if plan is not None:
                plans.append(plan)
                stored = _joined(stored, plan)
        if plans:
            self._memory.settle()
            units = [self._unit(chain, plan) for plan in plans]
            self._queued.append((plans, self._worker.submit(lambda: [self.store.publish(unit) for unit in units])))

    def collect(self) -> None:
        """Let go of the slots of what has been stored."""
        while self._queued and self._queued[0][1].done():
            self._end(*self._queued.popleft())

    def flush(self, patience_s: float = CLOSE_PATIENCE) -> bool:
        """Wait until everything is stored that waits to be, but not longer; whether nothing waits any more."""
        ends = monotonic() + patience_s
        while self._queued:
            done, _ = wait([self._queued[0][1]], timeout=max(0.0, ends - monotonic()))
            if not done:
                return False
            self.collect()
        return True

    @property
    def waiting(self) -> bool:
        """Whether something waits to be stored, and holds its slots."""
        return bool(self._queued)

    def close(self) -> None:
        """Store what waits, then close the store.  A disk that hangs is left to itself, and what waits is lost."""
        if self.flush():
            self._worker.shutdown()
            self.store.close()
        else:
            self._worker.shutdown(wait=False, cancel_futures=True)

    def _end(self, plans: list[TransferPlan], stored: Future[list[Published]]) -> None:
        for plan in plans:
            self._manager.finish_store(plan)
        if stored.cancelled():
            self.stats.not_stored["hung"] += len(plans)
            return
        for plan, done in zip(plans, stored.result(), strict=True):
            if done.stored:
                self.stats.stores += 1
                self._count(plan, np.ones(len(plan), dtype=np.bool_), self.stats.bytes_stored)
            else:
                self.stats.not_stored[done.outcome.value] += 1

    def _unit(self, chain: Chain, plan: TransferPlan) -> Unit:
        items = zip(plan.row.tolist(), plan.group.tolist(), plan.column.tolist(), plan.grade.tolist(), strict=True)
        objects = [
            NewObject(row, group, column, Grade(grade), self._payload(group, offset))
            for (row, group, column, grade), offset in zip(items, self._offsets(plan).tolist(), strict=True)
        ]
        needs = [Need(group, row, count, column) for group, row, column, count in plan.needs.tolist()]
        rows, tokens = -(-plan.position // chain.segment), chain.tokens[: plan.position]
        digests = chain.digests[:rows]
        return Unit(self._manager.layout, chain.root, digests, tokens, chain.segment, tuple(objects), tuple(needs))

    def _payload(self, group: int, offset: int) -> Fill:
        return Fill(self.spec.groups[group].slot_bytes, lambda into: self._memory.read_slot(offset, into))

    def _count(self, plan: TransferPlan, moved: npt.NDArray[np.bool_], into: Counter[str]) -> int:
        total = 0
        for g, count in zip(*np.unique(plan.group[moved], return_counts=True), strict=True):
            group = self.spec.groups[int(g)]
            into[group.kind.name.lower()] += int(count) * group.slot_bytes
            total += int(count) * group.slot_bytes
        return total


def _objects(places: Places) -> StoredObjects:
    entries = places.entries
    columns = (places.rows, entries["group"], entries["column"], entries["grade"])
    return StoredObjects(*(np.ascontiguousarray(column, dtype=np.int32) for column in columns))


def _joined(stored: StoredObjects, plan: TransferPlan) -> StoredObjects:
    """``stored`` once ``plan`` is stored, too."""
    names = ("row", "group", "column", "grade")
    return StoredObjects(*(np.concatenate([getattr(stored, name), getattr(plan, name)]) for name in names))


_EMPTY = np.empty(0, dtype=np.int32)
_NOTHING = StoredObjects(_EMPTY, _EMPTY, _EMPTY, _EMPTY)


def _order(plan: TransferPlan, places: Places) -> IntArray:
    """For every object of ``plan`` its index in ``places``."""
    entries = places.entries
    columns = 1 + max(int(entries["column"].max()), int(plan.column.max()))
    groups = 1 + max(int(entries["group"].max()), int(plan.group.max()))

    def keys(row: AnyArray, group: AnyArray, column: AnyArray) -> IntArray:
        made: IntArray = (row.astype(np.int64) * groups + group.astype(np.int64)) * columns + column.astype(np.int64)
        return made

    stored = keys(places.rows, entries["group"], entries["column"])
    order = np.argsort(stored, kind="stable")
    found: IntArray = order[np.searchsorted(stored[order], keys(plan.row, plan.group, plan.column))]
    return found
