"""A cuckoo hash table from digests to places in a cold tier: two reads at most for every lookup, up to 95 % full.

The core compares tokens and needs no such table; a cold tier is found by digest (``kvloom.core.digests``), and what
lies there is checked against the whole digest when it is read, so 128 bits of it are enough to find the place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.core import cuckoo as steps
from kvloom.errors import InputError, TableFullError
from kvloom.types import AnyArray

MAX_PERCENT = 95
"""Filled beyond this part of its slots the table grows; searches for room get long from 97 % on."""

GROWTH = 2
RESEEDS = 4
"""Seeds that a rebuild tries.  Keys that somebody chose to meet in two buckets do not meet under another seed."""

CACHE_LINE = 64
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TableStats:
    """What a table holds and has done.

    Attributes:
        entries, slots: keys, and how many would be the utmost.
        bytes: of all arrays.
        read_one, read_two: lookups that read one bucket, and two (among them all that found nothing).
        moves: entries that insertions moved; ``longest`` by one insertion at most; ``widest``: buckets looked at.
        rebuilds: times that the table grew or took another seed; ``rebuilt``: entries entered again by that.
    """

    entries: int
    slots: int
    bytes: int
    read_one: int
    read_two: int
    moves: int
    longest: int
    widest: int
    rebuilds: int
    rebuilt: int

    @property
    def load(self) -> float:
        """Part of the slots that is in use."""
        return self.entries / self.slots

    @property
    def bytes_per_entry(self) -> float:
        """Bytes of all arrays by entries; 0 when there are none."""
        return self.bytes / self.entries if self.entries else 0.0


class CuckooTable:
    """Digest to place, structure of arrays: 24 bytes per slot.

    Args:
        capacity: entries that it takes before it grows; a tier knows how many objects it can hold.
        limit: most entries it may ever hold; None: as memory allows.
        seed: decides which buckets a key has.  Nothing else is random.

    Growing enters every key again, amortised once per doubling: with the capacity of the tier it never happens.
    Not thread-safe.
    """

    def __init__(self, capacity: int = 1024, *, limit: int | None = None, seed: int = 0) -> None:
        if capacity < 1:
            raise InputError(f"a table with room for {capacity} entries holds nothing; use at least 1")
        if limit is not None and limit < 1:
            raise InputError(f"a table limited to {limit} entries holds nothing; use at least 1, or None")
        self._limit = limit
        self._table = _empty(_buckets_for(capacity), np.array([seed % 2**64], dtype=np.uint64))
        self._rebuilds = self._rebuilt = 0

    def __len__(self) -> int:
        return int(self._table.tally[steps.ENTRIES])

    def find(self, digests: AnyArray) -> Places:
        """Places of ``digests`` uint8 [n, 16 or a larger multiple of 8]: int64 [n], -1 for what is not here."""
        wanted = _words(digests)
        out = np.empty(len(wanted), dtype=np.int64)
        steps.find(self._table, wanted, out)
        return out

    def put(self, digests: AnyArray, places: Places) -> Places:
        """Enter digests with their places (int64 [n], not negative), or give known ones a new place.

        Returns the places before, -1 for new ones.  Of equal digests the last one counts.  Raises TableFullError at
        ``limit``, and where no seed makes room for the keys; then the table holds what it held.
        """
        new = _words(digests)
        places = np.ascontiguousarray(places)
        if places.dtype != np.int64 or places.shape != (len(new),):
            raise InputError(f"{len(new)} digests need int64 places [{len(new)}], not {places.dtype} {places.shape}")
        if len(places) and int(places.min()) < 0:
            raise InputError(f"place {int(places.min())} is negative; places count from 0")
        old = np.empty(len(new), dtype=np.int64)
        done = tries = 0
        try:
            while (reached := self._put(new, places, done, old)) < len(new):
                tries = tries + 1 if reached == done else 1
                done = reached
                if self._limit is not None and len(self) >= self._limit:
                    raise TableFullError(f"the table holds {len(self)} entries, its limit; remove some first")
                self._rebuild(tries)
        except TableFullError:
            steps.undo(self._table, new[:done], old[:done])
            raise
        return old

    def remove(self, digests: AnyArray) -> Places:
        """Take digests out: their places, -1 for what was not here."""
        gone = _words(digests)
        old = np.empty(len(gone), dtype=np.int64)
        steps.remove(self._table, gone, old)
        return old

    def items(self) -> tuple[npt.NDArray[np.uint8], Places]:
        """All entries in no order that means anything: digests uint8 [n, 16], places int64 [n]; copies."""
        keys, places = self._table.keys, self._table.places
        used = places >= 0
        words = np.stack([keys[:, : steps.SLOTS][used], keys[:, steps.SLOTS :][used]], axis=1)
        return words.astype("<u8", copy=False).view(np.uint8), places[used]

    def stats(self) -> TableStats:
        """Counts so far."""
        entries, one, two, moves, longest, widest = (int(n) for n in self._table.tally)
        size = sum(array.nbytes for array in self._table)
        slots = self._table.places.size
        return TableStats(entries, slots, size, one, two, moves, longest, widest, self._rebuilds, self._rebuilt)

    def check_integrity(self) -> None:
        """Every entry is where a lookup finds it, once, and all are counted; AssertionError otherwise."""
        wrong = steps.misplaced(self._table)
        assert wrong == 0, f"{wrong} entries are where no lookup finds them, or twice"
        used = int((self._table.places >= 0).sum())
        assert used == len(self), f"{used} entries are used, {len(self)} counted"

    def _put(self, new: AnyArray, places: Places, begin: int, old: Places) -> int:
        room = self._table.places.size * MAX_PERCENT // 100
        most = room if self._limit is None else min(room, self._limit)
        return int(steps.put(self._table, new, places, begin, most, old))

    def _rebuild(self, tries: int) -> None:
        """Make room for one more entry, after ``tries`` failures: a larger table, or the same under another seed.

        Keys that share both buckets part under another seed; should they not, a larger table, then TableFullError.
        """
        old = self._table
        for attempt in range(tries, 2 * RESEEDS + 1):
            larger = 2 * len(self) > old.places.size or attempt == RESEEDS + 1
            seed = old.seed + np.uint64(0 if larger and attempt == 1 else attempt)
            new = _empty(len(old.keys) * (GROWTH if larger else 1), seed)
            if steps.refill(new, old):
                new.tally[steps.READ_ONE : steps.READ_TWO + 1] = old.tally[steps.READ_ONE : steps.READ_TWO + 1]
                new.tally[steps.MOVES] += old.tally[steps.MOVES]
                for most in (steps.LONGEST, steps.WIDEST):
                    new.tally[most] = max(new.tally[most], old.tally[most])
                self._table = new
                self._rebuilds += 1
                self._rebuilt += len(self)
                return
        raise TableFullError(
            f"no room for another entry beside {len(self)} under {2 * RESEEDS} seeds; "
            "the digests were not made by a hash"
        )


def _buckets_for(entries: int) -> int:
    return max(2, -(-entries * 100 // (MAX_PERCENT * steps.SLOTS)))


def _empty(buckets: int, seed: AnyArray) -> steps.Table:
    """A table with nothing in it; every bucket's keys are one cache line."""
    raw = np.zeros(buckets * 8 + CACHE_LINE // 8, dtype=np.uint64)
    skip = -raw.ctypes.data % CACHE_LINE // 8
    return steps.Table(
        keys=raw[skip : skip + buckets * 8].reshape(buckets, 8),
        places=np.full((buckets, steps.SLOTS), -1, dtype=np.int64),
        seed=seed,
        search=np.zeros((steps.SEARCHED, 3), dtype=np.int64),
        tally=np.zeros(6, dtype=np.int64),
    )


def _words(digests: AnyArray) -> AnyArray:
    """Digests as words, their first 128 bits in front."""
    if digests.dtype != np.uint8 or digests.ndim != 2 or digests.shape[1] < 16 or digests.shape[1] % 8:
        raise InputError(f"digests are uint8 [n, 16 or 32], not {digests.dtype} {digests.shape}")
    return np.require(digests, requirements=["C", "W"]).view("<u8")
