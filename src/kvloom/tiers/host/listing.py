"""Saying what is held: of a chain, of everything, and one unit as it came."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import numpy as np

from kvloom.errors import StoreError
from kvloom.tiers.host import nodes, records
from kvloom.tiers.host.arrays import (
    AT,
    BORN,
    COLUMN,
    DEPTH,
    DIGEST_AT,
    FORM,
    GENERATION,
    GRADE,
    GROUP,
    LAYOUT,
    LENGTH,
    OBJ_NODE,
    PARENT,
    PLACE,
    SERIAL,
    TOKENS,
    TOP_NODE,
)
from kvloom.tiers.host.books import Books
from kvloom.tiers.host.reading import PLACE as HOST_PLACE
from kvloom.tiers.host.reading import Copy, Pinned
from kvloom.tiers.values import MOST_TAILS, Batch, Digests, Fill, Found, Need, NewObject, Places, Unit
from kvloom.types import AnyArray, Grade, IntArray, PayloadForm

BATCH = 1024
FIELDS = (("group", GROUP), ("column", COLUMN), ("form", FORM), ("grade", GRADE), ("length", LENGTH))


def places_of(books: Books, layout: bytes, rows: IntArray) -> tuple[Places, IntArray]:
    """All objects of nodes (-1: none), and their rows."""
    a, size = books.a, 64 + 16 * len(rows)
    while True:
        out = np.empty((size, 2), np.int64)
        count = int(records.list_objects(a, rows, out, size))
        if count <= size:
            break
        size = count
    at, which = out[:count, 0].copy(), out[:count, 1].copy()
    return _places(books, layout, rows[at], at, which), which


def _places(books: Books, layout: bytes, nodes_: IntArray, at: IntArray, which: IntArray) -> Places:
    """Objects ``which`` of nodes ``nodes_``, called ``at``."""
    obj = books.a.obj[which]
    entries = np.empty(len(which), HOST_PLACE)
    for name, column in FIELDS:
        entries[name] = obj[:, column]
    entries["row"], entries["generation"] = which, obj[:, GENERATION]
    digests = books.a.node64[nodes_, DIGEST_AT : DIGEST_AT + 4].copy().view(np.uint8).reshape(-1, 32)
    return Places(layout, digests, entries, at)


def places_by_layout(books: Books, which: IntArray) -> list[Places]:
    """Single objects, by layout; ``rows`` of the places count them."""
    a, found = books.a, []
    of = a.node[a.obj[which, OBJ_NODE], LAYOUT]
    for layout, number in books.layouts.items():
        mine = which[of == number]
        if len(mine):
            found.append(_places(books, layout, a.obj[mine, OBJ_NODE].astype(np.int64), np.arange(len(mine)), mine))
    return found


def finding(books: Books, layout: bytes, digests: Digests, root: bytes | None) -> Found:
    """See ``HostStore.lookup``."""
    rows, _ = books.find(layout, digests)
    known = rows >= 0
    boundary = np.zeros(len(rows), np.bool_)
    boundary[known] = books.a.node[rows[known], PLACE] >= 0
    places, _ = places_of(books, layout, rows)
    return Found(known, boundary, places, _tails(books, layout, rows, root))


def _tails(books: Books, layout: bytes, rows: IntArray, root: bytes | None) -> AnyArray:
    known = np.flatnonzero(rows >= 0)
    at = int(known[-1]) if len(known) else -1
    if at >= 0:
        parent = int(rows[at])
        below = int(books.a.node[parent, TOKENS])
    else:
        parent = books.root(layout, root) if root is not None else -1
        below = 1 << 31
    out = np.empty(MOST_TAILS, np.int64)
    count = int(nodes.tails(books.a, parent, below, out)) if parent >= 0 else 0
    return np.stack([np.full(count, at), out[:count]], axis=1).astype(np.int32)


def catalogue(books: Books) -> Iterator[Batch]:
    """See ``HostStore.catalogue``."""
    begin = 0
    while True:
        with books.lock:
            top = int(books.a.scalars[TOP_NODE])
            if begin >= top:
                return
            numbers = np.arange(begin, min(begin + BATCH, top))
            begin += BATCH
            live = numbers[books.a.node[numbers, DEPTH] >= 0]
            batches = [_batch(books, layout, live) for layout in list(books.layouts)]
        yield from (batch for batch in batches if batch is not None)


def _batch(books: Books, layout: bytes, live: IntArray) -> Batch | None:
    a = books.a
    mine = live[a.node[live, 0] == books.layouts[layout]]
    blobs = [(n, books.blob(n)) for n in mine.tolist()]
    rows = np.array([n for n, blob in blobs if blob is not None], np.int64)
    if not len(rows):
        return None
    tokens = [
        blob[: 4 * int(a.node[n, TOKENS])].view(np.int32) for n, blob in blobs if blob is not None
    ]  # fmt: skip
    ends = a.node[rows, PLACE] >= 0
    digests, parents = (
        a.node64[which, DIGEST_AT : DIGEST_AT + 4].copy().view(np.uint8) for which in (rows, a.node[rows, PARENT])
    )
    return Batch(
        layout,
        digests,
        parents,
        a.node[rows, DEPTH].astype(np.int64),
        np.concatenate(tokens),
        np.concatenate([np.zeros(1, np.int64), np.cumsum([len(part) for part in tokens])]),
        ends,
        np.where(ends, (a.heat[rows, AT] * 1024).astype(np.int64) + 1, 0),
        places_of(books, layout, rows)[0],
    )


def unit_of(books: Books, layout: bytes, digest: bytes) -> Unit | None:
    """See ``HostStore.unit``."""
    with books.lock:
        n = books.unit_at(layout, digest)
        if n < 0:
            return None
        a = books.a
        rows = np.empty(int(a.node[n, DEPTH]) + 1, np.int64)
        nodes.chain_above(a, n, rows)
        blobs, needs = [books.blob(row) for row in rows.tolist()], books.needs_of(n)
        if needs is None or any(blob is None for blob in blobs):
            books.drop_unit(n)
            return None
        places, which = places_of(books, layout, rows)
        mine = np.zeros(len(which), np.bool_)
        for group, node, column, _ in needs.tolist():
            after = (places.rows > node) | ((places.rows == node) & (places.entries["column"] >= column))
            mine |= (places.entries["group"] == group) & after
        mine &= a.obj64[which, BORN] <= a.node64[n, SERIAL]
        places = places.take(mine)
        tokens = [
            blob[: 4 * int(a.node[row, TOKENS])].view(np.int32)
            for row, blob in zip(rows.tolist(), blobs, strict=True)
            if blob is not None
        ]
        digests = a.node64[rows, DIGEST_AT : DIGEST_AT + 4].copy().view(np.uint8)
        root = books.digest_of(int(a.node[rows[0], PARENT]))
    pinned = Pinned(books, places)
    if pinned.codes.any():
        pinned.release()
        return None
    keep = _Kept(books, pinned)
    objects = [
        NewObject(
            int(row), int(e["group"]), int(e["column"]), Grade(int(e["grade"])),
            Fill(int(e["length"]), keep.writer(i)), PayloadForm(int(e["form"])),
        )
        for i, (row, e) in enumerate(zip(places.rows, places.entries, strict=True))
    ]  # fmt: skip
    segment = len(tokens[0]) if len(tokens) > 1 else max(len(tokens[0]), 1)
    wants = [Need(group, node, count, column) for group, node, column, count in needs.tolist()]
    return Unit(layout, root, digests, np.concatenate(tokens), segment, objects, wants)


class _Kept:
    """Pinned objects of a unit; they are let go of when nobody refers to any of its payloads any more."""

    def __init__(self, books: Books, pinned: Pinned) -> None:
        self._books, self._pinned = books, pinned
        weakref.finalize(self, pinned.release)

    def writer(self, i: int) -> _Writer:
        return _Writer(self, i)

    def write(self, i: int, into: memoryview) -> None:
        pinned = self._pinned
        one = np.array([i])
        copy = Copy(self._books, pinned.only(one), np.frombuffer(into, np.uint8), np.zeros(1, np.int64), check=True)
        copy.run(lambda: False, None)
        if copy.results.any():
            pinned.give_up(np.arange(len(pinned.codes)) == i)
            raise StoreError("an object in host memory is not what was stored; it is not found again")


class _Writer:
    def __init__(self, kept: _Kept, i: int) -> None:
        self._kept, self._i = kept, i

    def __call__(self, into: memoryview) -> None:
        self._kept.write(self._i, into)
