"""Taking objects out of the index that cannot be read as they were stored."""

from __future__ import annotations

import numpy as np

from kvloom.tiers.disk.index import Index
from kvloom.tiers.disk.rows import layout_id, nodes, put_node, with_objects
from kvloom.tiers.values import Places
from kvloom.types import AnyArray

AT_ONCE = 64
"""Nodes in one transaction."""


def quarantine(index: Index, places: Places, reason: str) -> int:
    """These objects are not found again; returns how many of them still were.  An object stored anew is another one."""
    removed = 0
    keys = [row.tobytes() for row in places.digests]
    names = list(dict.fromkeys(keys))
    for begin in range(0, len(names), AT_ONCE):
        part = names[begin : begin + AT_ONCE]
        with index.write() as db:
            number = layout_id(db, places.layout)
            found = {} if number is None else nodes(db, number, part)
            for digest, node in found.items():
                mine = places.entries[[key == digest for key in keys]]
                bad = same_place(node.objects, mine)
                if not bad.any():
                    continue
                removed += int(bad.sum())
                put_node(db, with_objects(node, node.objects[~bad]))
                values = [
                    (int(e["extent"]), int(e["offset"]), reason, digest, int(e["group"]), int(e["column"]))
                    for e in node.objects[bad]
                ]
                db.executemany("INSERT OR REPLACE INTO quarantine VALUES (?, ?, ?, ?, ?, ?)", values)
    return removed


def same_place(entries: AnyArray, others: AnyArray) -> AnyArray:
    """bool ``[len(entries)]``: whether an entry lies where one of ``others`` lies."""
    there = {(int(e["extent"]), int(e["offset"])) for e in others}
    return np.array([(int(e["extent"]), int(e["offset"])) in there for e in entries], np.bool_)
