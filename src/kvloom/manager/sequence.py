"""A running sequence: its lease on a cached prefix, its own slots, and what it publishes as it grows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvloom.core.arrays import HITS, RULE_SNAPSHOT, RULE_WINDOW, UNKEPT, Arrays
from kvloom.core.block_pool import hold
from kvloom.core.page_table import (
    Rows,
    checkpoint_complete,
    checkpoint_lacks_room,
    commit_segment,
    fork_lacks_room,
    grow,
    lease,
    lease_lacks_room,
    mark_computed,
    release_row,
    republish,
    reserve_sealed,
    reserve_snapshots,
    share_row,
    shrink,
    slot_at,
    stale,
)
from kvloom.core.prefix_index import add_weight, drop_weight, find_checkpoint, new_node
from kvloom.core.rules import blocks_at, first_block_needed, snapshot_needed
from kvloom.errors import SequenceError, StaleLeaseError
from kvloom.manager.leasing import NoSlot, own_checkpoint_blocks, take, take_live
from kvloom.manager.ranges import TokenRange, token_ranges
from kvloom.manager.tickets import Copy, Publication
from kvloom.plan import CopyPlan, Explanation
from kvloom.types import AnyArray, Grade, Int32Array

if TYPE_CHECKING:
    from kvloom.manager.manager import Manager
    from kvloom.verify.hit import VerifiedHit


class CachedSequence:
    """One sequence.  Made by ``Manager.open`` and ``fork``; belongs to the manager's thread.

    Order of use: run ``restore`` and complete it; then, per forward, ``append`` -> compute -> ``commit`` (or
    ``rollback``), executing and completing the plans they return; ``close`` at the end.

    Attributes:
        reused: leading tokens that need no compute.
        length: tokens whose state is computed.
        grade: worst grade of the state so far; CANONICAL while nothing was computed or reused.
        floor: worst grade the request accepts.
        restore: copies to run before the first append.
        explanation: what the lookup found and what stopped it.
        node: deepest index node this sequence has published or reused.
        row: its row of the block tables.
    """

    def __init__(
        self,
        manager: Manager,
        row: int,
        tokens: Int32Array,
        length: int,
        node: int,
        grade: Grade,
        floor: Grade,
        explanation: Explanation,
    ) -> None:
        self._manager = manager
        self.row = row
        self._tokens = np.empty(max(256, 2 * len(tokens)), dtype=np.int32)
        self._tokens[: len(tokens)] = tokens
        self._pending = 0
        self._broken = False
        self._closed = False
        self._detached = False
        self._committed = length // manager.spec.segment_tokens
        self.reused = length
        self.length = length
        self.node = node
        self.grade = grade
        self.floor = floor
        self.restore = CopyPlan(ticket=0)
        self.explanation = replace(explanation, grade=grade) if length else explanation
        add_weight(manager.arrays, node)

    # ---------------------------------------------------------------- opening

    @classmethod
    def lease(
        cls, manager: Manager, row: int, hit: VerifiedHit, prompt: Int32Array, floor: Grade, explanation: Explanation
    ) -> CachedSequence:
        """Hold everything ``hit`` needs and take the live slots; CapacityError leaves everything as it was."""
        a, r = manager.arrays, manager.rows
        worst = int(lease(a, r, row, hit.path, hit.depth, hit.checkpoint, hit.position))
        end = hit.checkpoint if hit.checkpoint >= 0 else int(hit.path[hit.depth])
        snapshots = {
            g: manager.arrays.slot_base[g] + a.columns[end, a.col_base[g]]
            for g in range(len(a.rule))
            if a.rule[g] == RULE_SNAPSHOT and snapshot_needed(a, g, hit.position)
        }
        for g, source in snapshots.items():
            hold(a, g, source)
            a.counters[g, HITS] += 1
            worst = min(worst, int(a.grade[source]))
        replaced: list[tuple[int, int]] = []
        try:
            full = int(lease_lacks_room(a, r, row, hit.depth * a.tokens.shape[1] if hit.checkpoint >= 0 else -1))
            if full >= 0:
                raise NoSlot(full)
            copies = take_live(manager, row, snapshots)
            sealed, ready = own_checkpoint_blocks(manager, row, hit, replaced)
        except BaseException as error:
            manager.release_slots(replaced)
            release_row(a, r, row)
            manager.release_slots(list(snapshots.items()))
            if isinstance(error, NoSlot):
                raise manager.no_room(error.group, len(prompt), "open") from None
            raise
        sequence = cls(
            manager,
            row,
            prompt[: hit.position],
            hit.position,
            int(hit.path[hit.depth]),
            Grade(worst),
            floor,
            explanation,
        )
        sequence.restore = manager.tickets.issue(copies + sealed, ready=ready)
        manager.release_slots(replaced)
        manager.release_slots(list(snapshots.items()))
        return sequence

    # ---------------------------------------------------------------- growing

    def append(self, token_ids: AnyArray) -> CopyPlan:
        """Reserve the slots that the next forward of ``token_ids`` writes.

        Returns the copies to run before it (none today).  Raises CapacityError, InputError or
        SequenceError and then leaves everything as it was.
        """
        manager = self._usable()
        if self._pending:
            raise SequenceError("the last append was neither committed nor rolled back")
        ids = manager.checked_tokens(token_ids, self.length)
        manager.tick()
        full = int(grow(manager.arrays, manager.rows, self.row, self.length, len(ids)))
        if full >= 0:
            raise manager.no_room(full, self.length + len(ids), f"append {len(ids)} tokens after {self.length}")
        self._remember(ids)
        self._pending = len(ids)
        return CopyPlan(ticket=0)

    def commit(self, grade: Grade = Grade.CANONICAL) -> CopyPlan:
        """The appended tokens were computed: publish every segment that they complete.

        ``grade`` is the best the engine can claim.  The state is CANONICAL only if the append was exactly one
        segment from a segment boundary on canonical state; otherwise it is at most FAITHFUL.

        Returns the snapshot copies of the boundary; its unit is resumable once they are completed.
        """
        manager = self._usable()
        if not self._pending:
            raise SequenceError("nothing was appended since the last commit")
        segment = manager.spec.segment_tokens
        whole = self.length % segment == 0 and self._pending == segment
        effective = min(grade, self.grade, Grade.CANONICAL if whole else Grade.FAITHFUL)
        a, r = manager.arrays, manager.rows
        manager.tick()
        mark_computed(a, r, self.row, self.length, self._pending, int(effective))
        self.length += self._pending
        self.grade = Grade(effective)
        self._pending = 0
        self._publish_segments()
        plan = CopyPlan(ticket=0)
        if not self._detached and self.length == self._committed * segment:
            plan = self._snapshot(self.node, asked=False)
        for g in range(len(a.rule)):
            if a.rule[g] == RULE_WINDOW:
                shrink(a, r, self.row, g, int(first_block_needed(a, g, self.length)), int(r.last[self.row, g]))
        return plan

    def rollback(self) -> None:
        """The appended tokens were not computed: give their slots back.

        State that the engine updates in place (tail, recurrent) may be half written, so a sequence that has any
        can only be closed afterwards.
        """
        manager = self._usable()
        if not self._pending:
            raise SequenceError("nothing was appended since the last commit")
        a, r = manager.arrays, manager.rows
        self._pending = 0
        for g in range(len(a.rule)):
            if a.rule[g] == RULE_SNAPSHOT:
                self._broken = True
            else:
                first = int(r.first[self.row, g])
                shrink(a, r, self.row, g, first, max(first, int(blocks_at(a, g, self.length))))

    def checkpoint(self) -> CopyPlan:
        """Keep the exact present end resumable: sealed copies of part-filled blocks, and snapshots.

        Best effort: when there is no room the plan is empty and the pool's ``unkept`` counter grows.
        """
        manager = self._usable()
        if self._pending:
            raise SequenceError("commit or roll back the last append before a checkpoint")
        if self._detached or self.length == 0:
            return CopyPlan(ticket=0)
        manager.tick()
        republish(manager.arrays, manager.rows, self.row, self.node)
        start = self._committed * manager.spec.segment_tokens
        if self.length == start:
            return self._snapshot(self.node, asked=True)
        return self._seal(start)

    def fork(self) -> tuple[CachedSequence, CopyPlan]:
        """A second sequence with the same past.

        Blocks of published segments are shared; those of the segment that is being filled, which either may publish
        with another ending, and the live state are copied.  Complete the returned plan before the child's first
        append (it is also ``child.restore``).
        """
        manager = self._usable()
        if self._pending:
            raise SequenceError("commit or roll back the last append before a fork")
        manager.tick()
        child = manager.adopt_fork(self._fork_into)
        return child, child.restore

    def close(self) -> None:
        """Release everything.  Closing twice is harmless."""
        if self._closed:
            return
        manager = self._manager
        manager.enter()
        manager.tick()
        self._closed = True
        if not self._broken:
            republish(manager.arrays, manager.rows, self.row, self.node)
        release_row(manager.arrays, manager.rows, self.row)
        drop_weight(manager.arrays, self.node)
        manager.retire(self.row)

    def plan_abandoned(self, ticket: int) -> None:
        """Told by the manager that plan ``ticket`` will not be executed: without its restore the sequence is broken."""
        self._broken = self._broken or ticket == self.restore.ticket

    def distrust(self, failed: AnyArray) -> None:
        """Told by the manager which slots failed a check (bool, global slots): who reads one of them is broken."""
        a, r = self._manager.arrays, self._manager.rows
        reads = self._manager.tickets.slots(self.restore.ticket)
        for g in range(len(a.rule)):
            blocks = range(int(r.first[self.row, g]), int(r.last[self.row, g]))
            reads += [int(slot_at(a, r, self.row, g, block)) for block in blocks]
        self._broken = self._broken or bool(failed[np.array(reads, dtype=np.int64)].any())

    # ---------------------------------------------------------------- reading

    def block_table(self, group: int) -> Int32Array:
        """int32 view of the row: entry ``i % len`` is the slot of logical block ``i``.  Address stable for life."""
        r = self._usable().rows
        table: Int32Array = r.table[self.row, r.offset[group] : r.offset[group] + r.width[group]]
        return table

    def first_block(self, group: int) -> int:
        """First logical block still held (0 except for windows)."""
        return int(self._usable().rows.first[self.row, group])

    def num_blocks(self, group: int) -> int:
        """One past the last logical block reserved."""
        return int(self._usable().rows.last[self.row, group])

    def live_slot(self, group: int) -> int:
        """The slot that the engine updates in place (snapshot groups)."""
        return int(self.block_table(group)[0])

    def ranges(self) -> tuple[TokenRange, ...]:
        """Form, grade and life-cycle state of every token range that this sequence holds, per group."""
        return token_ranges(self, self._usable().spec.groups)

    def books(self) -> tuple[Arrays, Rows]:
        """The core's arrays and rows, to read only."""
        return self._manager.arrays, self._manager.rows

    @property
    def tokens(self) -> Int32Array:
        """The ids of the computed tokens, int32 [length] (a read-only view: what is published is named by them)."""
        view = self._tokens[: self.length]
        view.flags.writeable = False
        return view

    @property
    def broken(self) -> bool:
        """True when the state is not whole: half written, never restored, or read from a quarantined object."""
        return self._broken

    @property
    def closed(self) -> bool:
        """True once closed."""
        return self._closed

    def check(self) -> None:
        """Raise StaleLeaseError if a slot this sequence holds was freed or reused since it took it."""
        manager = self._usable()
        g = int(stale(manager.arrays, manager.rows, self.row))
        if g >= 0:
            raise StaleLeaseError(
                f"a slot of group {manager.spec.groups[g].name!r} changed its generation under this sequence; "
                "its lease is void, close it and open the prompt again",
                group=manager.spec.groups[g].name,
            )

    # ---------------------------------------------------------------- parts

    def _usable(self) -> Manager:
        self._manager.enter()
        if self._closed:
            raise SequenceError("the sequence is closed; open the prompt again")
        if self._broken:
            raise SequenceError(
                "the state cannot be trusted: a forward failed half-way, the restore was abandoned, or an object that "
                "it reads failed a check; close the sequence and open the prompt again"
            )
        if self._manager.tickets.is_open(self.restore.ticket):
            raise SequenceError("the restore plan was not completed; run it and call Manager.complete first")
        return self._manager

    def _remember(self, ids: Int32Array) -> None:
        end = self.length + len(ids)
        if end > len(self._tokens):
            larger = np.empty(2 * end, dtype=np.int32)
            larger[: self.length] = self._tokens[: self.length]
            self._tokens = larger
        self._tokens[self.length : end] = ids

    def _publish_segments(self) -> None:
        manager = self._manager
        segment = manager.spec.segment_tokens
        while not self._detached and (self._committed + 1) * segment <= self.length:
            start = self._committed * segment
            arguments = (manager.arrays, manager.rows, self.row, self.node, self._tokens, start)
            node = int(commit_segment(*arguments))
            if node < 0 and manager.make_node_room():
                node = int(commit_segment(*arguments))
            if node < 0:
                self._detached = True
                break
            drop_weight(manager.arrays, self.node)
            self.node = node
            self._committed += 1

    def _reserved_snapshots(self, node: int, *, asked: bool) -> tuple[list[Copy], list[Publication]] | None:
        """Copies of the live slots into slots for ``node``; None when there is no room."""
        manager = self._manager
        a = manager.arrays
        out = np.empty(len(a.rule), dtype=np.int64)
        arguments = (a, manager.rows, self.row, node, self.length, asked, int(self.grade), out)
        if int(reserve_snapshots(*arguments)) >= 0:
            return None
        copies, publish = [], []
        for g in np.flatnonzero(out >= 0).tolist():
            live = int(slot_at(a, manager.rows, self.row, g, 0))
            copies.append(Copy(g, live, int(out[g])))
            publish.append(Publication(node, int(a.col_base[g]), g, int(out[g])))
        return copies, publish

    def _snapshot(self, node: int, *, asked: bool) -> CopyPlan:
        found = self._reserved_snapshots(node, asked=asked)
        if found is None or not found[0]:
            return CopyPlan(ticket=0)
        add_weight(self._manager.arrays, node)
        return self._manager.tickets.issue(found[0], publish=found[1], node=node)

    def _seal(self, start: int) -> CopyPlan:
        manager = self._manager
        a, r = manager.arrays, manager.rows
        count = self.length - start
        node = int(find_checkpoint(a, self.node, self._tokens, start, count))
        if node >= 0:
            if checkpoint_complete(a, node, start, self.length, int(self.grade)):
                return CopyPlan(ticket=0)
            add_weight(a, node)
        else:
            node = int(new_node(a, self.node, self._tokens, start, count))
            if node < 0 and manager.make_node_room():
                node = int(new_node(a, self.node, self._tokens, start, count))
            if node < 0:
                return CopyPlan(ticket=0)
        full = int(checkpoint_lacks_room(a, node, start, self.length, int(self.grade)))
        if full >= 0:
            a.counters[full, UNKEPT] += 1
            drop_weight(a, node)
            return CopyPlan(ticket=0)
        sealed = np.empty((a.columns.shape[1], 4), dtype=np.int64)
        blocks = int(reserve_sealed(a, r, self.row, start, self.length, sealed))
        snapshots = self._reserved_snapshots(node, asked=True) if blocks >= 0 else None
        if snapshots is None:
            manager.release_slots([(g, s) for g, _, _, s in sealed[: max(blocks, 0)].tolist()])
            drop_weight(a, node)
            return CopyPlan(ticket=0)
        copies, publish = snapshots
        for g, block, source, target in sealed[:blocks].tolist():
            per_block = manager.spec.groups[g].block_entries
            left = self.length // int(a.ratio[g]) - block * per_block
            copies.append(Copy(g, source, target, left if left < per_block else -1))
            column = int(a.col_base[g]) + block - start // int(a.block_tokens[g])
            publish.append(Publication(node, column, g, target))
        return manager.tickets.issue(copies, publish=publish, node=node)

    def _fork_into(self, row: int) -> CachedSequence:
        manager = self._manager
        a, r = manager.arrays, manager.rows
        # a block can only be published below one node, so an unpublished one is not shared
        share_row(a, r, self.row, row, self.length if self._detached else self._committed * manager.spec.segment_tokens)
        copies, ready = [], []
        try:
            full = int(fork_lacks_room(a, r, self.row, row))
            if full >= 0:
                raise NoSlot(full)
            for g in range(len(a.rule)):
                for block in range(int(r.last[row, g]), int(r.last[self.row, g])):
                    source = int(slot_at(a, r, self.row, g, block))
                    own = take(manager, row, g, block)
                    a.grade[own] = a.grade[source]
                    copies.append(Copy(g, source, own))
                    if a.rule[g] != RULE_SNAPSHOT and (block + 1) * int(a.block_tokens[g]) <= self.length:
                        ready.append(own)
        except BaseException as error:
            release_row(a, r, row)
            if isinstance(error, NoSlot):
                raise manager.no_room(error.group, self.length, "fork") from None
            raise
        child = CachedSequence(
            manager, row, self.tokens, self.length, self.node, self.grade, self.floor, self.explanation
        )
        child._committed, child._detached = self._committed, self._detached
        child.restore = manager.tickets.issue(copies, ready=ready)
        return child
