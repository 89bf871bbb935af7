"""The baseline that paging is measured against: the state of a sequence in one contiguous range of memory.

Either the longest possible sequence is reserved at once (``step=None``), or the range grows by ``step`` tokens whenever
it is full: a longer one is taken, the state is copied, the old one is given back.  The interface is that of
``Manager`` and ``CachedSequence`` as far as it makes sense without sharing; nothing is ever reused.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from kvloom.errors import CapacityError, InputError, SequenceError
from kvloom.types import AnyArray


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes to copy before the next forward: ``size`` bytes from ``source`` to ``target``; none when ``size`` is 0."""

    source: int = 0
    target: int = 0
    size: int = 0


class Extents:
    """Free ranges of ``size`` bytes, lowest first; neighbours are merged."""

    def __init__(self, size: int) -> None:
        self._offsets, self._sizes = [0], [size]

    def take(self, size: int) -> int:
        """Offset of the first free range that is large enough, cut to ``size``; -1 when there is none."""
        for i, free in enumerate(self._sizes):
            if free >= size:
                offset = self._offsets[i]
                if free == size:
                    del self._offsets[i], self._sizes[i]
                else:
                    self._offsets[i] += size
                    self._sizes[i] -= size
                return offset
        return -1

    def give(self, offset: int, size: int) -> None:
        """Give back a range that was taken."""
        i = bisect_left(self._offsets, offset)
        self._offsets.insert(i, offset)
        self._sizes.insert(i, size)
        for left in (i, i - 1):  # merge with the right neighbour, then with the left one
            if (
                0 <= left < len(self._offsets) - 1
                and self._offsets[left] + self._sizes[left] == self._offsets[left + 1]
            ):
                self._sizes[left] += self._sizes.pop(left + 1)
                del self._offsets[left + 1]

    def free(self) -> int:
        """Free bytes."""
        return sum(self._sizes)

    def largest(self) -> int:
        """Bytes of the largest free range."""
        return max(self._sizes, default=0)


class ContiguousManager:
    """Gives every sequence one contiguous range of an arena.

    Args:
        arena_bytes: the cap; never exceeded.
        token_bytes: state of one token.
        max_tokens: longest sequence.
        step: tokens by which a range grows; None reserves ``max_tokens`` at once.
    """

    def __init__(self, arena_bytes: int, token_bytes: int, *, max_tokens: int, step: int | None = None) -> None:
        if token_bytes < 1 or max_tokens < 1 or (step is not None and step < 1):
            raise InputError("token_bytes, max_tokens and step must be at least 1")
        self.cap = arena_bytes
        self.token_bytes = token_bytes
        self.max_tokens = max_tokens
        self.step = step
        self.reserved = 0
        self.extents = Extents(arena_bytes)

    def open(self, tokens: AnyArray) -> ContiguousSequence:
        """Start a sequence for a prompt.  Raises CapacityError, and then nothing changed."""
        return ContiguousSequence(self, self.tokens_for(len(tokens)))

    def tokens_for(self, tokens: int) -> int:
        """Tokens that are reserved for a sequence of ``tokens``; raises CapacityError when it is too long."""
        if tokens > self.max_tokens:
            raise CapacityError(
                f"{tokens} tokens are more than the {self.max_tokens} that a sequence may have; make max_tokens larger",
                needed=tokens * self.token_bytes,
                cap=self.cap,
                in_use=self.reserved,
                never_fits=True,
            )
        if self.step is None:
            return self.max_tokens
        return min(self.max_tokens, -(-max(tokens, 1) // self.step) * self.step)

    def take(self, tokens: int) -> int:
        """Offset of a new range for ``tokens`` tokens.  Raises CapacityError."""
        size = tokens * self.token_bytes
        offset = self.extents.take(size)
        if offset < 0:
            raise CapacityError(
                f"no contiguous {size} bytes are free: {self.extents.free()} of {self.cap} are, the largest range has "
                f"{self.extents.largest()}; close a sequence, or make the arena larger",
                needed=size,
                cap=self.cap,
                in_use=self.reserved,
                never_fits=size > self.cap,
            )
        self.reserved += size
        return offset

    def give(self, offset: int, tokens: int) -> None:
        """Give a range back."""
        self.extents.give(offset, tokens * self.token_bytes)
        self.reserved -= tokens * self.token_bytes


class ContiguousSequence:
    """One sequence: ``append`` -> run the move -> compute -> ``commit`` (or ``rollback``), and ``close`` at the end.

    Attributes:
        length: tokens whose state is computed.
        reused: always 0.
        offset: where its range begins in the arena; token i has its state at ``offset + i * token_bytes``.
    """

    def __init__(self, manager: ContiguousManager, room: int) -> None:
        self._manager = manager
        self.offset = manager.take(room)
        self.room = room
        self.reused = self.length = 0
        self._pending = 0
        self._old: tuple[int, int] | None = None  # a range whose bytes are being moved
        self._closed = False

    def append(self, token_ids: AnyArray) -> Move:
        """Make room for the next tokens; run the returned move before the forward.  CapacityError changes nothing."""
        if self._closed or self._pending:
            raise SequenceError("the sequence is closed" if self._closed else "the last append was not committed")
        manager, tokens = self._manager, len(token_ids)
        move = Move()
        if self.length + tokens > self.room:
            room = manager.tokens_for(self.length + tokens)
            offset = manager.take(room)
            self._old = self.offset, self.room
            move = Move(self.offset, offset, self.length * manager.token_bytes)
            self.offset, self.room = offset, room
        self._pending = tokens
        return move

    def commit(self) -> None:
        """The appended tokens were computed, and the move was run before."""
        self._settle()
        self.length += self._pending
        self._pending = 0

    def rollback(self) -> None:
        """The appended tokens were not computed; the move was run."""
        self._settle()
        self._pending = 0

    def close(self) -> None:
        """Give everything back.  Closing twice is harmless."""
        if not self._closed:
            self._closed = True
            self._settle()
            self._manager.give(self.offset, self.room)

    def _settle(self) -> None:
        if self._old is not None:
            self._manager.give(*self._old)
            self._old = None
