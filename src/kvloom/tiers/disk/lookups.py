"""Finding what is stored: of a chain, and of everything."""

from __future__ import annotations

import sqlite3

import numpy as np

from kvloom.tiers.disk.format import PLACE
from kvloom.tiers.disk.index import Index, has_parent_index
from kvloom.tiers.disk.rows import PARAMETERS, NodeRow, every_node, layout_id, layouts, nodes
from kvloom.tiers.values import DIGEST, MAX_NODE_TOKENS, MOST_TAILS, Batch, Digests, Found, Places, no_places
from kvloom.types import AnyArray

BATCH = 1024


def _stack(parts: list[bytes]) -> Digests:
    return np.frombuffer(b"".join(parts), np.uint8).reshape(-1, DIGEST)


def _places(layout: bytes, rows: list[NodeRow], at: list[int]) -> Places:
    if not rows:
        return no_places(layout, PLACE)
    counts = np.array([len(row.objects) for row in rows], np.int64)
    entries = np.concatenate([row.objects for row in rows]).astype(PLACE, copy=False)
    which = np.repeat(np.arange(len(rows)), counts)
    return Places(layout, _stack([row.digest for row in rows])[which], entries, np.array(at, np.int64)[which])


def _boundaries(db: sqlite3.Connection, ids: list[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for begin in range(0, len(ids), PARAMETERS):
        part = ids[begin : begin + PARAMETERS]
        query = f"SELECT node, touched FROM boundaries WHERE node IN ({','.join('?' * len(part))})"  # noqa: S608
        found.update(db.execute(query, part).fetchall())
    return found


def _tails(db: sqlite3.Connection, layout: int, row: int, parent: bytes, below: int) -> AnyArray:
    """Token counts of units that end at children of a node, newest first."""
    if not has_parent_index(db):
        return np.empty((0, 2), np.int32)
    found = db.execute(
        "SELECT length(n.tokens) / 4 AS size, max(b.touched) AS moment FROM nodes n JOIN boundaries b ON b.node = n.id "
        "WHERE n.layout = ? AND n.parent = ? AND length(n.tokens) < ? GROUP BY size ORDER BY moment DESC LIMIT ?",
        (layout, parent, 4 * below, MOST_TAILS),
    ).fetchall()
    return np.array([(row, size) for size, _ in found], np.int32).reshape(-1, 2)


def lookup(index: Index, layout: bytes, digests: Digests, root: bytes | None = None) -> Found:
    """What is stored of the nodes ``digests``; see ``DiskStore.lookup``."""
    asked = [row.tobytes() for row in digests]
    known, boundary = np.zeros(len(asked), np.bool_), np.zeros(len(asked), np.bool_)
    with index.read() as db:
        number = layout_id(db, layout)
        found = {} if number is None else nodes(db, number, asked)
        ends = _boundaries(db, [row.id for row in found.values()])
        deepest = max((i for i, digest in enumerate(asked) if digest in found), default=-1)
        tails = np.empty((0, 2), np.int32)
        if number is not None and deepest >= 0:
            tails = _tails(db, number, deepest, asked[deepest], len(found[asked[deepest]].tokens) // 4)
        elif number is not None and root is not None:
            tails = _tails(db, number, -1, root, MAX_NODE_TOKENS + 1)
    rows, at = [], []
    for i, digest in enumerate(asked):
        row = found.get(digest)
        if row is not None:
            known[i], boundary[i] = True, row.id in ends
            rows.append(row)
            at.append(i)
    return Found(known, boundary, _places(layout, rows, at), tails)


def catalogue(index: Index, after: int) -> tuple[int, list[Batch]]:
    """Some nodes after number ``after``, by layout, and the last number; nothing at the end."""
    with index.read() as db:
        part = every_node(db, after, BATCH)
        names, ends = layouts(db), _boundaries(db, [row.id for row in part])
    batches = []
    for number in sorted({row.layout for row in part}):
        rows = [row for row in part if row.layout == number]
        batches.append(_batch(names[number], rows, ends))
    return (part[-1].id if part else after), batches


def _batch(layout: bytes, rows: list[NodeRow], ends: dict[int, int]) -> Batch:
    counts = np.array([len(row.tokens) // 4 for row in rows], np.int64)
    return Batch(
        layout,
        _stack([row.digest for row in rows]),
        _stack([row.parent for row in rows]),
        np.array([row.depth for row in rows], np.int64),
        np.frombuffer(b"".join(row.tokens for row in rows), "<i4").astype(np.int32, copy=False),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        np.array([row.id in ends for row in rows], np.bool_),
        np.array([ends.get(row.id, 0) for row in rows], np.int64),
        _places(layout, rows, list(range(len(rows)))),
    )
