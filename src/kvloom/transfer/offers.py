"""What all cold tiers together have of a chain: of every object the copy in the nearest tier that is good enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvloom.plan import StoredObjects, TransferPlan
from kvloom.tiers.values import Places
from kvloom.transfer.parts import Parts
from kvloom.types import AnyArray, Grade, Int32Array, IntArray, PayloadForm


@dataclass(frozen=True, slots=True)
class Whole:
    """The objects of which one tier has all parts, at one grade.

    Attributes:
        stored: as the manager takes them.
        places: of their parts, those of an object one after the other.
        first: int64 ``[n]``, where the parts of every object begin in ``places``.
    """

    stored: StoredObjects
    places: Places
    first: IntArray


@dataclass(frozen=True, slots=True)
class Offer:
    """Attributes:
    stored: the objects, as the manager takes them.
    tier: int32 ``[n]``, index of the tier that has the copy.
    index: int64 ``[n]``, the first of its parts among the places of that tier.
    places: of every tier.
    """

    stored: StoredObjects
    tier: Int32Array
    index: IntArray
    places: tuple[Places | None, ...]

    def __len__(self) -> int:
        return len(self.tier)

    def of_plan(self, plan: TransferPlan) -> tuple[Int32Array, IntArray]:
        """For every object of ``plan`` its tier, -1 for none, and its first part among the places of that tier."""
        own = _keys(self.stored.row, self.stored.group, self.stored.column)
        if not len(own):
            return np.full(len(plan), -1, dtype=np.int32), np.zeros(len(plan), dtype=np.int64)
        asked, order = _keys(plan.row, plan.group, plan.column), np.argsort(own, kind="stable")
        at = order[np.minimum(np.searchsorted(own[order], asked), len(own) - 1)]
        there = own[at] == asked
        return np.where(there, self.tier[at], np.int32(-1)), np.where(there, self.index[at], 0)


def whole_objects(places: Places, parts: Parts) -> Whole:
    """The objects that ``places`` (which fit the model) have all parts of."""
    entries = places.entries
    group, column = entries["group"].astype(np.int64), entries["column"].astype(np.int64)
    count = parts.count[group]
    if parts.whole:
        order = np.arange(len(entries))
        first: IntArray = order
    else:
        order = np.lexsort((column, entries["grade"], column // count, group, places.rows))
        key = np.stack([places.rows, group, column // count, entries["grade"].astype(np.int64)])[:, order]
        begins = np.flatnonzero(np.append(True, (key[:, 1:] != key[:, :-1]).any(axis=0))) if len(order) else order
        lengths = np.diff(np.append(begins, len(order)))
        expected = np.arange(len(order)) - np.repeat(begins, lengths)
        odd = np.append(0, np.cumsum((column % count)[order] != expected))
        first = begins[(lengths == count[order][begins]) & (odd[begins + lengths] == odd[begins])]
    at = order[first]
    columns = (places.rows[at], group[at], (column // count)[at], entries["grade"][at])
    stored = StoredObjects(*(np.ascontiguousarray(each, dtype=np.int32) for each in columns))
    return Whole(stored, places.take(order), first.astype(np.int64))


def make_offer(found: Sequence[Places | None], floor: Grade, parts: Parts) -> Offer:
    """Of places in several tiers, nearest first, the first copy of every object that is ``floor`` or better."""
    made: list[tuple[AnyArray, AnyArray, AnyArray, AnyArray, AnyArray, AnyArray]] = []
    places: list[Places | None] = []
    for tier, each in enumerate(found):
        if each is None:
            places.append(None)
            continue
        whole = whole_objects(each, parts)
        places.append(whole.places)
        stored, good = whole.stored, np.flatnonzero(whole.stored.grade >= int(floor))
        columns = (stored.row[good], stored.group[good], stored.column[good], stored.grade[good])
        made.append((*columns, np.full(len(good), tier, np.int32), whole.first[good]))
    if not made:
        return Offer(no_objects(), np.empty(0, np.int32), np.empty(0, np.int64), tuple(places))
    row, group, column, grade, which, index = (np.concatenate(each) for each in zip(*made, strict=True))
    _, once = np.unique(_keys(row, group, column), return_index=True)
    objects = StoredObjects(*(np.ascontiguousarray(each[once], np.int32) for each in (row, group, column, grade)))
    return Offer(objects, which[once], index[once].astype(np.int64), tuple(places))


def objects_of(places: Places | None, parts: Parts) -> StoredObjects:
    """All that one tier has, as the manager takes it."""
    return no_objects() if places is None else whole_objects(places, parts).stored


def kept_of(places: Places, parts: Parts, *, exact: bool) -> StoredObjects:
    """The same for a store: what is there as fp8 is not to be written again, unless ``exact`` state is wanted."""
    if exact:
        return objects_of(places, parts)
    entries = places.entries.copy()
    entries["grade"][entries["form"] == PayloadForm.FP8] = int(Grade.CANONICAL)
    return objects_of(replace(places, entries=entries), parts)


def lacking(stored: StoredObjects, plan: TransferPlan) -> TransferPlan:
    """``plan`` without the objects of which ``stored`` has a copy that is as good."""
    own = _keys_of(stored)
    order = np.lexsort((stored.grade, own))
    if not len(own):
        return plan
    asked = _keys_of(plan)
    at = np.maximum(np.searchsorted(own[order], asked, side="right") - 1, 0)  # of several copies the best
    there = (own[order][at] == asked) & (stored.grade[order][at] >= plan.grade)
    names = ("row", "group", "column", "grade", "slot")
    return replace(plan, **{name: getattr(plan, name)[~there] for name in names})


def no_objects() -> StoredObjects:
    """Nothing."""
    return StoredObjects(*(np.empty(0, dtype=np.int32) for _ in range(4)))


def _keys_of(objects: StoredObjects | TransferPlan) -> IntArray:
    return _keys(objects.row, objects.group, objects.column)


def _keys(row: AnyArray, group: AnyArray, column: AnyArray) -> IntArray:
    """One number for every object: 31 bits of row, 12 of group, 20 of column."""
    made: IntArray = (row.astype(np.int64) << 32) | (group.astype(np.int64) << 20) | column.astype(np.int64)
    return made
