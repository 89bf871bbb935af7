"""A running sequence: its lease on a cached prefix, its own slots, and what it publishes as it grows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvloom.core.calls import close_row, commit_tokens, reserve_again, reserve_tokens
from kvloom.core.fields import NTOKENS, PARENT, RULE, RULE_SNAPSHOT
from kvloom.core.page_table import (
    DETACHED,
    FIRST,
    LAST,
    LENGTH,
    NODE,
    OFFSET,
    PENDING,
    PUBLISHED,
    SHARED,
    STATE_GRADE,
    STEPPED,
    WIDTH,
    shrink,
    shrink_windows,
    slot_at,
    stale,
)
from kvloom.core.progress import publish
from kvloom.core.rules import blocks_at
from kvloom.errors import InputError, SequenceError, StaleLeaseError
from kvloom.manager.books import Books
from kvloom.manager.inputs import grade_of
from kvloom.manager.keeping import keep_end, keep_snapshots
from kvloom.manager.leasing import take_fork
from kvloom.manager.ranges import TokenRange, token_ranges
from kvloom.manager.single import Single
from kvloom.manager.tickets import NOTHING
from kvloom.plan import CopyPlan, Explanation
from kvloom.types import AnyArray, Grade, Int32Array

_NO_IDS: Int32Array = np.empty(0, dtype=np.int32)


class CachedSequence(Single):
    """One sequence.  Made by ``Manager.open`` and ``fork``; belongs to the manager's thread.

    Order of use: run ``restore`` and complete it; then, per forward, ``append`` -> compute -> ``commit`` (or
    ``rollback``), executing and completing the plans they return; ``close`` at the end.

    Attributes:
        reused: leading tokens that need no compute.
        floor: worst grade the request accepts.
        restore: copies to run before the first append.
        explanation: what the lookup found and what stopped it.
        row: its row of the block tables.
    """

    def __init__(
        self, books: Books, row: int, floor: Grade, explanation: Explanation, reused: int, restore: CopyPlan
    ) -> None:
        """``row`` holds what the sequence has already; see ``leasing``."""
        self._books = books
        self._ids: Int32Array = _NO_IDS
        self._broken = False
        self._closed = False
        self._loose: list[Int32Array] = []
        self._last_length, self._last_grade = reused, Grade.CANONICAL
        self.row = row
        self.reused = reused
        self.floor = floor
        self.restore = restore
        self.explanation = explanation

    # ---------------------------------------------------------------- growing

    def append(self, token_ids: AnyArray) -> CopyPlan:
        """Reserve the slots that the next forward of ``token_ids`` writes.

        Returns the copies to run before it (none today).  Raises CapacityError, InputError or
        SequenceError and then leaves everything as it was.
        """
        books = self._usable()
        r = books.rows
        if r.state[self.row, PENDING]:
            raise SequenceError("the last append was neither committed nor rolled back")
        length = int(r.state[self.row, LENGTH])
        ids = books.ids.checked(token_ids, length)
        full = reserve_tokens(books.handle, self.row, len(ids))
        if full >= 0 and books.roster.collect():
            full = reserve_again(books.handle, self.row, len(ids))
        if full >= 0:
            raise books.capacity.no_room(full, length + len(ids), f"append {len(ids)} tokens after {length}")
        self._ids = books.buffers.copy(ids)  # the caller may use its buffer again before the commit
        return NOTHING

    def commit(self, grade: Grade = Grade.CANONICAL) -> CopyPlan:
        """The appended tokens were computed: publish every segment that they complete.

        ``grade`` is the best the engine can claim.  The state is CANONICAL only if the append was exactly one
        segment from a segment boundary on canonical state; otherwise it is at most FAITHFUL.

        Returns the snapshot copies of the boundary; its unit is resumable once they are completed.
        """
        books = self._usable()
        r = books.rows
        if not r.state[self.row, PENDING]:
            raise SequenceError("nothing was appended since the last commit")
        if r.state[self.row, STEPPED]:
            raise SequenceError("the last token was reserved by a batch; finish the batch instead")
        if type(grade) is not Grade:
            grade = grade_of(grade, "grade")
        ids = self._ids
        used = commit_tokens(books.handle, self.row, ids, grade.value)
        self._ids = _NO_IDS  # not before: an interrupted commit may be called again
        if used < len(ids):
            self._publish_rest(ids, used)
        elif r.state[self.row, DETACHED]:
            self._loose.append(ids.copy())
        books.buffers.give(ids)
        if books.snapshot_groups and not r.state[self.row, DETACHED]:
            length, published = int(r.state[self.row, LENGTH]), int(r.state[self.row, PUBLISHED])
            if length == published * books.spec.segment_tokens:
                return keep_snapshots(books, self.row, asked=False)
        return NOTHING

    def rollback(self) -> None:
        """The appended tokens were not computed: give their slots back.

        State that the engine updates in place (tail, recurrent) may be half written, so a sequence that has any
        can only be closed afterwards.
        """
        books = self._usable()
        a, r = books.arrays, books.rows
        if not r.state[self.row, PENDING]:
            raise SequenceError("nothing was appended since the last commit")
        r.state[self.row, [PENDING, STEPPED]] = 0
        for g in range(len(a.group)):
            if a.group[g, RULE] == RULE_SNAPSHOT:
                self._break()
            else:
                first = int(r.span[self.row, g, FIRST])
                shrink(a, r, self.row, g, first, max(first, int(blocks_at(a, g, self.length))))

    def checkpoint(self) -> CopyPlan:
        """Keep the exact present end resumable: sealed copies of part-filled blocks, and snapshots.

        Best effort: when there is no room the plan is empty and the pool's ``unkept`` counter grows.
        """
        books = self._usable()
        state = books.rows.state[self.row]
        if state[PENDING]:
            raise SequenceError("commit or roll back the last append before a checkpoint")
        if state[DETACHED] or state[LENGTH] == 0:
            return NOTHING
        books.tick()
        return keep_end(books, self.row)

    def fork(self) -> tuple[CachedSequence, CopyPlan]:
        """A second sequence with the same past.

        Blocks of published segments are shared; those of the segment that is being filled, which either may publish
        with another ending, and the live state are copied.  Complete the returned plan before the child's first
        append (it is also ``child.restore``).
        """
        books = self._usable()
        if books.rows.state[self.row, PENDING]:
            raise SequenceError("commit or roll back the last append before a fork")
        books.tick()
        child = books.start(self._fork_into)
        return child, child.restore

    def close(self) -> None:
        """Release everything.  Closing twice is harmless."""
        if self._closed:
            return
        books = self._books
        books.enter()
        self._last_length, self._last_grade = self.length, self.grade
        close_row(books.handle, self.row, not self._broken)
        books.roster.retire(self.row)
        self._closed = True  # not before: an interrupted close may be called again

    # ---------------------------------------------------------------- reading

    def block_table(self, group: int) -> Int32Array:
        """int32 view of the row: entry ``i % len`` is the slot of logical block ``i``.  Address stable for life.

        InputError for a group index that the model does not have (also in the other methods that take one).
        """
        r, group = self._usable().rows, self._known(group)
        first = r.shape[group, OFFSET]
        table: Int32Array = r.table[self.row, first : first + r.shape[group, WIDTH]]
        return table

    def first_block(self, group: int) -> int:
        """First logical block still held (0 except for windows)."""
        return int(self._usable().rows.span[self.row, self._known(group), FIRST])

    def num_blocks(self, group: int) -> int:
        """One past the last logical block reserved."""
        return int(self._usable().rows.span[self.row, self._known(group), LAST])

    def live_slot(self, group: int) -> int:
        """The slot that the engine updates in place (snapshot groups)."""
        return int(self.block_table(group)[0])

    def ranges(self) -> tuple[TokenRange, ...]:
        """Form, grade and life-cycle state of every token range that this sequence holds, per group."""
        return token_ranges(self._usable(), self.row)

    def published_blocks(self, group: int) -> int:
        """Leading logical blocks that belong to the index (0 for windows and snapshots).

        When a commit publishes a block that the index has already, the row takes over the index's slot for it, so block
        table entries below this bound may have changed since the commit before.
        """
        return int(self._usable().rows.span[self.row, self._known(group), SHARED])

    @property
    def length(self) -> int:
        """Tokens whose state is computed."""
        return int(self._books.rows.state[self.row, LENGTH]) if not self._closed else self._last_length

    @property
    def grade(self) -> Grade:
        """Worst grade of the state so far; CANONICAL while nothing was computed or reused."""
        return Grade(int(self._books.rows.state[self.row, STATE_GRADE])) if not self._closed else self._last_grade

    @property
    def node(self) -> int:
        """Deepest index node that this sequence has published or reused."""
        return int(self._books.rows.state[self.row, NODE])

    @property
    def tokens(self) -> Int32Array:
        """The ids of the computed tokens, int32 [length] (a read-only copy: what is published is named by them).

        Raises SequenceError once closed, and when the index was full and a batch went on, since nobody kept the ids
        then.
        """
        if self._closed:
            raise SequenceError("the sequence is closed; its ids are gone")
        a, state = self._books.arrays, self._books.rows.state[self.row]
        parts = []
        n = int(state[NODE])
        while a.trunk[n, NTOKENS] > 0:
            parts.append(a.tokens[n])
            n = int(a.trunk[n, PARENT])
        left = int(state[LENGTH]) - len(parts) * self._books.spec.segment_tokens
        if state[DETACHED] and sum(map(len, self._loose)) != left:
            raise SequenceError("the index was full, so the ids of this sequence were not kept")
        end = self._loose if state[DETACHED] else [self._books.rows.tail[self.row, :left]]
        ids: Int32Array = np.concatenate([*parts[::-1], *end])
        ids.flags.writeable = False
        return ids

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
        books = self._usable()
        g = int(stale(books.arrays, books.rows, self.row))
        if g >= 0:
            raise StaleLeaseError(
                f"a slot of group {books.spec.groups[g].name!r} changed its generation under this sequence; "
                "its lease is void, close it and open the prompt again",
                group=books.spec.groups[g].name,
            )

    # ---------------------------------------------------------------- asked and told by the manager

    def belongs_to(self, manager: Books) -> bool:
        """Whether ``manager`` opened it."""
        return self._books is manager

    def require_usable(self) -> None:
        """Raise SequenceError when the sequence is closed, broken or not restored yet."""
        self._usable()

    def plan_abandoned(self, ticket: int) -> None:
        """Told by the manager that plan ``ticket`` will not be executed: without its restore the sequence is broken."""
        if ticket == self.restore.ticket:
            self._break()

    def distrust(self, failed: AnyArray) -> None:
        """Told by the manager which slots failed a check (bool, global slots): who reads one of them is broken."""
        a, r = self._books.arrays, self._books.rows
        reads = self._books.tickets.slots(self.restore.ticket)
        for g in range(len(a.group)):
            blocks = range(int(r.span[self.row, g, FIRST]), int(r.span[self.row, g, LAST]))
            reads += [int(slot_at(a, r, self.row, g, block)) for block in blocks]
        if failed[np.array(reads, dtype=np.int64)].any():
            self._break()

    def publish_stepped(self) -> bool:
        """Try to publish the segment that a step filled, though the index is full (used by ``Manager.step``)."""
        state, segment = self._books.rows.state[self.row], self._books.spec.segment_tokens
        self._publish_rest(self._books.rows.tail[self.row, segment - 1 :].copy(), 0)
        return not state[DETACHED]

    # ---------------------------------------------------------------- parts

    def _known(self, group: object) -> int:
        groups = self._books.spec.groups
        if not isinstance(group, (int, np.integer)) or not 0 <= group < len(groups):
            raise InputError(f"group index {group!r} is not one of 0 to {len(groups) - 1}; see ModelSpec.group_index")
        return int(group)

    def _break(self) -> None:
        self._broken = True
        self._books.roster.changed()

    def _usable(self) -> Books:
        self._books.enter()
        if self._closed:
            raise SequenceError("the sequence is closed; open the prompt again")
        if self._broken:
            raise SequenceError(
                "the state cannot be trusted: a forward failed half-way, the restore was abandoned, or an object that "
                "it reads failed a check; close the sequence and open the prompt again"
            )
        if self._books.tickets.is_open(self.restore.ticket):
            raise SequenceError("the restore plan was not completed; run it and call Manager.complete first")
        return self._books

    def _publish_rest(self, ids: Int32Array, used: int) -> None:
        """The index was full: make room and go on with ``ids[used:]``, or publish nothing more."""
        books = self._books
        while used < len(ids) and books.namespaces.make_node_room():
            used = publish(books.arrays, books.rows, self.row, ids, used)
        if used < len(ids):
            state = books.rows.state[self.row]
            state[DETACHED] = 1
            left = int(state[LENGTH]) - int(state[PUBLISHED]) * books.spec.segment_tokens
            kept = left - (len(ids) - used)
            self._loose = [books.rows.tail[self.row, :kept].copy(), ids[used:].copy()]
        shrink_windows(books.arrays, books.rows, self.row, self.length)

    def _fork_into(self, row: int) -> CachedSequence:
        restore = take_fork(self._books, self.row, row)
        explanation = replace(self.explanation, grade=self.grade) if self.length else self.explanation
        child = type(self)(self._books, row, self.floor, explanation, self.length, restore)
        child._loose = list(self._loose)
        return child


def require_own(books: Books, sequence: object) -> CachedSequence:
    """InputError for what is not a sequence of this manager."""
    if not isinstance(sequence, CachedSequence) or not sequence.belongs_to(books):
        raise InputError(f"a sequence that this manager opened is expected, not {type(sequence).__name__}")
    return sequence
