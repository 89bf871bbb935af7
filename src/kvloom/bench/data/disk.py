"""The disk store beside the disk: what storing and verified restoring reach of plain direct I/O in the same run.

The limit of a restore is reading a file of the same size in pieces of 4 MiB into the same memory, with as many of them
in flight as is fastest; the limit of a store is writing such a file, with two syncs per unit like the store's.  Sides
take turns, nothing comes from the page cache, and what the kernel says it read is shown.  Finding the objects is timed
apart; it needs no disk.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvloom.bench.data.peer import FilePeer
from kvloom.bench.data.rows import Cell, Report, Row, Side, fastest, row, take_turns
from kvloom.bench.data.world import UNIT_BYTES, Bytes, World
from kvloom.tiers.disk import DiskStore
from kvloom.tiers.disk.files import DIRECT, FileOps, aligned
from kvloom.tiers.disk.format import PAGE

PIECE = 4 << 20
READS, WRITES = "4 MiB O_DIRECT reads", "O_DIRECT writes, same syncs"
DEPTHS = (1, 2, 4, 8)
"""Reads in flight that are tried."""
WRITERS = 8
RESTORE_WANTED, STORE_WANTED = 0.9, 0.8
"""Of the limits, at least."""
SYNCS = 2
"""Of one unit: its bytes, and the index.  A new extent's name is synced as well, which the limit does not do."""


class DiskBench:
    """Both cells of one size of objects, in the folder ``base``; ``close`` it."""

    def __init__(self, base: Path, world: World, peers: Sequence[FilePeer] = ()) -> None:
        self._base, self._world, self._peers = base, world, peers
        self._raw, self._place = base / "raw", base / "store"
        self._capacity = max(4 * len(world.payload), 8 << 30)
        self._ops = FileOps()
        self._pools = {count: ThreadPoolExecutor(count) for count in DEPTHS}
        self._into = aligned(len(world.payload))
        self._into[:] = 0

    def rows(self, repeats: int, report: Report) -> list[Row]:
        """Measure storing, then restoring of what was stored last."""
        total, size = len(self._world.payload), self._world.size
        for peer in self._peers:
            peer.make(self._base / peer.name, size, total)
        cell = Cell("disk", size, total)
        return [*self._storing(cell, repeats, report), *self._restoring(cell, repeats, report)]

    def _storing(self, cell: Cell, repeats: int, report: Report) -> list[Row]:
        sides: dict[str, Side] = {WRITES: self._write_raw, "store": self._store}
        durable: dict[str, list[float]] = {peer.name: [] for peer in self._peers}
        for peer in self._peers:
            sides[peer.name] = functools.partial(self._peer_store, peer, durable[peer.name])
        times = take_turns(sides, repeats, lambda: report(f"store {cell.object_bytes >> 10} KiB"))
        limit = times.pop(WRITES)
        made = [row(cell, WRITES, limit, facts={"syncs": SYNCS * len(self._world.units)})]
        made.append(
            row(cell, "store", times["store"], WRITES, limit, {"syncs": SYNCS * len(self._world.units)}, STORE_WANTED)
        )
        for peer in self._peers:
            made.append(row(cell, f"{peer.name} store, not synced", times[peer.name], WRITES, limit, {"syncs": 0}))
            synced = durable[peer.name][1:]
            made.append(row(cell, f"{peer.name} store and fdatasync", synced, WRITES, limit, {"syncs": peer.files}))
        return made

    def _restoring(self, cell: Cell, repeats: int, report: Report) -> list[Row]:
        with DiskStore.open(self._place) as store:
            places, offsets, lookup = self._world.find(store)
            device: dict[str, int] = {}

            def restore() -> float:
                self._forget()
                before = device_bytes()
                seconds = self._world.restore(store, places, self._into, offsets)
                device["store"] = device_bytes() - before
                return seconds

            reads = {f"{READS}, {n} in flight": functools.partial(self._read_raw, n) for n in DEPTHS}
            # The restore in the middle: the fastest of the others is next to it or nearly so.
            names = list(reads)
            sides: dict[str, Side] = {name: reads[name] for name in names[:2]}
            sides["restore"] = restore
            sides |= {name: reads[name] for name in names[2:]}
            sides |= {peer.name: functools.partial(self._peer_load, peer, device) for peer in self._peers}
            times = take_turns(sides, repeats, lambda: report(f"restore {cell.object_bytes >> 10} KiB"))
            self._into[:] = 0
            restore()
        self._world.check("the disk tier", self._into)
        best = fastest(times, names)
        limit = times[best]
        facts = {"device_bytes": device["store"], "lookup_ms": round(1000 * lookup, 2)}
        made = [row(cell, name, times[name]) for name in names]
        made.append(row(cell, "restore, verified", times["restore"], best, limit, facts, RESTORE_WANTED))
        for peer in self._peers:
            facts = {"device_bytes": device[peer.name]}
            made.append(row(cell, f"{peer.name} load, not verified", times[peer.name], best, limit, facts))
        return made

    def _store(self) -> float:
        shutil.rmtree(self._place, ignore_errors=True)
        os.sync()  # what removing makes the file system do is not part of storing
        with DiskStore.open(self._place, self._capacity) as store:
            return self._world.store(store)

    @staticmethod
    def _peer_store(peer: FilePeer, durable: list[float]) -> float:
        seconds, more = peer.store()
        durable.append(seconds + more)
        return seconds

    @staticmethod
    def _peer_load(peer: FilePeer, device: dict[str, int]) -> float:
        seconds, device[peer.name] = peer.load()
        return seconds

    def _forget(self) -> None:
        """Nothing of store and file in the page cache."""
        for path in [self._raw, *(self._place / "extents").iterdir()]:
            fd = self._ops.open(path, os.O_RDONLY)
            self._ops.drop_cached(fd)
            self._ops.close(fd)

    def _write_raw(self) -> float:
        """A file of all bytes, synced after as many as a unit has, and a page of another one as an index would be."""
        self._raw.unlink(missing_ok=True)
        index, payload = self._base / "raw-index", self._world.payload
        index.unlink(missing_ok=True)
        os.sync()
        begun = time.perf_counter()
        fd, small = (self._ops.open(p, os.O_RDWR | os.O_CREAT | os.O_EXCL | DIRECT) for p in (self._raw, index))
        for i, start in enumerate(range(0, len(payload), UNIT_BYTES)):
            self._each(WRITERS, range(start, start + UNIT_BYTES, PIECE), lambda at: self._write(fd, payload, at))
            self._ops.sync_data(fd)
            self._ops.write(small, payload[:PAGE].data, i * PAGE)
            self._ops.sync_data(small)
        seconds = time.perf_counter() - begun
        self._ops.close(fd)
        self._ops.close(small)
        return seconds

    def _write(self, fd: int, payload: Bytes, at: int) -> None:
        self._ops.write(fd, payload[at : at + PIECE].data, at)

    def _read_raw(self, depth: int) -> float:
        self._forget()
        fd = self._ops.open(self._raw, os.O_RDONLY | DIRECT)
        begun = time.perf_counter()
        starts = range(0, len(self._into), PIECE)
        self._each(depth, starts, lambda at: self._ops.read(fd, self._into[at : at + PIECE].data, at))
        seconds = time.perf_counter() - begun
        self._ops.close(fd)
        return seconds

    def _each(self, depth: int, starts: range, work: Callable[[int], object]) -> None:
        for _ in self._pools[depth].map(work, starts):
            pass

    def close(self) -> None:
        """Remove what lies in the folder, and end the threads."""
        for pool in self._pools.values():
            pool.shutdown()
        for peer in self._peers:
            shutil.rmtree(self._base / peer.name, ignore_errors=True)


def device_bytes() -> int:
    """What this process made the kernel read from devices so far; 0 where it does not say."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes")), 0)
