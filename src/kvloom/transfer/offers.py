"""What all cold tiers together have of a chain: of every object the copy in the nearest tier that is good enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvloom.plan import StoredObjects, TransferPlan
from kvloom.tiers.values import Places
from kvloom.types import AnyArray, Grade, Int32Array, IntArray, PayloadForm


@dataclass(frozen=True, slots=True)
class Offer:
    """Attributes:
    stored: the objects, as the manager takes them.
    tier: int32 ``[n]``, index of the tier that has the copy.
    index: int64 ``[n]``, its index among the places of that tier.
    places: of every tier.
    """

    stored: StoredObjects
    tier: Int32Array
    index: IntArray
    places: tuple[Places | None, ...]

    def __len__(self) -> int:
        return len(self.tier)

    def of_plan(self, plan: TransferPlan) -> tuple[Int32Array, IntArray]:
        """For every object of ``plan`` its tier, and its index among the places of that tier."""
        own = _keys(self.stored.row, self.stored.group, self.stored.column)
        order = np.argsort(own, kind="stable")
        at = order[np.searchsorted(own[order], _keys(plan.row, plan.group, plan.column))]
        return self.tier[at], self.index[at]


def make_offer(found: Sequence[Places | None], floor: Grade) -> Offer:
    """Of places in several tiers, nearest first, the first copy of every object that is ``floor`` or better."""
    parts: list[tuple[AnyArray, AnyArray, AnyArray, AnyArray, AnyArray, AnyArray]] = []
    for tier, places in enumerate(found):
        if places is None:
            continue
        good = np.flatnonzero(places.entries["grade"] >= int(floor))
        entries, rows = places.entries[good], places.rows[good]
        parts.append(
            (rows, entries["group"], entries["column"], entries["grade"], np.full(len(good), tier, np.int32), good)
        )
    if not parts:
        return Offer(no_objects(), np.empty(0, np.int32), np.empty(0, np.int64), tuple(found))
    row, group, column, grade, which, index = (np.concatenate(each) for each in zip(*parts, strict=True))
    _, first = np.unique(_keys(row, group, column), return_index=True)
    columns = (np.ascontiguousarray(each[first], dtype=np.int32) for each in (row, group, column, grade))
    return Offer(StoredObjects(*columns), which[first], index[first].astype(np.int64), tuple(found))


def objects_of(places: Places | None) -> StoredObjects:
    """All that one tier has, as the manager takes it."""
    if places is None:
        return no_objects()
    entries = places.entries
    columns = (places.rows, entries["group"], entries["column"], entries["grade"])
    return StoredObjects(*(np.ascontiguousarray(column, dtype=np.int32) for column in columns))


def kept_of(places: Places | None) -> StoredObjects:
    """The same for a store: what is there in a form that is not exact is not to be written again."""
    stored = objects_of(places)
    if places is not None:
        stored.grade[places.entries["form"] == PayloadForm.FP8] = int(Grade.CANONICAL)
    return stored


def joined(stored: StoredObjects, plan: TransferPlan) -> StoredObjects:
    """``stored`` once ``plan`` is stored, too."""
    names = ("row", "group", "column", "grade")
    return StoredObjects(*(np.concatenate([getattr(stored, name), getattr(plan, name)]) for name in names))


def no_objects() -> StoredObjects:
    """Nothing."""
    return StoredObjects(*(np.empty(0, dtype=np.int32) for _ in range(4)))


def _keys(row: AnyArray, group: AnyArray, column: AnyArray) -> IntArray:
    """One number for every object: 31 bits of row, 12 of group, 20 of column."""
    made: IntArray = (row.astype(np.int64) << 32) | (group.astype(np.int64) << 20) | column.astype(np.int64)
    return made
