"""Storing a unit: its new objects in one run, synced, then everything visible by one transaction.

Before the transaction nothing can be found; whatever fails before it leaves at most bytes that nobody refers to.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvloom.tiers.disk.format import HEADER, NEED, PLACE, BoundaryInfo, Manifest, NodeInfo
from kvloom.tiers.disk.index import Index, add_meta, meta, row_sum, set_meta
from kvloom.tiers.disk.pieces import padded_lengths
from kvloom.tiers.disk.rows import NodeRow, layout_id, nodes, put_nodes, with_objects
from kvloom.tiers.disk.runs import Run, unplaced
from kvloom.tiers.disk.space import growth
from kvloom.tiers.values import DIGEST, Need, NewObject, Unit
from kvloom.types import AnyArray

Stored = Mapping[bytes, NodeRow]


@dataclass(frozen=True, slots=True)
class Draft:
    """A unit without what is stored already."""

    unit: Unit
    chain: tuple[bytes, ...]
    objects: tuple[NewObject, ...]
    owners: AnyArray
    """int64: the node of every object."""
    what: AnyArray
    """``unplaced`` of the objects."""
    missing: tuple[int, ...]
    """Positions of the nodes that are not stored."""
    needs: AnyArray
    complete: bool
    """Whether all that the boundary needs is there, and nothing of the chain is stored as something else."""
    known: bool
    held: int
    """Bytes of what is stored of the chain already."""
    now: int
    """The logical clock."""

    @property
    def growth(self) -> int:
        """What the index may grow by."""
        rows = sum(4 * len(self.tokens(i)) + 200 for i in self.missing) + 48 * len(self.objects)
        touched = set(self.owners.tolist()).union(self.missing)
        return growth(len(touched) + 2, rows + 16 * len(self.needs))

    def tokens(self, node: int) -> AnyArray:
        """Tokens of a node of the chain."""
        segment = self.unit.segment
        return self.unit.tokens[node * segment : (node + 1) * segment]

    def parent(self, node: int) -> bytes:
        """Digest of what a node follows."""
        return self.chain[node - 1] if node else self.unit.root

    def run(self) -> Run:
        """What has to be written."""
        infos = [NodeInfo(self.chain[i], self.parent(i), i, self.tokens(i)) for i in self.missing]
        ends = [BoundaryInfo(self.chain[-1], self.needs, touched=self.now)]
        rows = self.unit.digests[self.owners].reshape(-1, DIGEST)
        return Run.of(self.unit.layout, rows, self.objects, self.what, Manifest(infos, ends, len(self.objects), 0))


def needs_array(needs: tuple[Need, ...] | list[Need]) -> AnyArray:
    """``NEED[n]``, in a fixed order."""
    rows = sorted((need.group, need.first_node, need.first_column, need.count) for need in needs)
    return np.array(rows, NEED) if rows else np.empty(0, NEED)


def satisfied(needs: AnyArray, node: AnyArray, group: AnyArray, column: AnyArray) -> bool:
    """Whether objects, given as arrays of one length without repetition, are all that ``needs`` asks for."""
    for need in needs:
        later = (node > need["first_node"]) | ((node == need["first_node"]) & (column >= need["first_column"]))
        if int(((group == need["group"]) & later).sum()) < int(need["count"]):
            return False
    return True


def chain_objects(chain: tuple[bytes, ...], stored: Stored) -> tuple[AnyArray, AnyArray]:
    """Position in the chain and ``PLACE`` of every stored object of it."""
    rows = [(i, stored[digest].objects) for i, digest in enumerate(chain) if digest in stored]
    if not rows:
        return np.empty(0, np.int64), np.empty(0, PLACE)
    counts = [len(objects) for _, objects in rows]
    return np.repeat([i for i, _ in rows], counts), np.concatenate([objects for _, objects in rows])


def draft(index: Index, unit: Unit) -> Draft:
    """What of a unit is new at this moment."""
    chain = tuple(row.tobytes() for row in unit.digests)
    with index.read() as db:
        number = layout_id(db, unit.layout)
        stored = {} if number is None else nodes(db, number, chain)
        fits = agree(unit, chain, stored)
        needs = needs_array(list(unit.needs))
        end = stored.get(chain[-1])
        row, now = None, meta(db, "clock") + 1
        if end is not None:
            row = db.execute("SELECT needs FROM boundaries WHERE node = ?", (end.id,)).fetchone()
    where, entries = chain_objects(chain, stored)
    fresh, owners = tuple(unit.objects), np.fromiter((item.node for item in unit.objects), np.int64)
    added = np.ones(len(fresh), np.bool_)
    if len(where):
        grades = dict(zip(_keys(where, entries), entries["grade"].tolist(), strict=True))
        have = [grades.get((item.node, item.group, item.column), -1) for item in fresh]
        better = np.array([old < int(item.grade) for old, item in zip(have, fresh, strict=True)], np.bool_)
        fresh = tuple(item for item, take in zip(fresh, better.tolist(), strict=True) if take)
        owners, added = owners[better], np.array(have, np.int64)[better] < 0
    what = unplaced(fresh)
    complete = fits and satisfied(
        needs,
        np.concatenate([where, owners[added]]),
        *(np.concatenate([entries[name], what[name][added]]).astype(np.int64) for name in ("group", "column")),
    )
    known = complete and not fresh and row is not None and row[0] == needs.tobytes()
    missing = tuple(i for i, digest in enumerate(chain) if digest not in stored)
    held = int((HEADER + padded_lengths(entries)).sum())
    return Draft(unit, chain, fresh, owners, what, missing, needs, complete, known, held, now)


def agree(unit: Unit, chain: tuple[bytes, ...], stored: Stored) -> bool:
    """Whether every node of a chain is another one, and those that are stored are where it has them, with its tokens.

    Digests of content cannot do otherwise; those of an archive, or of a caller who makes mistakes, can.
    """
    tokens, size = unit.tokens.astype("<i4").tobytes(), 4 * unit.segment
    if len(set(chain)) < len(chain):
        return False
    for i, digest in enumerate(chain):
        node = stored.get(digest)
        if node is None:
            continue
        above = chain[i - 1] if i else unit.root
        if node.depth != i or node.parent != above or node.tokens != tokens[i * size : (i + 1) * size]:
            return False
    return True


def _keys(where: AnyArray, entries: AnyArray) -> Iterator[tuple[int, int, int]]:
    return zip(where.tolist(), entries["group"].tolist(), entries["column"].tolist(), strict=True)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a unit changes in the index: rows of nodes to write, with their checksums.

    None when it lacks objects that its boundary needs, or nodes of it are stored as something else meanwhile.
    """

    changed: tuple[tuple[NodeRow, int], ...] | None


def entry(db: sqlite3.Connection, made: Draft, places: AnyArray, extent: int, number: int) -> Entry:
    """Work out what a written unit changes; ``number`` is that of its layout.

    What another process stored meanwhile stays unless ours is of a better grade.
    """
    chain, stored = made.chain, nodes(db, number, made.chain)
    order = np.lexsort((places["column"], places["group"], made.owners))
    fresh = dict(zip(*_grouped(made.owners[order], places[order]), strict=True))
    tokens, size = made.unit.tokens.astype("<i4").tobytes(), 4 * made.unit.segment
    changed, after, none = list[NodeRow](), dict(stored), np.empty(0, PLACE)
    for i, digest in enumerate(chain):
        node, mine = stored.get(digest), fresh.get(i, none)
        if node is None:
            said = tokens[i * size : (i + 1) * size]
            changed.append(NodeRow(number, digest, made.parent(i), i, said, mine, extent))
        elif len(mine):
            changed.append(with_objects(node, merge(node.objects, mine)))
        else:
            continue
        after[digest] = changed[-1]
    where, entries = chain_objects(chain, after)
    whole = satisfied(made.needs, where, entries["group"].astype(np.int64), entries["column"].astype(np.int64))
    whole = whole and agree(made.unit, chain, stored)
    return Entry(tuple((node, node.sum()) for node in changed) if whole else None)


def _grouped(keys: AnyArray, values: AnyArray) -> tuple[list[int], list[AnyArray]]:
    """Each of the sorted ``keys`` once, and the values that go with it."""
    begins = np.flatnonzero(np.diff(keys, prepend=-1)).tolist()
    ends = [*begins[1:], len(keys)] if begins else []
    return keys[begins].tolist(), [values[begin:end] for begin, end in zip(begins, ends, strict=True)]


def enter(
    db: sqlite3.Connection, made: Draft, changed: tuple[tuple[NodeRow, int], ...], number: int, extent: int, size: int
) -> None:
    """Make a written unit visible, within a transaction that begins with what ``entry`` saw; ``size``: of its run."""
    chain = made.chain
    put_nodes(db, changed)
    end = db.execute("SELECT id FROM nodes WHERE layout = ? AND digest = ?", (number, chain[-1])).fetchone()[0]
    put_boundary(db, end, made.needs, touched=tick(db), hits=0, home=extent)
    add_meta(db, "published", 1)
    add_meta(db, "payload_published", int(made.what["length"].sum(dtype=np.int64)))
    add_meta(db, "bytes_published", size)


def merge(old: AnyArray, new: AnyArray) -> AnyArray:
    """Both lists of ``PLACE``; of two for the same column the one of better grade, else the old one."""
    kept: dict[tuple[int, int], AnyArray] = {(int(e["group"]), int(e["column"])): e for e in old}
    for entry in new:
        key = int(entry["group"]), int(entry["column"])
        if key not in kept or kept[key]["grade"] < entry["grade"]:
            kept[key] = entry
    return np.array([kept[key] for key in sorted(kept)], PLACE)


def tick(db: sqlite3.Connection) -> int:
    """The next moment of the logical clock."""
    now = meta(db, "clock") + 1
    set_meta(db, "clock", now)
    return now


def put_boundary(db: sqlite3.Connection, node: int, needs: AnyArray, *, touched: int, hits: int, home: int) -> None:
    """Write a boundary, over one that is there."""
    blob = needs.astype(NEED, copy=False).tobytes()
    values = (node, blob, touched, hits, home, row_sum(node, blob, home))
    db.execute("INSERT OR REPLACE INTO boundaries VALUES (?, ?, ?, ?, ?, ?)", values)
