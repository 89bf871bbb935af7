"""What a store holds and has done, and whether all of it is as it should be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvloom.tiers.disk.directory import Directory
from kvloom.tiers.disk.extents import extent_rows
from kvloom.tiers.disk.format import stored_bytes
from kvloom.tiers.disk.index import Index, IndexCorruptError, meta
from kvloom.tiers.disk.marks import live_bytes, mark, snapshot
from kvloom.tiers.disk.rebuild import complete
from kvloom.tiers.disk.rows import layouts
from kvloom.tiers.disk.space import in_use
from kvloom.tiers.values import Places, Result

AT_ONCE = 256 << 20
"""Bytes between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What is stored, for all handles and processes.  Bytes on disk unless they are called payload."""

    capacity: int
    in_use: int
    """Taken and promised, as the cap counts it."""
    on_disk: int
    index: int
    layouts: int
    nodes: int
    units: int
    objects: int
    payload: int
    extents: int
    live: int
    """Of the extents: what is needed by some unit."""
    quarantined: int
    payload_published: int
    """Payload that was stored since the index was made, what went again included; so are the next two."""
    bytes_published: int
    """What was written for it, headers, manifests and padding included."""
    bytes_moved: int
    """What was written in addition to make room."""

    @property
    def write_amplification(self) -> float | None:
        """Bytes written to extents per byte of payload that was to be stored; None before anything was."""
        if not self.payload_published:
            return None
        return (self.bytes_published + self.bytes_moved) / self.payload_published


@dataclass(slots=True)
class Verified:
    """What a check of everything found; ``problems`` has a line for each that it did not mend."""

    nodes: int = 0
    units: int = 0
    objects: int = 0
    bytes: int = 0
    integrity: int = 0
    io_errors: int = 0
    missing: int = 0
    incomplete: int = 0
    """Units that lack objects, those found damaged now among them."""
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything was as it should be."""
        return not (self.integrity or self.io_errors or self.missing or self.incomplete or self.problems)


def contents(index: Index, directory: Directory) -> Contents:
    """Count everything; reads the whole index."""
    snap = snapshot(index)
    with index.read() as db:
        rows = extent_rows(db)
        used, cap, bad = in_use(db, index), meta(db, "capacity"), db.execute("SELECT count(*) FROM quarantine")
        quarantined, names = int(bad.fetchone()[0]), layouts(db)
        written = [meta(db, key) for key in ("payload_published", "bytes_published", "bytes_moved")]
    return Contents(
        cap,
        used,
        disk_usage(directory),
        index.bytes(),
        len(names),
        len(snap.ids),
        len(snap.boundaries),
        len(snap.entries),
        int(snap.entries["length"].sum(dtype=np.int64)),
        len(rows),
        sum(live_bytes(snap, mark(snap, None, None), 0).values()),
        quarantined,
        *written,
    )


@dataclass(frozen=True, slots=True)
class UnitInfo:
    """A stored unit: the node that it ends at, tokens and nodes of its chain, and when it was last used.

    ``objects`` and ``payload``: of the whole chain, shared ones among them.
    """

    layout: str
    root: str
    digest: str
    tokens: int
    nodes: int
    objects: int
    payload: int
    touched: int
    hits: int


def unit_list(index: Index) -> list[UnitInfo]:
    """Every unit, the one worth most first; reads the whole index."""
    snap = snapshot(index)
    with index.read() as db:
        names = layouts(db)
    keys = list(snap.rows)
    sizes = np.bincount(snap.owner, weights=snap.entries["length"], minlength=len(snap.ids)).astype(np.int64)
    counts = np.diff(snap.starts)
    total = np.zeros((len(snap.ids), 4), np.int64)
    first = list(snap.above)
    for row in np.argsort(snap.depth, kind="stable").tolist():
        up = int(snap.parents[row])
        total[row] = (snap.token_bytes[row] // 4, 1, counts[row], sizes[row])
        if up >= 0:
            total[row] += total[up]
            first[row] = first[up]
    made = []
    for boundary in reversed(snap.boundaries):
        layout, digest = keys[boundary.node]
        tokens, length, objects, payload = total[boundary.node].tolist()
        root = first[boundary.node].hex()
        made.append(
            UnitInfo(
                names[layout].hex(),
                root,
                digest.hex(),
                tokens,
                length,
                objects,
                payload,
                boundary.touched,
                boundary.hits,
            )
        )
    return made


def disk_usage(directory: Directory) -> int:
    """Bytes of everything in the directory, as ``du`` counts them."""
    total = 0
    for path in [directory.path, *directory.path.rglob("*")]:
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def check_index(index: Index, directory: Directory, done: Verified) -> None:
    """Whether the index is sound, every place lies in an extent, every unit is complete, and all is below the cap."""
    with index.read() as db:
        for (line,) in db.execute("PRAGMA integrity_check").fetchall():
            if line != "ok":
                raise IndexCorruptError(f"the index is damaged: {line}")
        rows, cap = extent_rows(db), meta(db, "capacity")
    snap = snapshot(index)
    ends = snap.entries["offset"].astype(np.int64) + [stored_bytes(int(n)) for n in snap.entries["length"]]
    for extent in np.unique(snap.entries["extent"]).tolist():
        mine = snap.entries["extent"] == extent
        if extent not in rows:
            done.problems.append(f"extent {extent:016x} is not known and has {int(mine.sum())} objects")
        elif int(ends[mine].max()) > rows[extent].used:
            done.problems.append(f"extent {extent:016x} has objects beyond its end")
    done.nodes, done.units = len(snap.ids), len(snap.boundaries)
    done.incomplete = sum(not complete(snap, boundary) for boundary in snap.boundaries)
    usage = disk_usage(directory)
    if usage > cap:
        done.problems.append(f"{usage} bytes are on disk, more than the cap of {cap}")


def in_parts(places: Places) -> Iterator[Places]:
    """Some objects at a time, by where they lie."""
    order = np.lexsort((places.entries["offset"], places.entries["extent"]))
    sizes = np.cumsum(places.entries["length"][order].astype(np.int64)) // AT_ONCE
    for part in np.split(order, np.flatnonzero(np.diff(sizes)) + 1):
        yield places.take(part)


def count_results(done: Verified, places: Places, results: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Add up what a read of ``places`` said."""
    done.objects += len(places)
    done.bytes += places.nbytes
    done.integrity += int((results == Result.INTEGRITY).sum())
    done.io_errors += int((results == Result.IO_ERROR).sum())
    done.missing += int((results == Result.MISSING).sum())


Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""
