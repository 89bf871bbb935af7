"""The match rule over what is where, in plain Python, and small tools for tests of loads and stores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from tests.core.reference.rules import Group
from tests.core.toy_engine import Entry, ToyEngine, digest
from tests.core.workshop import ids

from kvloom.core.fields import PINS
from kvloom.manager import Manager
from kvloom.plan import StoredObjects, TransferPlan
from kvloom.types import Grade

Tokens = tuple[int, ...]
Presence = dict[Tokens, dict[tuple[int, int], int]]
"""Tokens up to the end of a row -> the objects of that row and their grades."""


class Rules:
    """The match rule over presence sets, by trying every position."""

    def __init__(self, manager: Manager) -> None:
        self.segment = manager.spec.segment_tokens
        self.spec = manager.spec
        self.groups = [Group(manager.spec, g) for g in range(len(manager.spec.groups))]

    def row_end(self, row: int, position: int) -> int:
        """Where ``row`` of a chain that ends at ``position`` ends."""
        return min((row + 1) * self.segment, position)

    def needed(self, position: int) -> list[tuple[int, int, int]]:
        """(row, group, column) of everything that resuming at ``position`` needs."""
        found = []
        for group in self.groups:
            if group.snapshot:
                if group.snapshot_needed(position):
                    found.append(((position - 1) // self.segment, group.index, 0))
            else:
                found += [(b // group.columns, group.index, b % group.columns) for b in group.needed(position)]
        return found

    def grade(self, there: Presence, tokens: Tokens, position: int, place: tuple[int, int, int]) -> int:
        """The grade of one object of a boundary, -1 when it is not there."""
        row, group, column = place
        return there.get(tokens[: self.row_end(row, position)], {}).get((group, column), -1)

    def resumable(self, tokens: Tokens, position: int, floor: int, *theres: Presence) -> bool:
        """Whether every object is in one of the presence sets at ``floor`` or better."""
        return all(
            any(self.grade(there, tokens, position, place) >= floor for there in theres)
            for place in self.needed(position)
        )

    def best(self, tokens: Tokens, floor: int, positions: Iterable[int], *theres: Presence) -> int:
        """The deepest of ``positions`` that is resumable, or 0."""
        found = [p for p in positions if 0 < p <= len(tokens) and self.resumable(tokens, p, floor, *theres)]
        return max(found, default=0)

    def rows(self, tokens: Tokens) -> list[int]:
        """Where the rows of the chain of ``tokens`` end."""
        return sorted({*range(self.segment, len(tokens) + 1, self.segment), len(tokens)})

    def content(self, tokens: Tokens, position: int, place: tuple[int, int, int], grade: int) -> list[Entry]:
        """What an object holds."""
        row, g, column = place
        group, spec = self.groups[g], self.spec.groups[g]
        end = self.row_end(row, position)
        if group.snapshot:
            return [(digest(tokens[:end]), grade)]
        first = (row * group.columns + column) * spec.block_entries
        entries = range(first, first + spec.block_entries)
        return [
            (digest(tokens[: (e + 1) * spec.ratio]), grade) if (e + 1) * spec.ratio <= end else None for e in entries
        ]


def array(tokens: Iterable[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Tokens as the manager takes them."""
    return np.array(list(tokens), dtype=np.int32)


def stored_objects(items: Iterable[tuple[int, int, int, int]]) -> StoredObjects:
    """From (row, group, column, grade)."""
    columns = np.array(list(items), dtype=np.int32).reshape(-1, 4).T
    return StoredObjects(*(np.ascontiguousarray(column) for column in columns))


NOTHING = stored_objects([])


def all_of(manager: Manager, position: int, grade: Grade = Grade.CANONICAL) -> StoredObjects:
    """A tier that has all that a boundary needs."""
    return stored_objects([(*place, int(grade)) for place in Rules(manager).needed(position)])


def fill(e: ToyEngine, plan: TransferPlan, tokens: list[int]) -> None:
    """What a tier does: the right bytes in every slot."""
    rules = Rules(e.manager)
    for row, group, column, grade, slot in zip(
        *(x.tolist() for x in (plan.row, plan.group, plan.column, plan.grade, plan.slot)), strict=True
    ):
        content = rules.content(tuple(tokens), plan.position, (row, group, column), grade)
        e.arena.slots[(group, slot)] = content


def planned(e: ToyEngine, tokens: list[int], position: int, **options: Any) -> TransferPlan:
    plan = e.manager.colder.plan_load(ids(tokens), all_of(e.manager, position), **options)
    assert plan is not None
    assert plan.position == position
    return plan


def all_good(plan: TransferPlan) -> Any:
    return np.ones(len(plan), dtype=np.bool_)


def held(manager: Manager) -> int:
    return int((manager.arrays.slot[:, PINS] > 0).sum())
