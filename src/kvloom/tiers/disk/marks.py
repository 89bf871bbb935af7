"""Which objects go with which boundary: the order of eviction, worked out over the whole index at once.

Boundaries are put in order of their value.  An object goes with the last boundary that needs it, so for every length of
the list of victims it is known what would be free.  A group's objects serve every deeper boundary that asks for them,
which is what keeps a chain complete for whatever ends below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.tiers.disk.format import HEADER, NEED, NODE, PLACE
from kvloom.tiers.disk.index import Index, IndexCorruptError, meta, row_sum
from kvloom.tiers.disk.pieces import padded_lengths
from kvloom.tiers.disk.rows import every_node
from kvloom.types import AnyArray, IntArray

BATCH = 2048
NEVER = np.iinfo(np.int64).max
HITS_THAT_COUNT = 4


@dataclass(frozen=True, slots=True)
class Keep:
    """Objects that must not go although no boundary needs them yet: those of a unit that is being stored."""

    layout: bytes
    chain: tuple[bytes, ...]
    needs: AnyArray


@dataclass(frozen=True, slots=True)
class Boundary:
    """A unit that may be evicted."""

    node: int
    """Row of the snapshot."""
    id: int
    """Number of the node in the index."""
    needs: AnyArray
    touched: int
    hits: int
    home: int

    def value(self, boundaries: int) -> float:
        """What comes last is worth most; a hit counts like having been used half a round later."""
        return self.touched + min(self.hits, HITS_THAT_COUNT) * boundaries / 2


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The index at one moment, by columns.

    Attributes:
        published: number of publications so far: nothing new needs anything while it stays the same.
        ids, parents, depth, layouts, homes: int64 ``[n]``; a parent is a row of the snapshot or -1.
        token_bytes: int64 ``[n]``.
        rows: ``(layout, digest)`` to row, in the order of the rows.
        above: digests of the parents, also of those that are not there.
        entries: ``PLACE`` of all nodes one after the other, those of node i are
            ``[starts[i], starts[i + 1])``.
        owner: int64, node of every entry.
        boundaries: all of them, those that go first first.
    """

    published: int
    ids: IntArray
    parents: IntArray
    depth: IntArray
    layouts: IntArray
    homes: IntArray
    token_bytes: IntArray
    rows: dict[tuple[int, bytes], int]
    above: tuple[bytes, ...]
    entries: AnyArray
    starts: IntArray
    owner: IntArray
    boundaries: tuple[Boundary, ...]

    @property
    def stored(self) -> IntArray:
        """Bytes of every entry in its extent."""
        return HEADER + padded_lengths(self.entries)


def snapshot(index: Index) -> Snapshot:
    """Read the whole index; every row is checked."""
    found, after = [], -1
    with index.read() as db:
        while part := every_node(db, after, BATCH):
            after = part[-1].id
            found += [(r.id, r.layout, r.digest, r.parent, r.depth, r.home, len(r.tokens), r.objects) for r in part]
        published = meta(db, "published")
        ends = db.execute("SELECT node, needs, touched, hits, home, sum FROM boundaries").fetchall()
    ids, layouts, digests, parents, depth, homes, token_bytes, lists = zip(*found, strict=True) if found else [()] * 8
    rows = {(layout, digest): i for i, (layout, digest) in enumerate(zip(layouts, digests, strict=True))}
    if len(rows) < len(ids):
        raise IndexCorruptError("a node is in the index twice, so a key of it is damaged")
    above = [rows.get((layout, parent), -1) for layout, parent in zip(layouts, parents, strict=True)]
    # A chain goes up one step at a time, whatever the index says, so every walk ends.
    above = [up if up < 0 or depth[up] == depth[i] - 1 else -1 for i, up in enumerate(above)]
    counts = np.array([len(entries) for entries in lists], np.int64)
    by_id = {number: i for i, number in enumerate(ids)}
    boundaries = []
    for node, needs, touched, hits, home, check in ends:
        numbers = all(isinstance(value, int) and 0 <= value < 1 << 62 for value in (node, touched, hits))
        if not numbers or check != row_sum(node, needs, home):
            raise IndexCorruptError("a boundary of the index is damaged")
        if node in by_id:
            boundaries.append(Boundary(by_id[node], node, np.frombuffer(needs, NEED), touched, hits, home))
    boundaries.sort(key=lambda b: (b.value(len(ends)), -int(depth[b.node])))
    columns = [np.array(column, np.int64) for column in (ids, above, depth, layouts, homes, token_bytes)]
    return Snapshot(
        published,
        columns[0],
        columns[1],
        columns[2],
        columns[3],
        columns[4],
        columns[5],
        rows,
        parents,
        np.concatenate([np.empty(0, PLACE), *lists]),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        np.repeat(np.arange(len(counts)), counts),
        tuple(boundaries),
    )


@dataclass(frozen=True, slots=True)
class Marks:
    """How long everything is needed: until the boundary of this number goes, -1 for what nobody needs.

    ``entries`` int64 as the entries of the snapshot, ``nodes`` int64 as its nodes.
    """

    entries: npt.NDArray[np.int64]
    nodes: npt.NDArray[np.int64]

    def victims(self, snap: Snapshot, goal: int) -> int:
        """How many boundaries have to go until objects of at least ``goal`` bytes are needed no more."""
        freed = np.bincount(self.entries + 1, weights=snap.stored, minlength=len(snap.boundaries) + 2)
        return int(np.searchsorted(np.cumsum(freed)[: len(snap.boundaries) + 1], goal))


def mark(snap: Snapshot, keep: Keep | None, keep_layout: int | None) -> Marks:
    """Work out the marks; ``keep`` counts as a boundary that is worth more than all others."""
    groups, group = np.unique(snap.entries["group"], return_inverse=True)
    position = (snap.depth[snap.owner] << 32) | snap.entries["column"].astype(np.int64)
    entries = np.full(len(snap.entries), -1, np.int64)
    nodes = np.full(len(snap.ids), -1, np.int64)
    cover = np.full((len(snap.ids), len(groups)), NEVER, np.int64)

    def walk(number: int, node: int, needs: AnyArray) -> None:
        first = np.full(len(groups), NEVER, np.int64)
        for need in needs:
            at = int(np.searchsorted(groups, need["group"]))
            if at < len(groups) and groups[at] == need["group"]:
                first[at] = int(need["first_node"]) << 32 | int(need["first_column"])
        while node >= 0:
            # What a more valuable boundary asked for from here upwards is marked already, and so is all above it.
            first[(first >= cover[node]) | (first >> 32 > snap.depth[node])] = NEVER
            active = bool((first != NEVER).any())
            if not active and nodes[node] >= 0:
                return
            if nodes[node] < 0:
                nodes[node] = number
            if active:
                np.minimum(cover[node], first, out=cover[node])
                part = slice(snap.starts[node], snap.starts[node + 1])
                wanted = (position[part] >= first[group[part]]) & (entries[part] < 0)
                entries[part][wanted] = number
            node = int(snap.parents[node])

    if keep is not None and keep_layout is not None:
        known = [snap.rows[keep_layout, digest] for digest in keep.chain if (keep_layout, digest) in snap.rows]
        if known:
            walk(len(snap.boundaries), known[-1], keep.needs)
    for number in range(len(snap.boundaries) - 1, -1, -1):
        walk(number, snap.boundaries[number].node, snap.boundaries[number].needs)
    return Marks(entries, nodes)


def live_bytes(snap: Snapshot, marks: Marks, gone: int) -> dict[int, int]:
    """Bytes of every extent that are needed when the first ``gone`` boundaries are not there: objects and manifests."""
    alive, nodes = marks.entries >= gone, marks.nodes >= gone
    total: dict[int, int] = {}
    homes = snap.homes[nodes]
    for extents, sizes in (
        (snap.entries["extent"][alive].astype(np.int64), snap.stored[alive]),
        (homes, NODE.itemsize + snap.token_bytes[nodes]),
    ):
        names, at = np.unique(extents, return_inverse=True)
        for name, size in zip(names.tolist(), np.bincount(at, weights=sizes).tolist(), strict=True):
            total[name] = total.get(name, 0) + int(size)
    for boundary in snap.boundaries[gone:]:
        total[boundary.home] = total.get(boundary.home, 0) + 64 + boundary.needs.nbytes
    return total
