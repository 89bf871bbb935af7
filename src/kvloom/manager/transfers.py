"""Loads from and stores to colder tiers: what to move, and what holds the slots meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvloom.core import restoring, sweep
from kvloom.core.arrays import Arrays
from kvloom.core.fields import BLOCK_TOKENS, COL_BASE, COLUMNS, RULE, RULE_PREFIX, RULE_SNAPSHOT, SLOT_BASE
from kvloom.core.restoring import GROUP, ITEM_COLUMNS, SLOT
from kvloom.errors import InputError
from kvloom.manager.inputs import checked_transfer
from kvloom.plan import StoredObjects, TransferPlan
from kvloom.types import AnyArray, Grade, Int32Array


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chain as the device knows it.

    Attributes:
        tokens: int32, all of it.
        path: int32: the root, then the nodes of whole segments, -1 for those that the device does not know.
        known: how many it knows.
        checkpoint: node of the shorter last row, or -1.
    """

    tokens: Int32Array
    path: Int32Array
    known: int
    checkpoint: int


@dataclass(frozen=True, slots=True)
class _Open:
    plan: TransferPlan
    items: AnyArray
    held: AnyArray  # of a load: what its boundary needs and the device has; of a store: what it reads
    path: Int32Array
    end: int  # of a load: the last node, anchored; -1 for a store

    @property
    def loads(self) -> bool:
        return self.end >= 0


_NO_PATH: Int32Array = np.empty(0, dtype=np.int32)


class Transfers:
    """The plans that were handed out and have not ended.

    Attributes:
        ignored: ends that were reported of plans that are not open.
        unkept: plans that were not made because there was no room.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._open: dict[int, _Open] = {}
        self._arriving: set[int] = set()
        self._last = 0
        self.ignored = self.unkept = 0

    # ---------------------------------------------------------------- planning

    def cold(self, rows: int, stored: StoredObjects) -> AnyArray:
        """The grades of ``stored`` as int8 [rows, columns], -1 for what is not there; InputError for odd ones."""
        a = self._arrays
        cold = np.full((rows, a.columns.shape[1]), -1, dtype=np.int8)
        shapes = {np.shape(part) for part in (stored.row, stored.group, stored.column, stored.grade)}
        if len(shapes) != 1 or len(shapes.pop()) != 1:
            raise InputError("the row, group, column and grade of stored objects must be arrays of one length")
        if len(stored.row):
            known = (stored.group >= 0) & (stored.group < len(a.group)) & (stored.row >= 0) & (stored.row < rows)
            known &= (stored.grade >= 0) & (stored.grade <= int(Grade.CANONICAL)) & (stored.column >= 0)
            if not known.all() or (stored.column >= a.group[stored.group, COLUMNS]).any():
                raise InputError("a colder tier names rows, groups, columns or grades that this model does not have")
            cold[stored.row, a.group[stored.group, COL_BASE] + stored.column] = stored.grade
        return cold

    def load(self, prompt: Prompt, cold: AnyArray, reused: int, floor: int) -> TransferPlan | None:
        """What to bring so that more than ``reused`` tokens can be resumed; None when nothing helps or has room."""
        a = self._arrays
        tail = len(prompt.tokens) % a.tokens.shape[1]
        position = int(restoring.reachable(a, prompt.path, prompt.checkpoint, cold, tail, floor))
        if position <= reused:
            return None
        segments = position // a.tokens.shape[1]
        checkpoint = prompt.checkpoint if position % a.tokens.shape[1] else -1
        items = np.empty((cold.size, ITEM_COLUMNS), dtype=np.int32)
        count = int(restoring.list_needed(a, prompt.path, checkpoint, cold, position, floor, False, items))
        if count == 0:  # chunked windows alone may need nothing
            return None
        items = items[:count].copy()
        held = np.empty((cold.size, 2), dtype=np.int32)
        known = min(prompt.known, segments)
        end = int(restoring.make_path(a, prompt.path, known, prompt.tokens, position))
        if end < 0:
            self.unkept += 1
            return None
        kept = int(restoring.hold_needed(a, prompt.path, end, position, floor, held))
        short = int(restoring.reserve_items(a, items, count, position))
        if short >= 0:
            restoring.release_all(a, held[:kept])
            restoring.let_go(a, end)
            self.unkept += 1
            return None
        return self._issue(position, items, held[:kept].copy(), prompt.path[: segments + 1].copy(), end)

    def below_floor(self, prompt: Prompt, cold: AnyArray, floor: int) -> list[tuple[int, int, bool]]:
        """Where a lower floor would resume further: per group the first object whose grade is too low for this one.

        (group, token position, whether it is the colder tier that has it), in the order of the groups.
        """
        a = self._arrays
        tail = len(prompt.tokens) % a.tokens.shape[1]
        lowest = int(Grade.APPROXIMATE)
        position = int(restoring.reachable(a, prompt.path, prompt.checkpoint, cold, tail, lowest))
        if position <= int(restoring.reachable(a, prompt.path, prompt.checkpoint, cold, tail, floor)):
            return []
        checkpoint = prompt.checkpoint if position % a.tokens.shape[1] else -1
        items = np.empty((cold.size, ITEM_COLUMNS), dtype=np.int32)
        count = int(restoring.list_needed(a, prompt.path, checkpoint, cold, position, floor, False, items))
        found: dict[int, tuple[int, int, bool]] = {}
        for row, g, column, _, grade in items[:count].tolist():
            if grade < floor and g not in found:
                begins = row * a.tokens.shape[1] + column * int(a.group[g, BLOCK_TOKENS])
                found[g] = (g, position if a.group[g, RULE] == RULE_SNAPSHOT else begins, grade >= lowest)
        return list(found.values())

    def replayable(self, cold: AnyArray, position: int, grade: Grade, floor: int) -> AnyArray:
        """Count the windows and tails that ``position`` needs and ``cold`` lacks as stored with ``grade``.

        Changes ``cold``; returns what was changed, bool [rows, columns].
        """
        a = self._arrays
        made = np.zeros(cold.shape, dtype=np.bool_)
        for g, group in enumerate(a.group):
            if group[RULE] != RULE_PREFIX:
                first, last = (int(block) for block in restoring.needed_blocks(a, g, position))
                blocks = np.arange(first, last)
                made[blocks // group[COLUMNS], group[COL_BASE] + blocks % group[COLUMNS]] = True
        made &= cold < floor
        cold[made] = int(grade)
        return made

    def prefix_slots(self, plan: TransferPlan) -> tuple[Int32Array, ...]:
        """For every group the slots, local to it, of the blocks [0, n) that the boundary of an open load needs.

        Empty for windows and snapshots.  They hold state only once the objects of ``plan`` have arrived.
        """
        opened = self._known(plan, loads=True)
        if opened is None:
            raise InputError("the load has ended, so its slots may be anybody's; ask while it is open")
        a, path = self._arrays, opened.path
        nodes = path[1:] if plan.position % a.tokens.shape[1] == 0 else np.append(path[1:], opened.end)
        found = []
        for g, group in enumerate(a.group):
            if group[RULE] != RULE_PREFIX:
                found.append(_NO_PATH)
                continue
            columns = np.arange(group[COL_BASE], group[COL_BASE] + group[COLUMNS])
            slots = np.ascontiguousarray(a.columns[nodes[:, None], columns[None, :]], dtype=np.int32).reshape(-1)
            mine = plan.group == g
            slots[plan.row[mine] * group[COLUMNS] + plan.column[mine]] = plan.slot[mine]
            found.append(slots[: int(restoring.needed_blocks(a, g, plan.position)[1])])
        return tuple(found)

    def store(self, prompt: Prompt, cold: AnyArray, floor: int) -> TransferPlan | None:
        """What the colder tier lacks of the unit of the deepest boundary that can be resumed at ``floor``, or None."""
        a = self._arrays
        tail = len(prompt.tokens) % a.tokens.shape[1]
        position = int(restoring.reachable(a, prompt.path, prompt.checkpoint, cold, tail, floor))
        checkpoint = prompt.checkpoint if position % a.tokens.shape[1] else -1
        items = np.empty((cold.size, ITEM_COLUMNS), dtype=np.int32)
        count = int(restoring.list_needed(a, prompt.path, checkpoint, cold, position, floor, True, items))
        if position == 0 or count == 0:
            return None
        items = items[:count].copy()
        held = items[:, [GROUP, SLOT]].copy()
        restoring.hold_all(a, held)
        return self._issue(position, items, held, _NO_PATH, -1)

    def units(self, prompt: Prompt, cold: AnyArray) -> tuple[TransferPlan, ...]:
        """``store`` for every grade, the best first; ``cold`` then counts what the plans before store, too."""
        plans = []
        for floor in (Grade.CANONICAL, Grade.FAITHFUL, Grade.APPROXIMATE):
            plan = self.store(prompt, cold, int(floor))
            if plan is not None:
                plans.append(plan)
                cold[plan.row, self._arrays.group[plan.group, COL_BASE] + plan.column] = plan.grade
        return tuple(plans)

    def _issue(self, position: int, items: AnyArray, held: AnyArray, path: Int32Array, end: int) -> TransferPlan:
        a = self._arrays
        self._last += 1
        row, group, column, slot, grade = np.ascontiguousarray(items.T)
        plan = TransferPlan(
            self._last, position, row, group, column, grade, slot - a.group[group, SLOT_BASE], self._needs(position)
        )
        self._open[self._last] = _Open(plan, items, held, path, end)
        return plan

    def _needs(self, position: int) -> Int32Array:
        a = self._arrays
        needs = []
        for g, group in enumerate(a.group):
            first, last = (int(block) for block in restoring.needed_blocks(a, g, position))
            if last > first:
                needs.append((g, first // group[COLUMNS], first % group[COLUMNS], last - first))
        return np.array(needs, dtype=np.int32).reshape(-1, 4)

    # ---------------------------------------------------------------- ending

    def begin_arriving(self, plan: TransferPlan) -> bool:
        """Publish the objects of a load before they are there; whether the plan was open and not published yet."""
        opened = self._known(checked_transfer(plan), loads=True)
        if opened is None or plan.ticket in self._arriving:
            self.ignored += 1
            return False
        segments = len(opened.path) - 1
        restoring.publish_arriving(self._arrays, opened.path, opened.end, segments, opened.items)
        self._arriving.add(plan.ticket)
        return True

    def withdraw(self, plan: TransferPlan, good: AnyArray) -> int:
        """Quarantine what of a published load is not ``good`` (bool [n]); its slots stay held.  Returns how many."""
        _check_good(plan, good)
        opened = self._known(plan, loads=True)
        if opened is None or plan.ticket not in self._arriving:
            self.ignored += 1
            return 0
        return self._withdraw(opened, good)

    def finish_load(self, plan: TransferPlan, good: AnyArray) -> int:
        """Publish the objects that arrived: ``good`` bool [n]; none when the load was given up.

        Returns how many were taken back that had been published before.
        """
        _check_good(plan, good)
        opened = self._take(plan, loads=True)
        if opened is None:
            return 0
        taken_back = 0
        if plan.ticket in self._arriving:
            self._arriving.discard(plan.ticket)
            taken_back = self._withdraw(opened, good)
            restoring.release_all(self._arrays, np.ascontiguousarray(opened.items[:, [GROUP, SLOT]]))
        else:
            segments = len(opened.path) - 1
            restoring.finish_load(self._arrays, opened.path, opened.end, segments, opened.items, good)
        restoring.release_all(self._arrays, opened.held)
        restoring.let_go(self._arrays, opened.end)
        return taken_back

    def _withdraw(self, opened: _Open, good: AnyArray) -> int:
        count = int(restoring.withdraw_items(self._arrays, opened.items, good))
        if count:
            sweep.reconsider_all(self._arrays)
        return count

    def finish_store(self, plan: TransferPlan) -> None:
        """The objects were stored, or will not be."""
        opened = self._take(checked_transfer(plan), loads=False)
        if opened is not None:
            restoring.release_all(self._arrays, opened.held)

    def _known(self, plan: TransferPlan, *, loads: bool) -> _Open | None:
        opened = self._open.get(plan.ticket)
        if opened is not None and (opened.plan is not plan or opened.loads is not loads):
            raise InputError(
                "the plan is another manager's, a copy, or of the other direction; hand back what was given"
            )
        return opened

    def _take(self, plan: TransferPlan, *, loads: bool) -> _Open | None:
        if self._known(plan, loads=loads) is None:
            self.ignored += 1
            return None
        return self._open.pop(plan.ticket)

    # ---------------------------------------------------------------- looking

    def holds(self) -> list[tuple[int, int]]:
        """Every (group, global slot) hold, for the integrity check."""
        found = []
        for opened in self._open.values():
            found += opened.held.tolist() + (opened.items[:, [GROUP, SLOT]].tolist() if opened.loads else [])
        return [(group, slot) for group, slot in found]

    def nodes(self) -> list[int]:
        """Every node that a load anchors, for the integrity check."""
        return [opened.end for opened in self._open.values() if opened.end >= 0]

    def on_the_way(self, node: int) -> bool:
        """Whether ``node`` lies on the path of a load whose objects are published and not all there."""
        opened = (self._open[ticket] for ticket in self._arriving)
        return any(node == each.end or node in each.path for each in opened)

    def __len__(self) -> int:
        return len(self._open)


def _check_good(plan: TransferPlan, good: AnyArray) -> None:
    if np.shape(good) != (len(checked_transfer(plan)),):
        raise InputError(f"good must be bool of shape ({len(plan)},), not of shape {np.shape(good)}")
