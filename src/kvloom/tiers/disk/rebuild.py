"""A new index out of the extents: every whole run in them is taken over, and the units that are complete by that.

Payloads are not read: they are verified whenever they are, as ever.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import numpy as np

from kvloom.errors import FormatError
from kvloom.tiers.disk.directory import Directory
from kvloom.tiers.disk.extents import ExtentRow, put_extent
from kvloom.tiers.disk.files import FileOps
from kvloom.tiers.disk.format import PLACE, BoundaryInfo
from kvloom.tiers.disk.index import SEALED, Index, meta, set_meta
from kvloom.tiers.disk.marks import Boundary, Snapshot, snapshot
from kvloom.tiers.disk.publishing import merge, put_boundary, satisfied
from kvloom.tiers.disk.rows import NodeRow, layout_id, nodes, put_node, with_objects
from kvloom.tiers.disk.scanning import ScannedRun, extent_header, runs
from kvloom.tiers.disk.space import MINIMUM, Cap, growth, in_use

_LOG = logging.getLogger("kvloom.disk")

Ends = dict[tuple[bytes, bytes], tuple[BoundaryInfo, int]]


@dataclass(slots=True)
class Rebuilt:
    """What a new index was made of."""

    extents: int = 0
    nodes: int = 0
    objects: int = 0
    units: int = 0
    lost: int = 0
    """Boundaries that lack something, and extents that no index fits beside under the cap."""


def rebuild(index: Index, directory: Directory, ops: FileOps, capacity: int | None) -> Rebuilt:
    """Fill a new, empty index; nobody else uses the store meanwhile.

    Raises OSError, and FormatError for extents of a newer kvloom.
    """
    done, ends, caps, total = Rebuilt(), Ends(), [MINIMUM], 0
    files = directory.extent_files()
    for extent, path in sorted(files.items(), key=lambda item: item[1].stat().st_mtime_ns):
        size = path.stat().st_size
        with os.fdopen(ops.open(path, os.O_RDONLY), "rb") as file:
            try:
                number, reserved, cap = extent_header(file, path)
                if number != extent:
                    raise FormatError(f"{path} is extent {number:016x} under another name")
            except FormatError as error:
                if "newer" in str(error):
                    raise
                _LOG.warning("%s; it is removed", error)
                ops.unlink(path)
                continue
            caps.append(cap)
            total += max(size, reserved)
            with index.write() as db:
                put_extent(db, ExtentRow(extent, SEALED, max(size, reserved), size))
                set_meta(db, "capacity", capacity or max(*caps, total))
            done.extents += 1
            for run in runs(file, extent, path):
                if not _take(index, run, extent, ends, done):
                    done.lost += 1
                    break
    if capacity is not None or files:
        with index.write() as db:
            set_meta(db, "capacity", capacity or max(*caps, total))
    _take_boundaries(index, ends, done)
    if files:
        _LOG.warning(
            "the index of %s was damaged; a new one was made from %d extents: %d units with %d objects, %d units lost",
            directory.path,
            done.extents,
            done.units,
            done.objects,
            done.lost,
        )
    return done


def _take(index: Index, run: ScannedRun, extent: int, ends: Ends, done: Rebuilt) -> bool:
    """Enter the nodes and objects of a run; False when the index may not grow further."""
    for boundary in run.manifest.boundaries:
        key = run.layout, boundary.node
        if key not in ends or ends[key][0].touched <= boundary.touched:
            ends[key] = boundary, extent
    owners: dict[bytes, list[int]] = {}
    for i, digest in enumerate(run.nodes):
        owners.setdefault(digest, []).append(i)
    infos = {node.digest: node for node in run.manifest.nodes}
    names = list(infos | dict.fromkeys(owners))
    with index.write() as db:
        cap = Cap(meta(db, "capacity"))
        rows = sum(4 * len(node.tokens) + 200 for node in infos.values()) + run.places.nbytes
        if in_use(db, index) + growth(len(names), rows) > cap.bytes - cap.slack // 2:
            return False
        number = layout_id(db, run.layout, make=True)
        assert number is not None
        known = nodes(db, number, names)
        for digest in names:
            node = known.get(digest)
            if node is None and digest in infos:
                info = infos[digest]
                tokens = info.tokens.astype("<i4").tobytes()
                node = NodeRow(number, digest, info.parent, info.depth, tokens, np.empty(0, PLACE), extent)
                done.nodes += 1
            # An object may lie before its node: compaction moves them apart.
            if node is None:
                node = NodeRow(number, digest, bytes(32), 1 << 31, b"", np.empty(0, PLACE), 0)
            elif digest in infos and node.home == 0:
                info = infos[digest]
                tokens = info.tokens.astype("<i4").tobytes()
                db.execute("DELETE FROM nodes WHERE id = ?", (node.id,))
                node = NodeRow(number, digest, info.parent, info.depth, tokens, node.objects, extent)
                done.nodes += 1
            mine = run.places[owners.get(digest, [])]
            done.objects += len(mine)
            put_node(db, with_objects(node, merge(node.objects, mine)))
    return True


def _take_boundaries(index: Index, ends: Ends, done: Rebuilt) -> None:
    """Enter the boundaries that have all that they need, oldest first."""
    with index.write() as db:
        db.execute("DELETE FROM nodes WHERE home = 0")  # objects whose node was lost
    snap = snapshot(index)
    with index.write() as db:
        numbers = {layout: layout_id(db, layout) for layout, _ in ends}
    order = sorted(ends.items(), key=lambda item: item[1][0].touched)
    clock = 0
    for begin in range(0, len(order), 64):
        with index.write() as db:
            for (layout, digest), (info, home) in order[begin : begin + 64]:
                row = snap.rows.get((numbers[layout] or 0, digest))
                if row is None or not complete(snap, Boundary(row, int(snap.ids[row]), info.needs, 0, 0, home)):
                    done.lost += 1
                    continue
                clock += 1
                put_boundary(db, int(snap.ids[row]), info.needs, touched=clock, hits=info.hits, home=home)
                done.units += 1
            set_meta(db, "clock", clock)
            set_meta(db, "published", done.units)


def complete(snap: Snapshot, boundary: Boundary) -> bool:
    """Whether the chain of a boundary goes up to its first node and has all objects that the boundary needs."""
    chain, row = [], boundary.node
    while row >= 0:
        chain.append(row)
        row = int(snap.parents[row])
    if snap.depth[chain[-1]] != 0:
        return False
    which = np.concatenate([np.arange(snap.starts[row], snap.starts[row + 1]) for row in chain])
    entries, depth = snap.entries[which], snap.depth[snap.owner[which]]
    return satisfied(boundary.needs, depth, entries["group"].astype(np.int64), entries["column"].astype(np.int64))
