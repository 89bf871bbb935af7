"""Taking a unit into the host tier: pages first, then the bytes without the lock, then all visible in one step."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import numpy as np
import xxhash

from kvloom.errors import TableFullError
from kvloom.tiers.host import counting, nodes, pages, records
from kvloom.tiers.host.arrays import (
    ANCHORS,
    BLOB,
    CHECK,
    FREE,
    GRADE,
    NEEDS,
    NODES,
    OBJECTS,
    PAGE,
    PAGES,
    PARENT,
    PLACE,
    RUN,
    SERIAL,
    SUM,
    TOKENS,
)
from kvloom.tiers.host.books import NO_NEEDS, Books, checksum_of, words
from kvloom.tiers.host.reading import seeds_of
from kvloom.tiers.values import Fill, NewObject, Outcome, Published, Unit
from kvloom.types import AnyArray, IntArray

LARGEST = (1 << 31) - 1


def needs_array(unit: Unit) -> AnyArray:
    """int32 ``[k, 4]``, in a fixed order."""
    rows = sorted((need.group, need.first_node, min(need.first_column, LARGEST), need.count) for need in unit.needs)
    return np.array(rows, np.int32) if rows else NO_NEEDS


def pages_of(sizes: AnyArray) -> IntArray:
    """Pages of so many bytes."""
    return -(-sizes.astype(np.int64) // PAGE)


@dataclass(slots=True)
class Draft:
    """A unit on its way in.

    Attributes:
        chain: int64 ``[n]``, rows of its nodes, -1 for new ones, which follow the known ones.
        about: int64 ``[m, 6]`` (node, group, column, form, grade, length) of all objects that it brought.
        fresh: indices into these of what is new.
        rows: int64, the reserved objects; ``blobs``: first pages for tokens and needs of the nodes from ``first`` on.
        sums: checksums of these.
    """

    unit: Unit
    digests: AnyArray
    chain: IntArray
    known: int
    about: IntArray
    fresh: IntArray
    needs: AnyArray
    rows: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    blobs: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    sums: list[int] = field(default_factory=list)
    pages: int = 0

    @property
    def first(self) -> int:
        """The first node whose tokens and needs are written: the end is always one of them."""
        return min(self.known, len(self.chain) - 1)

    def tokens(self, i: int) -> AnyArray:
        """Tokens of a node."""
        return self.unit.tokens[i * self.unit.segment : (i + 1) * self.unit.segment]


class Publisher:
    """One unit at a time; the caller sees to that."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def publish(self, unit: Unit) -> Published:
        """See ``HostStore.publish``."""
        with self._books.lock:
            draft = self._draft(unit)
        if isinstance(draft, Published):
            return draft
        try:
            self._write(draft)
        except BaseException:
            with self._books.lock:
                self._give_back(draft)
            raise
        with self._books.lock:
            return self._enter(draft)

    # ---------------------------------------------------------------- before

    def _draft(self, unit: Unit) -> Draft | Published:
        books, a = self._books, self._books.a
        books.number_of(unit.layout)
        chain, others = books.find(unit.layout, unit.digests)
        known = int((chain >= 0).sum())
        others += books.find(unit.layout, np.frombuffer(unit.root, np.uint8).reshape(1, -1), roots=True)[1]
        if others or not self._one_chain(unit, chain, known):
            return Published(Outcome.UNAVAILABLE, reason="digests of this chain belong to another one here")
        if any(need.count > LARGEST for need in unit.needs):
            return Published(Outcome.INCOMPLETE)
        about = np.array(
            [(o.node, o.group, o.column, int(o.form), int(o.grade), o.size) for o in unit.objects], np.int64
        ).reshape(-1, 6)
        needs = needs_array(unit)
        held, fresh = self._fresh(chain, about)
        end = int(chain[known - 1]) if known else -1
        counts = np.zeros(len(needs), np.int64)
        base = int(counting.tally(a, end, needs, counts))
        counting.tally_new(about, held, needs, counts)
        if (counts < needs[:, 3]).any():
            return Published(Outcome.INCOMPLETE)
        n = int(chain[-1])
        if not len(fresh) and n >= 0 and a.node[n, PLACE] >= 0:
            have = books.needs_of(n)
            if have is not None and np.array_equal(have, needs):
                books.use(n)
                return Published(Outcome.KNOWN)
        draft = Draft(unit, words(unit.digests), chain, known, about, fresh, needs)
        return draft if self._reserve(draft, base, end) else Published(Outcome.NO_ROOM)

    def _one_chain(self, unit: Unit, chain: IntArray, known: int) -> bool:
        """Whether the known nodes are the first ones, each below the one before it."""
        if (chain[:known] < 0).any():
            return False
        if not known:
            return True
        above = self._books.a.node[chain[:known], PARENT]
        root = self._books.root(unit.layout, unit.root)
        return int(above[0]) == root and bool((above[1:] == chain[: known - 1]).all())

    def _fresh(self, chain: IntArray, about: IntArray) -> tuple[IntArray, IntArray]:
        """Which objects are held, -1 for those that are not; and which are new or better than what is held."""
        held = np.empty(len(about), np.int64)
        records.find_objects(self._books.a, chain, about, held)
        better = self._books.a.obj[np.maximum(held, 0), GRADE] < about[:, 4]
        return held, np.flatnonzero((held < 0) | better)

    def _reserve(self, draft: Draft, base: int, end: int) -> bool:
        """Hold what the unit builds on, and take pages and rows for the rest of it, evicting others."""
        books, a = self._books, self._books.a
        sizes = pages_of(draft.about[draft.fresh, 5])
        ends = range(draft.first, len(draft.chain))
        blobs = pages_of(np.array([4 * len(draft.tokens(i)) for i in ends]))
        blobs[-1] = pages_of(np.array([4 * len(draft.tokens(len(draft.chain) - 1)) + draft.needs.nbytes]))[0]
        count = int(sizes.sum() + blobs.sum())
        new_nodes = len(draft.chain) - draft.known + 1
        if base + count + draft.known > a.scalars[PAGES] or new_nodes > len(a.node):
            return False
        if end >= 0:
            a.node[end, ANCHORS] += 1
        books.hold = (end, draft.needs, books.serial)
        counting.add_refs(a, *books.hold)
        while (
            a.scalars[FREE] < count
            or len(a.node) - a.scalars[NODES] < new_nodes
            or len(a.obj) - a.scalars[OBJECTS] < len(sizes)
        ):
            if not books.evict():
                self._unhold(draft)
                return False
        draft.pages = count
        draft.rows, draft.blobs = np.empty(len(sizes), np.int64), np.empty(len(blobs), np.int64)
        records.new_objects(a, sizes, draft.rows)
        records.take_many(a, blobs, draft.blobs)
        return True

    def _unhold(self, draft: Draft) -> None:
        books = self._books
        if books.hold is None:
            return
        end, needs, serial = books.hold
        books.hold = None
        counting.drop_refs(books.a, end, needs, serial)
        if end >= 0:
            books.a.node[end, ANCHORS] -= 1
            books.prune(end)

    def _give_back(self, draft: Draft) -> None:
        for x in draft.rows.tolist():
            records.free_object(self._books.a, x)
        for page in draft.blobs.tolist():
            pages.give_pages(self._books.a, page)
        self._unhold(draft)

    # ---------------------------------------------------------------- bytes

    def _write(self, draft: Draft) -> None:
        a, unit = self._books.a, draft.unit
        which = draft.fresh
        seeds = seeds_of(unit.layout, draft.digests[draft.about[which, 0]], draft.about[which])
        for i, x, seed in zip(which.tolist(), draft.rows.tolist(), seeds.tolist(), strict=True):
            check = self.put(int(a.obj[x, RUN]), unit.objects[i], seed)
            a.obj64[x, CHECK : CHECK + 2] = np.frombuffer(check, np.int64)
        last = len(draft.chain) - 1
        for i, page in enumerate(draft.blobs.tolist(), draft.first):
            data = draft.tokens(i).astype(np.int32).view(np.uint8)
            if i == last:
                data = np.concatenate([data, draft.needs.reshape(-1).view(np.uint8)])
            pages.scatter(a, page, 0, len(data), data.ctypes.data)
            draft.sums.append(checksum_of(data, draft.digests[i], i))

    def put(self, page: int, item: NewObject, seed: int) -> bytes:
        """Write a payload into the runs from ``page`` on; its checksum."""
        a, size = self._books.a, item.size
        whole = int(a.run[page, 0]) * PAGE >= size
        if isinstance(item.payload, Fill):
            # What is scattered over several runs is made in one piece first.
            room = self._books.memory[page * PAGE : page * PAGE + size] if whole else _aligned(size)
            view = room.data
            item.payload.write(view)
            with contextlib.suppress(BufferError):
                view.release()  # whoever kept it writes no more; who kept an array of it is found out by the checksum
            source: AnyArray = room
        else:
            payload = item.payload
            flat = np.ascontiguousarray(payload) if isinstance(payload, np.ndarray) else payload
            source = np.frombuffer(flat, np.uint8)
            whole = False
        if not whole:
            pages.scatter(a, page, 0, size, source.ctypes.data)
        return xxhash.xxh3_128_digest(source.data, seed)

    # ---------------------------------------------------------------- after

    def _enter(self, draft: Draft) -> Published:
        books, a = self._books, self._books.a
        about = draft.about[draft.fresh]
        held, _ = self._fresh(draft.chain, about)
        counts = np.zeros(len(draft.needs), np.int64)
        counting.tally(a, int(draft.chain[draft.known - 1]) if draft.known else -1, draft.needs, counts)
        counting.tally_new(about, held, draft.needs, counts)
        if (counts < draft.needs[:, 3]).any() or not self._make_nodes(draft):
            self._give_back(draft)
            return Published(Outcome.INCOMPLETE)
        books.serial += 1
        made = int(records.hold_objects(a, draft.chain, about, draft.rows, books.serial))
        end = int(draft.chain[-1])
        before = books.needs_of(end) if a.node[end, PLACE] >= 0 else None
        was_unit, old_serial = a.node[end, PLACE] >= 0, int(a.node64[end, SERIAL])
        counting.add_refs(a, end, draft.needs, books.serial)
        if draft.known == len(draft.chain):
            pages.give_pages(a, int(a.node[end, BLOB]))
            a.node[end, BLOB], a.node[end, TOKENS] = draft.blobs[-1], len(draft.tokens(len(draft.chain) - 1))
            a.node64[end, SUM] = draft.sums[-1]
        a.node[end, NEEDS], a.node64[end, SERIAL] = len(draft.needs), books.serial
        books.use(end)
        if before is not None:
            counting.drop_refs(a, end, before, old_serial)
        elif was_unit:
            books.recount()
        self._unhold(draft)
        records.drop_unneeded(a, draft.chain, draft.about)
        return Published(Outcome.PUBLISHED, made, draft.pages * PAGE)

    def _make_nodes(self, draft: Draft) -> bool:
        """Enter the nodes that are new; False where the table takes none of them."""
        books, a, unit = self._books, self._books.a, draft.unit
        known, last = draft.known, len(draft.chain) - 1
        if known > last:
            return True
        number = books.number_of(unit.layout)
        try:
            parent = int(draft.chain[known - 1]) if known else books.root(unit.layout, unit.root)
            if parent < 0:
                root = np.frombuffer(bytearray(unit.root), np.uint8).reshape(1, -1)
                parent = int(nodes.new_node(a, number, -1, -1, words(root), 0))
                books.table.put(books.keys(unit.layout, root, roots=True), np.array([parent]))
            made = np.empty(last + 1 - known, np.int64)
            about = np.array([(len(draft.tokens(i)), s) for i, s in enumerate(draft.sums, draft.first)], np.int64)
            nodes.new_chain(a, number, parent, draft.digests[known:], draft.blobs, about, made)
            draft.chain[known:] = made
            draft.blobs = draft.blobs[:0]
            there = books.table.put(books.keys(unit.layout, unit.digests[known:]), made)
            if (there >= 0).any():
                raise TableFullError("a digest is in this chain twice")
        except TableFullError:
            books.prune(int(draft.chain[-1]) if draft.chain[-1] >= 0 else parent)
            draft.chain[known:] = -1
            return False
        return True


def _aligned(size: int) -> AnyArray:
    raw = np.empty(size + 256, np.uint8)
    skip = -raw.ctypes.data % 256
    return raw[skip : skip + size]
