"""What is where, and what goes: the index of the host tier.  All of it happens under one lock."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator

import numpy as np
import xxhash

from kvloom.page_tables.cuckoo import CuckooTable
from kvloom.tiers.host import counting, heap, nodes, pages, records
from kvloom.tiers.host.arrays import (
    AT,
    BLOB,
    DEPTH,
    DIGEST_AT,
    FOUND,
    FREE,
    GENERATION,
    HEAT,
    HELD,
    LAYOUT,
    NEEDS,
    NODES,
    OBJ_NODE,
    OBJECTS,
    PAGE,
    PAGES,
    PARENT,
    PLACE,
    REFS,
    SERIAL,
    STATE,
    SUM,
    TOKENS,
    TOP_NODE,
    TOP_OBJECT,
    UNITS,
    Arrays,
    table_entries,
)
from kvloom.tiers.values import DIGEST, Digests
from kvloom.types import AnyArray, IntArray

ROUND_LEAST = 16
"""A round of the clock is as many events as there are units, but at least these."""
CHAIN_STEP = 256
_MOST_AHEAD = 256
"""Units that are put in order before they are asked for."""
NO_NEEDS = np.empty((0, 4), np.int32)


def _untouched(count: int, dtype: type[np.generic]) -> AnyArray:
    """Zeros that cost nothing until they are written, unlike what the allocator has used before."""
    made = mmap.mmap(-1, max(1, count) * np.dtype(dtype).itemsize)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        made.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(made, dtype)


def words(data: Digests) -> AnyArray:
    """Digests uint8 ``[n, 32]`` as int64 ``[n, 4]``, writable, since compiled code is made for that."""
    return np.require(data, requirements=["C", "W"]).view(np.int64)


def checksum_of(blob: AnyArray, digest: AnyArray, depth: int) -> int:
    """Checksum of a node's tokens and needs, as a signed number."""
    seed = int(digest[0]) ^ (int(digest[1]) << 1) ^ depth
    made = int(xxhash.xxh3_64_intdigest(blob.data, seed & (2**64 - 1)))
    return made - (1 << 64) if made >> 63 else made


class Books:
    """Callers hold ``lock``."""

    def __init__(self, arrays: Arrays, memory: AnyArray) -> None:
        self.a = arrays
        self.memory = memory
        """What the arrays say the address of: it lives as long as somebody has these books."""
        pages.all_free(arrays)
        self.lock = threading.Lock()
        self.table = CuckooTable(table_entries(len(arrays.node)))
        self.layouts: dict[bytes, int] = {}
        self.serial = 0
        self.clock = 0.0
        self.hold: tuple[int, AnyArray, int] | None = None
        """What a publication under way counts on: (node, needs, serial)."""
        self.evicted = self.quarantined = self.recounts = 0
        self._books_bytes = sum(array.nbytes for _, array in arrays.items())

    # ---------------------------------------------------------------- finding

    def layout_words(self, layout: bytes) -> AnyArray:
        """A layout as uint64 ``[4]``."""
        return np.frombuffer(bytearray(layout), np.uint64)

    def keys(self, layout: bytes, digests: Digests, *, roots: bool = False) -> AnyArray:
        """Keys of nodes in the table, uint8 ``[n, 16]``."""
        name = self.layout_words(layout)
        out = np.empty((len(digests), 2), np.uint64)
        nodes.mix(words(digests).view(np.uint64), ~name if roots else name, out)
        return out.view(np.uint8)

    def find(self, layout: bytes, digests: Digests, *, roots: bool = False) -> tuple[IntArray, int]:
        """Rows of nodes, -1 where one is not here; and how many have the key of another one."""
        number = self.layouts.get(layout, -1)
        if number < 0 or not len(digests):
            return np.full(len(digests), -1, np.int64), 0
        places = self.table.find(self.keys(layout, digests, roots=roots))
        others = int(nodes.resolve(self.a, number, words(digests), -1 if roots else 0, places))
        return places, others

    def root(self, layout: bytes, root: bytes) -> int:
        """The row of a root, or -1."""
        return int(self.find(layout, np.frombuffer(root, np.uint8).reshape(1, DIGEST), roots=True)[0][0])

    def unit_at(self, layout: bytes, digest: bytes) -> int:
        """The row of the node that a unit ends at, or -1."""
        n = int(self.find(layout, np.frombuffer(digest, np.uint8).reshape(1, DIGEST))[0][0])
        return n if n >= 0 and self.a.node[n, PLACE] >= 0 else -1

    def number_of(self, layout: bytes) -> int:
        """The number of a layout; those of which nothing is here are forgotten."""
        if layout not in self.layouts:
            if int(self.a.scalars[NODES]) == 0:
                self.layouts.clear()
            self.layouts[layout] = 1 + max(self.layouts.values(), default=-1)
        return self.layouts[layout]

    def layout_of(self, n: int) -> bytes:
        """The layout of a node."""
        number = int(self.a.node[n, LAYOUT])
        return next(name for name, other in self.layouts.items() if other == number)

    def digest_of(self, n: int) -> bytes:
        """The digest of a node or root."""
        return self.a.node64[n, DIGEST_AT : DIGEST_AT + 4].tobytes()

    # ---------------------------------------------------------------- tokens and needs

    def blob(self, n: int) -> AnyArray | None:
        """Tokens and needs of a node as bytes; None where they are damaged."""
        row = self.a.node[n]
        size = 4 * int(row[TOKENS]) + 16 * int(row[NEEDS])
        if not 0 <= size <= int(self.a.scalars[PAGES]) * PAGE:
            return None
        data = np.empty(size, np.uint8)
        good = pages.gather(self.a, int(row[BLOB]), 0, size, data.ctypes.data)
        if not good or checksum_of(data, self.a.node64[n, :2], int(row[DEPTH])) != int(self.a.node64[n, SUM]):
            return None
        return data

    def needs_of(self, n: int) -> AnyArray | None:
        """int32 ``[k, 4]`` (group, first node, first column, count); None where they are damaged."""
        data = self.blob(n)
        return None if data is None else data[4 * int(self.a.node[n, TOKENS]) :].view(np.int32).reshape(-1, 4)

    # ---------------------------------------------------------------- heat

    def use(self, n: int) -> None:
        """The unit that ends at ``n`` is new or was used."""
        self.clock += 1 / max(int(self.a.scalars[UNITS]), ROUND_LEAST)
        heap.use(self.a, n, self.clock)

    def heat(self, n: int) -> float:
        """The access counter of a unit, decayed to the present moment."""
        row = self.a.heat[n]
        return float(row[HEAT] * 2.0 ** (row[AT] - self.clock))

    def in_order(self) -> Iterator[int]:
        """Units, the one that goes next first; takes time for those that are asked for.  Nothing may change meanwhile.

        The order is that of their worth, of their last use, and of their length.
        """
        ahead, size = _untouched(self.units, np.int64), np.array([min(1, self.units)])
        some = 8
        while size[0] > 0:
            some = min(2 * some, _MOST_AHEAD)
            out = np.empty(some, np.int64)
            yield from out[: int(heap.walk(self.a, ahead, size, out))].tolist()

    def going(self) -> Iterator[tuple[int, IntArray]]:
        """Units in this order, each with the objects that nobody needs who goes later."""
        objects = int(self.a.scalars[TOP_OBJECT])
        passed, out, count = _untouched(objects, np.int32), _untouched(objects, np.int64), 0
        for n in self.in_order():
            before, needs = count, self.needs_of(n)
            if needs is not None:
                serial = int(self.a.node64[n, SERIAL])
                count = int(counting.pass_over(self.a, n, needs, serial, passed, out, count))
            yield n, out[before:count]

    # ---------------------------------------------------------------- removing

    def drop_unit(self, n: int) -> None:
        """The unit that ends at ``n`` is gone, with all that no other one needs."""
        needs = self.needs_of(n)
        heap.forget(self.a, n)
        if needs is None:
            self.recount()
        else:
            counting.drop_refs(self.a, n, needs, int(self.a.node64[n, SERIAL]))
        self.a.node[n, NEEDS] = 0
        if int(self.a.node[n, TOKENS]) and needs is not None:
            self._sum_again(n)
        self.prune(n)

    def _sum_again(self, n: int) -> None:
        """The needs are not covered by the checksum any more."""
        size = 4 * int(self.a.node[n, TOKENS])
        data = np.empty(size, np.uint8)
        if pages.gather(self.a, int(self.a.node[n, BLOB]), 0, size, data.ctypes.data):
            self.a.node64[n, SUM] = checksum_of(data, self.a.node64[n, :2], int(self.a.node[n, DEPTH]))

    def prune(self, n: int) -> None:
        """Remove a node, and those above it, that nothing needs."""
        out = np.empty((CHAIN_STEP, 7), np.int64)
        while n >= 0:
            count = int(nodes.prune(self.a, n, out))
            if count:
                layout = next(name for name, number in self.layouts.items() if number == int(out[0, 0]))
                for roots in (False, True):
                    which = (out[:count, 1] < 0) == roots
                    if which.any():
                        self.table.remove(self.keys(layout, out[:count, 2:6][which].view(np.uint8), roots=roots))
            n = int(out[-1, 6]) if count == CHAIN_STEP else -1

    def recount(self) -> None:
        """All counts anew: those of a unit whose needs are damaged cannot be taken back one by one."""
        self.recounts += 1
        counting.reset_refs(self.a)
        bad = []
        for n in self.a.heap[: int(self.a.scalars[UNITS])].tolist():
            needs = self.needs_of(n)
            if needs is None:
                bad.append(n)
            else:
                counting.add_refs(self.a, n, needs, int(self.a.node64[n, SERIAL]))
        if self.hold is not None:
            counting.add_refs(self.a, *self.hold)
        for n in bad:
            heap.forget(self.a, n)
        records.drop_all_unneeded(self.a)
        for n in bad:
            self.prune(n)

    def evict(self) -> bool:
        """Drop the unit that is worth least; False when there is none."""
        if not self.a.scalars[UNITS]:
            return False
        self.drop_unit(int(self.a.heap[0]))
        self.evicted += 1
        return True

    def quarantine(self, rows: IntArray, generations: IntArray) -> int:
        """These objects are not found again, nor what needs them; returns how many still were there."""
        count = 0
        for x, generation in zip(rows.tolist(), generations.tolist(), strict=True):
            if self.a.obj[x, STATE] != HELD or self.a.obj[x, GENERATION] != generation:
                continue
            count += 1
            node = int(self.a.obj[x, OBJ_NODE])
            for n in self.units_below(node):
                if self.a.node[n, PLACE] >= 0 and self._needs(n, x):
                    self.drop_unit(n)
            if self.a.obj[x, STATE] == HELD and self.a.obj[x, GENERATION] == generation:
                records.drop_object(self.a, x)
                self.prune(node)
        self.quarantined += count
        return count

    def _needs(self, n: int, x: int) -> bool:
        needs = self.needs_of(n)
        return needs is None or bool(counting.needs_object(self.a, x, needs))

    def units_below(self, node: int) -> list[int]:
        """Nodes at or below ``node`` at which a unit ends."""
        found = np.empty(max(1, self.units), np.int64)
        made: list[int] = found[: int(heap.below(self.a, node, found))].tolist() if node >= 0 else []
        return made

    # ---------------------------------------------------------------- books

    @property
    def units(self) -> int:
        """How many there are."""
        return int(self.a.scalars[UNITS])

    @property
    def objects(self) -> int:
        """Objects that are found."""
        return int(self.a.scalars[FOUND])

    @property
    def bytes(self) -> int:
        """Bytes of the pages in use, and of all books."""
        used = int(self.a.scalars[PAGES] - self.a.scalars[FREE]) * PAGE
        return used + self._books_bytes + self.table.stats().bytes

    def check_integrity(self) -> None:
        """Everything is consistent, as far as can be told at a quiet moment; AssertionError otherwise."""
        a = self.a
        self.table.check_integrity()
        assert int(heap.out_of_order(a)) == 0, "the heap of units is out of order"
        top = int(a.scalars[TOP_OBJECT])
        held = np.flatnonzero(a.obj[:top, STATE] == HELD)
        used = np.flatnonzero(a.obj[:top, STATE] != 0)
        assert len(used) == int(a.scalars[OBJECTS]), f"{len(used)} objects, {int(a.scalars[OBJECTS])} counted"
        before = a.obj[:top, REFS].copy()
        counting.reset_refs(a)
        for n in a.heap[: int(a.scalars[UNITS])].tolist():
            needs = self.needs_of(n)
            assert needs is not None, f"node {n} is damaged"
            counting.add_refs(a, n, needs, int(a.node64[n, SERIAL]))
        if self.hold is not None:
            counting.add_refs(a, *self.hold)
        assert len(held) == self.objects, f"{len(held)} objects are held, {self.objects} counted"
        assert (a.obj[held, REFS] == before[held]).all(), "objects are counted wrongly"
        assert (before[held] > 0).all(), "an object is held that nothing needs"
        live = np.flatnonzero(a.node[: int(a.scalars[TOP_NODE]), DEPTH] >= -1)
        assert len(live) == int(a.scalars[NODES]) == len(self.table), "nodes are counted wrongly"
        assert (a.node[live][a.node[live, DEPTH] >= 0, PARENT] >= 0).all(), "a node hangs in the air"
