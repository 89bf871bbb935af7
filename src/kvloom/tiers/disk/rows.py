"""Rows of nodes and layouts, checked as they are read."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from kvloom.tiers.disk.format import PLACE
from kvloom.tiers.disk.index import IndexCorruptError, row_sum
from kvloom.types import AnyArray

PARAMETERS = 500
"""Digests in one query."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node as the index has it.  ``objects`` is ``PLACE[n]``; ``home``: the extent whose manifest has the node."""

    layout: int
    digest: bytes
    parent: bytes
    depth: int
    tokens: bytes
    objects: AnyArray
    home: int
    id: int = -1

    def sum(self) -> int:
        """Checksum of everything but the row's number."""
        parts = (self.digest, self.parent, self.tokens, self.objects.tobytes())
        return row_sum(self.layout, self.depth, self.home, *parts)


def layout_id(db: sqlite3.Connection, digest: bytes, *, make: bool = False) -> int | None:
    """The number of a layout; None when nothing of it was ever stored."""
    row = db.execute("SELECT id, sum FROM layouts WHERE digest = ?", (digest,)).fetchone()
    if row is None:
        if not make:
            return None
        number = next_layout(db)
        db.execute("INSERT INTO layouts VALUES (?, ?, ?)", (number, digest, row_sum(number, digest)))
        return number
    if row[1] != row_sum(row[0], digest):
        raise IndexCorruptError("a layout of the index is damaged")
    return int(row[0])


def next_layout(db: sqlite3.Connection) -> int:
    """The number that a new layout gets."""
    return int(db.execute("SELECT coalesce(max(id), 0) + 1 FROM layouts").fetchone()[0])


def layouts(db: sqlite3.Connection) -> dict[int, bytes]:
    """Every layout by number."""
    found = {}
    for number, digest, check in db.execute("SELECT id, digest, sum FROM layouts"):
        if check != row_sum(number, digest):
            raise IndexCorruptError("a layout of the index is damaged")
        found[number] = digest
    if len(set(found.values())) < len(found):
        raise IndexCorruptError("a layout is in the index twice, so a key of it is damaged")
    return found


_NODE_COLUMNS = "id, layout, digest, parent, depth, tokens, objects, home, sum"


def node_of(row: tuple[int, int, bytes, bytes, int, bytes, bytes, int, int]) -> NodeRow:
    """A checked row of ``nodes``."""
    try:
        node = NodeRow(row[1], row[2], row[3], row[4], row[5], np.frombuffer(row[6], PLACE), row[7], row[0])
        good = node.sum() == row[8]
    except (TypeError, ValueError, AttributeError, OverflowError):
        good = False
    if not good:
        raise IndexCorruptError("a node of the index is damaged")
    return node


def nodes(db: sqlite3.Connection, layout: int, digests: Iterable[bytes]) -> dict[bytes, NodeRow]:
    """The known ones of some nodes."""
    asked, found = list(digests), {}
    for begin in range(0, len(asked), PARAMETERS):
        part = asked[begin : begin + PARAMETERS]
        marks = ",".join("?" * len(part))
        query = f"SELECT {_NODE_COLUMNS} FROM nodes WHERE layout = ? AND digest IN ({marks})"  # noqa: S608
        for row in db.execute(query, (layout, *part)):
            node = node_of(row)
            found[node.digest] = node
    return found


def every_node(db: sqlite3.Connection, after: int = -1, limit: int = -1) -> list[NodeRow]:
    """Nodes by number, beginning after ``after``."""
    query = f"SELECT {_NODE_COLUMNS} FROM nodes WHERE id > ? ORDER BY id LIMIT ?"  # noqa: S608
    return [node_of(row) for row in db.execute(query, (after, limit))]


_INSERT = "INSERT INTO nodes (layout, digest, parent, depth, tokens, objects, home, sum) VALUES (?,?,?,?,?,?,?,?)"


def put_nodes(db: sqlite3.Connection, changed: Iterable[tuple[NodeRow, int]]) -> None:
    """Write nodes with their sums: new ones (``id`` -1), and over what is there."""
    rows = [(n.layout, n.digest, n.parent, n.depth, n.tokens, n.objects.tobytes(), n.home, s, n.id) for n, s in changed]
    db.executemany(_INSERT, [row[:8] for row in rows if row[8] < 0])
    db.executemany("UPDATE nodes SET objects = ?, home = ?, sum = ? WHERE id = ?", [r[5:] for r in rows if r[8] >= 0])


def put_node(db: sqlite3.Connection, node: NodeRow) -> None:
    """Write one."""
    put_nodes(db, [(node, node.sum())])


def with_objects(node: NodeRow, objects: AnyArray) -> NodeRow:
    """The node with another list of objects."""
    return replace(node, objects=objects)
