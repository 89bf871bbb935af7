"""Decode steps of whole batches: one call per step, in which most sequences have nothing to do but to count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvloom.core import calls
from kvloom.core.progress import BAD_TOKEN, BUSY, TOO_LONG
from kvloom.errors import CapacityError, InputError, SequenceError
from kvloom.manager.books import Books
from kvloom.manager.keeping import keep_snapshots
from kvloom.manager.sequence import CachedSequence, require_own
from kvloom.manager.single import Single
from kvloom.plan import CopyPlan
from kvloom.types import Grade, Int32Array

_STEP_GRADE = int(Grade.FAITHFUL)


class Batch(Single):
    """Sequences that decode together; made by ``Manager.batch`` for that manager.

    Attributes:
        sequences: in the order of the tokens that ``Manager.step`` takes.
    """

    __slots__ = ("_books", "_checked", "_ended", "_rows", "sequences")

    def __init__(self, books: Books, sequences: Sequence[CachedSequence]) -> None:
        """See ``Manager.batch``."""
        for sequence in sequences:
            require_own(books, sequence).require_usable()
        self.sequences = tuple(sequences)
        self._books = books
        self._rows: Int32Array = np.array([sequence.row for sequence in self.sequences], dtype=np.int32)
        if len(set(self._rows.tolist())) != len(self._rows):
            raise SequenceError("a sequence is in the batch twice; fork it to decode it twice")
        self._ended = np.empty_like(self._rows)
        self._checked = books.roster.changes

    def __len__(self) -> int:
        return len(self.sequences)

    def rows_for(self, books: Books) -> tuple[Int32Array, Int32Array]:
        """Its rows, and a scratch array as long, once every sequence can go on (asked anew when some have changed).

        Raises InputError when another manager asks, SequenceError for a sequence that cannot go on.
        """
        if self._books is not books:
            raise InputError("the batch belongs to another manager; make one with this manager's own batch method")
        if self._checked != books.roster.changes:
            for sequence in self.sequences:
                sequence.require_usable()
            self._checked = books.roster.changes
        return self._rows, self._ended


def rows_of(books: Books, batch: object) -> tuple[Int32Array, Int32Array]:
    """``Batch.rows_for``, and InputError for what is no batch."""
    books.enter()
    if not isinstance(batch, Batch):
        raise InputError(f"a Batch is expected, as the manager's batch method makes it, not {type(batch).__name__}")
    return batch.rows_for(books)


def step(books: Books, batch: Batch, tokens: Int32Array) -> tuple[CopyPlan, ...]:
    """See ``Manager.step``."""
    rows, ended = rows_of(books, batch)
    if getattr(tokens, "dtype", None) != np.int32 or tokens.shape != rows.shape:
        found = f"{getattr(tokens, 'dtype', type(tokens).__name__)} {getattr(tokens, 'shape', '')}".strip()
        raise InputError(f"a step takes int32 tokens of shape {rows.shape}, not {found}")
    flags = tokens.flags
    if not (flags.c_contiguous and flags.aligned and flags.writeable):  # other types to compiled code
        tokens = np.require(tokens, requirements=("C", "A", "W"))
    limits = (books.ids.top, books.ids.longest)
    done, count, place, why = calls.step_rows(
        books.handle, rows, tokens, _STEP_GRADE, ended, *limits, not books.snapshot_groups
    )
    plans: tuple[CopyPlan, ...] = ()
    if place == calls.NOT_BEGUN:
        plans = _publish_ended(books, batch, rows, ended, (done, count))
        place, why = calls.begin_rows(books.handle, rows, tokens, *limits)
    if place >= 0 and why >= 0 and books.roster.collect():
        place, why = calls.begin_rows(books.handle, rows, tokens, *limits)
    if place >= 0:
        for plan in plans:
            books.tickets.abandon(plan.ticket)
        raise _refused(books, batch.sequences[place], int(tokens[place]), int(why))
    return plans


def finish(books: Books, batch: Batch) -> tuple[CopyPlan, ...]:
    """See ``Manager.finish``."""
    rows, ended = rows_of(books, batch)
    books.tick()
    reached = calls.finish_rows(books.handle, rows, 0, _STEP_GRADE, ended, 0)
    return _publish_ended(books, batch, rows, ended, reached)


def _publish_ended(
    books: Books, batch: Batch, rows: Int32Array, ended: Int32Array, reached: tuple[int, int]
) -> tuple[CopyPlan, ...]:
    """Go on with a step that came to ``reached`` (place, count of ``ended``); the snapshots of what ended a segment."""
    place, count = reached
    while place < len(rows):  # the index is full
        if batch.sequences[place].publish_stepped():
            ended[count] = rows[place]
            count += 1
        place, count = calls.finish_rows(books.handle, rows, place + 1, _STEP_GRADE, ended, count)
    if not count or not books.snapshot_groups:
        return ()
    return tuple(keep_snapshots(books, row, asked=False) for row in ended[:count].tolist())


def _refused(
    books: Books, sequence: CachedSequence, token: int, why: int
) -> CapacityError | InputError | SequenceError:
    """Why a step could not go on with ``sequence``."""
    length = sequence.length
    if why == BAD_TOKEN:
        return InputError(f"token {token} after {length} is outside the vocabulary, 0 to {books.ids.top - 1}")
    if why == TOO_LONG:
        return InputError(
            f"{length + 1} tokens are more than the {books.spec.max_positions} positions of {books.spec.name}"
        )
    if why == BUSY:
        return SequenceError("the last append to a sequence of the batch was neither committed nor rolled back")
    return books.capacity.no_room(why, length + 1, f"decode one token after {length}")
