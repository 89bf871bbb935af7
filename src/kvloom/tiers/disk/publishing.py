"""Storing a unit: its new objects in one run, synced, then everything visible by one transaction.

Before the transaction nothing can be found; whatever fails before it leaves at most bytes that nobody refers to.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvloom.tiers.disk.format import HEADER, NEED, PLACE, BoundaryInfo, Manifest, NodeInfo
from kvloom.tiers.disk.index import Index, meta, row_sum, set_meta
from kvloom.tiers.disk.lookups import What, note
from kvloom.tiers.disk.reading import padded_lengths
from kvloom.tiers.disk.rows import NodeRow, layout_id, nodes, put_node, with_objects
from kvloom.tiers.disk.runs import Run
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
    missing: tuple[int, ...]
    """Positions of the nodes that are not stored."""
    needs: AnyArray
    complete: bool
    known: bool
    held: int
    """Bytes of what is stored of the chain already."""
    now: int
    """The logical clock."""

    @property
    def growth(self) -> int:
        """What the index may grow by."""
        rows = sum(4 * len(self.tokens(i)) + 200 for i in self.missing) + 48 * len(self.objects)
        touched = {item.node for item in self.objects}.union(self.missing)
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
        which = np.array([item.node for item in self.objects], np.int64)
        rows = self.unit.digests[which].reshape(-1, DIGEST)
        return Run.of(self.unit.layout, rows, self.objects, Manifest(infos, ends, len(self.objects), 0))


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
        needs = needs_array(list(unit.needs))
        end = stored.get(chain[-1])
        row, now = None, meta(db, "clock") + 1
        if end is not None:
            row = db.execute("SELECT needs FROM boundaries WHERE node = ?", (end.id,)).fetchone()
    where, entries = chain_objects(chain, stored)
    grades = dict(
        zip(
            zip(where.tolist(), entries["group"].tolist(), entries["column"].tolist(), strict=True),
            entries["grade"].tolist(),
            strict=True,
        )
    )
    fresh = tuple(
        item for item in unit.objects if grades.get((item.node, item.group, item.column), -1) < int(item.grade)
    )
    keys = set(grades).union((item.node, item.group, item.column) for item in fresh)
    table = np.array(sorted(keys), np.int64).reshape(-1, 3)
    complete = satisfied(needs, table[:, 0], table[:, 1], table[:, 2])
    known = complete and not fresh and row is not None and row[0] == needs.tobytes()
    missing = tuple(i for i, digest in enumerate(chain) if digest not in stored)
    held = int((HEADER + padded_lengths(entries)).sum())
    return Draft(unit, chain, fresh, missing, needs, complete, known, held, now)


def enter(db: sqlite3.Connection, made: Draft, places: AnyArray, extent: int) -> bool:
    """Make a written unit visible, within a transaction; False (and the transaction must go back) if it lacks objects.

    What another process stored meanwhile stays unless ours is of a better grade.
    """
    unit, chain = made.unit, made.chain
    number = layout_id(db, unit.layout, make=True)
    assert number is not None
    stored = nodes(db, number, chain)
    changed: dict[int, NodeRow] = {
        i: NodeRow(
            number, digest, made.parent(i), i, made.tokens(i).astype("<i4").tobytes(), np.empty(0, PLACE), extent
        )
        for i, digest in enumerate(chain)
        if digest not in stored
    }
    owners = np.array([item.node for item in made.objects], np.int64)
    for i in np.unique(owners).tolist():
        node = changed.get(i) or stored[chain[i]]
        changed[i] = with_objects(node, merge(node.objects, places[owners == i]))
    for node in changed.values():
        put_node(db, node)
    after = {**stored, **{node.digest: node for node in changed.values()}}
    where, entries = chain_objects(chain, after)
    if not satisfied(made.needs, where, entries["group"].astype(np.int64), entries["column"].astype(np.int64)):
        return False
    end = db.execute("SELECT id FROM nodes WHERE layout = ? AND digest = ?", (number, chain[-1])).fetchone()[0]
    put_boundary(db, end, made.needs, touched=tick(db), hits=0, home=extent)
    set_meta(db, "published", meta(db, "published") + 1)
    note(db, What.PUBLISHED, unit.layout, chain[-1])
    return True


def merge(old: AnyArray, new: AnyArray) -> AnyArray:
    """Both lists of ``PLACE``; of two for the same column the one of better grade, else the old one."""
    if not len(old):
        return new[np.lexsort((new["column"], new["group"]))]
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
