"""Compaction: what is still needed of an extent is copied, checked on the way, and its new places are published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvloom.tiers.disk.extents import extent_rows, put_extent
from kvloom.tiers.disk.format import NEED, PLACE, BoundaryInfo, Manifest, NodeInfo
from kvloom.tiers.disk.index import OPEN, Index, add_meta
from kvloom.tiers.disk.marks import Boundary, Marks, Snapshot
from kvloom.tiers.disk.publishing import put_boundary
from kvloom.tiers.disk.quarantine import quarantine
from kvloom.tiers.disk.reading import Reader
from kvloom.tiers.disk.rows import layouts, nodes, put_node
from kvloom.tiers.disk.runs import Run, unplaced
from kvloom.tiers.disk.sinks import Handing
from kvloom.tiers.disk.space import Cap
from kvloom.tiers.disk.writer import Writer
from kvloom.tiers.values import NewObject, Places, Result
from kvloom.types import AnyArray, Grade, PayloadForm

AT_ONCE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """What one run takes along: rows of the snapshot's entries, nodes and boundaries, all of one layout."""

    layout: int
    entries: AnyArray
    nodes: list[int]
    boundaries: list[Boundary]


def parts(snap: Snapshot, marks: Marks, gone: int, extent: int, most_nodes: int) -> Iterator[Part]:
    """What is needed of an extent, in pieces that fit into memory and into one transaction."""
    live = np.flatnonzero((marks.entries >= gone) & (snap.entries["extent"] == extent))
    live = live[np.argsort(snap.entries["offset"][live], kind="stable")]
    homes = np.flatnonzero((marks.nodes >= gone) & (snap.homes == extent))
    ends = [boundary for boundary in snap.boundaries[gone:] if boundary.home == extent]
    names = {*snap.layouts[snap.owner[live]].tolist(), *snap.layouts[homes].tolist()}
    names |= {int(snap.layouts[boundary.node]) for boundary in ends}
    for layout in sorted(names):
        mine = live[snap.layouts[snap.owner[live]] == layout]
        infos = homes[snap.layouts[homes] == layout].tolist()
        bounds = [boundary for boundary in ends if snap.layouts[boundary.node] == layout]
        while len(mine) or infos or bounds:
            sizes = np.cumsum(snap.entries["length"][mine].astype(np.int64))
            count = max(1, int(np.searchsorted(sizes, AT_ONCE_BYTES)))
            count = min(count, most_nodes)
            yield Part(layout, mine[:count], infos[:most_nodes], bounds[:most_nodes])
            mine, infos, bounds = mine[count:], infos[most_nodes:], bounds[most_nodes:]


class Mover:
    """Moves what is needed out of an extent.  Its owner holds the writer's lock."""

    def __init__(self, writer: Writer, reader: Reader) -> None:
        self._writer, self._reader = writer, reader
        self.bytes_moved = 0
        self.integrity = 0

    def empty(self, index: Index, cap: Cap, snap: Snapshot, marks: Marks, gone: int, extent: int) -> bool:
        """Move everything; False when something could not be read and so is still there.

        Raises NoRoomError, OSError.
        """
        keys = list(snap.rows)
        with index.read() as db:
            names = layouts(db)
        clean = True
        for part in parts(snap, marks, gone, extent, cap.rows_at_once):
            digests = [keys[node][1] for node in snap.owner[part.entries].tolist()]
            rows = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)
            places = Places(names[part.layout], rows, snap.entries[part.entries], np.arange(len(digests)))
            clean &= self._move(index, cap, part, places, [keys[node][1] for node in part.nodes], keys)
        return clean

    def _move(
        self,
        index: Index,
        cap: Cap,
        part: Part,
        places: Places,
        homes: list[bytes],
        keys: list[tuple[int, bytes]],
    ) -> bool:
        payloads: list[AnyArray] = [np.empty(0, np.uint8)] * len(places)

        def keep(i: int, data: AnyArray) -> None:
            payloads[i] = data.copy()

        results = self._reader.read(places, Handing(keep)).results
        damaged = results == Result.INTEGRITY
        if damaged.any():
            self.integrity += quarantine(index, places.take(damaged), "integrity")
        good = np.flatnonzero(results == Result.OK)
        objects = [
            NewObject(
                0, int(e["group"]), int(e["column"]), Grade(int(e["grade"])), payloads[i], PayloadForm(int(e["form"]))
            )
            for i, e in zip(good.tolist(), places.entries[good], strict=True)
        ]
        with index.read() as db:
            found = nodes(db, part.layout, homes)
        infos = [NodeInfo(r.digest, r.parent, r.depth, np.frombuffer(r.tokens, "<i4")) for r in found.values()]
        ends = [BoundaryInfo(keys[b.node][1], b.needs, b.touched, b.hits) for b in part.boundaries]
        if objects or infos or ends:
            run = Run.of(
                places.layout, places.digests[good], objects, unplaced(objects), Manifest(infos, ends, len(objects), 0)
            )
            self._writer.claim(index, cap, run.size, headroom=0)
            moved = self._writer.append(run)
            self.bytes_moved += run.size
            self._enter(index, part, places.take(good), moved, set(homes), run.size)
        return bool(((results == Result.OK) | damaged).all())

    def _enter(self, index: Index, part: Part, old: Places, new: AnyArray, homes: set[bytes], size: int) -> None:
        extent = self._writer.extent
        assert extent is not None
        moved = {(int(a["extent"]), int(a["offset"])): b for a, b in zip(old.entries, new, strict=True)}
        changed = {row.tobytes() for row in old.digests} | homes
        with index.write() as db:
            row = extent_rows(db).get(extent.id)
            if row is None or row.state != OPEN:
                raise OSError("the extent was taken away while it was written")
            for node in nodes(db, part.layout, changed).values():
                objects = [moved.get((int(e["extent"]), int(e["offset"])), e) for e in node.objects]
                home = extent.id if node.digest in homes else node.home
                put_node(db, replace(node, objects=np.array(objects, PLACE), home=home))
            for boundary in part.boundaries:
                query = "SELECT needs, touched, hits FROM boundaries WHERE node = ? AND home = ?"
                kept = db.execute(query, (boundary.id, boundary.home)).fetchone()
                if kept is not None:
                    needs, touched, hits = np.frombuffer(kept[0], NEED), kept[1], kept[2]
                    put_boundary(db, boundary.id, needs, touched=touched, hits=hits, home=extent.id)
            put_extent(db, extent.row())
            add_meta(db, "bytes_moved", size)
