"""The disk store beside the disk: what storing and verified restoring reach of plain direct I/O in the same run.

The limit of a restore is reading a file of the same size in pieces of 4 MiB with as many threads into the same memory;
the limit of a store is writing such a file, synced as often as the store syncs.  Both sides take turns, nothing comes
from the page cache, and what the kernel says it read is shown.  Finding the objects is timed apart; it needs no disk.
"""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.errors import ConfigError
from kvloom.tiers.disk import DiskStore, Need, NewObject, Places, Unit
from kvloom.tiers.disk.files import DIRECT, FileOps, aligned
from kvloom.tiers.disk.format import PAGE
from kvloom.tiers.disk.reading import THREADS
from kvloom.types import Grade, IntArray

SIZES = (64 << 10, 512 << 10, 4 << 20)
PIECE = 4 << 20
UNIT_BYTES = 64 << 20
NODE_BYTES = 512 << 10
SEGMENT = 128
LAYOUT, ROOT = b"L" * 32, b"R" * 32
Bytes = npt.NDArray[np.uint8]
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One cell.  Rates are GB/s of payload, medians; ``ratio`` is the median of the ratios of each turn.

    ``syncs``: that both sides wait for; ``device_bytes``: what the kernel read from the device for one restore;
    ``lookup_ms``: finding all objects of the cell, once.
    """

    what: str
    object_bytes: int
    total_bytes: int
    gbps: float
    limit_gbps: float
    ratio: float
    ratio_least: float
    ratio_most: float
    syncs: int
    device_bytes: int
    lookup_ms: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def run_all(directory: Path, report: Report, *, total: int = 512 << 20, repeats: int = 5) -> list[Row]:
    """Measure every size of object in a new folder of ``directory``, which is removed afterwards.

    Args:
        directory: on the disk that is meant.
        report: called with what is done, and how much of all.
        total: bytes of payload per cell, a multiple of 64 MiB.
        repeats: turns of both sides.

    Raises ConfigError when ``directory`` has no room for three times ``total``, or takes no direct I/O.
    """
    if total < UNIT_BYTES or total % UNIT_BYTES:
        raise ConfigError(f"{total} bytes: use a multiple of {UNIT_BYTES}")
    if shutil.disk_usage(directory).free < 4 * total:
        raise ConfigError(f"{directory} has less than {4 * total} bytes free; free some room or measure fewer bytes")
    base = Path(tempfile.mkdtemp(prefix="kvloom-bench-", dir=directory))
    rows, steps = [], len(SIZES) * 2 * repeats
    try:
        payload = aligned(total)
        payload[:] = np.random.Generator(np.random.PCG64(0)).integers(0, 256, total, np.uint8)
        for i, size in enumerate(SIZES):
            bench = _Bench(base, payload, size)
            for j, cell in enumerate((bench.store, bench.restore)):
                done = (2 * i + j) * repeats
                name = f"{cell.__name__} {size >> 10} KiB"
                rows.append(cell(repeats, functools.partial(_tell, report, name, done, steps)))
            bench.close()
    finally:
        shutil.rmtree(base)
    return rows


def _tell(report: Report, name: str, done: int, steps: int, turn: int) -> None:
    report(name, done + turn, steps)


class _Bench:
    """All cells of one size of objects."""

    def __init__(self, base: Path, payload: Bytes, size: int) -> None:
        self._base, self._payload, self._size = base, payload, size
        self._per_node = max(1, NODE_BYTES // size)
        per_unit = UNIT_BYTES // size
        self._units = [self._unit(i, per_unit) for i in range(len(payload) // UNIT_BYTES)]
        self._raw = base / "raw"
        self._ops = FileOps()
        self._pool = ThreadPoolExecutor(THREADS)

    def _unit(self, number: int, count: int) -> Unit:
        """A chain of its own, with half a MiB to a node."""
        rng = np.random.Generator(np.random.PCG64(number + 1))
        start = number * UNIT_BYTES
        parts = self._payload[start : start + UNIT_BYTES].reshape(count, self._size)
        per = self._per_node
        objects = [NewObject(i // per, 0, i % per, Grade.CANONICAL, part) for i, part in enumerate(parts)]
        digests = rng.integers(0, 256, (count // per, 32), np.uint8)
        tokens = rng.integers(0, 50_000, count // per * SEGMENT).astype(np.int32)
        return Unit(LAYOUT, ROOT, digests, tokens, SEGMENT, objects, [Need(0, 0, count)])

    def store(self, repeats: int, report: Callable[[int], None]) -> Row:
        """Publish every unit, beside writing a file with as many syncs."""
        ours, limit = [], []
        for n in range(repeats + 1):
            report(n)
            limit.append(self._write_raw())
            shutil.rmtree(self._base / "store", ignore_errors=True)
            with DiskStore.open(self._base / "store", 3 * len(self._payload) + (64 << 20)) as store:
                begun = time.perf_counter()
                for unit in self._units:
                    if not store.publish(unit).stored:
                        raise ConfigError(f"{self._base}: the disk does not take the data: {store.activity().reason}")
                ours.append(time.perf_counter() - begun)
        return self._row("store", ours, limit, 2 * len(self._units), 0, 0.0)

    def restore(self, repeats: int, report: Callable[[int], None]) -> Row:
        """Read everything that ``store`` left, verified, beside reading the file."""
        into, ours, limit, device = aligned(len(self._payload)), [], [], 0
        into[:] = 0
        with DiskStore.open(self._base / "store") as store:
            begun = time.perf_counter()
            found = [store.lookup(LAYOUT, unit.digests).places for unit in self._units]
            lookup = time.perf_counter() - begun
            places = Places.join(found)
            unit_of = np.repeat(np.arange(len(found)), [len(part) for part in found])
            within = places.rows * self._per_node + places.entries["column"].astype(np.int64)
            offsets: IntArray = unit_of * UNIT_BYTES + within * self._size
            for n in range(repeats + 1):
                report(n)
                self._forget()
                limit.append(self._read_raw(into))
                self._forget()
                before, begun = _device_bytes(), time.perf_counter()
                if not store.read(places, into, offsets).ok:
                    raise ConfigError(f"{self._base}: the disk does not return what was stored")
                ours.append(time.perf_counter() - begun)
                device = _device_bytes() - before
        if not np.array_equal(into, self._payload):
            raise ConfigError("restored bytes differ from those that were stored")
        return self._row("restore", ours, limit, 0, device, lookup)

    def _row(self, what: str, ours: list[float], limit: list[float], syncs: int, device: int, lookup: float) -> Row:
        # The first turn of both is a rehearsal.
        total, ours, limit = len(self._payload), ours[1:], limit[1:]
        ratios = [b / a for a, b in zip(ours, limit, strict=True)]
        rate = [total / statistics.median(times) / 1e9 for times in (ours, limit)]
        median = statistics.median(ratios)
        return Row(
            what, self._size, total, rate[0], rate[1], median, min(ratios), max(ratios), syncs, device, 1000 * lookup
        )

    def _forget(self) -> None:
        """Nothing of store and file in the page cache."""
        for path in [self._raw, *(self._base / "store" / "extents").iterdir()]:
            fd = self._ops.open(path, os.O_RDONLY)
            self._ops.drop_cached(fd)
            self._ops.close(fd)

    def _write_raw(self) -> float:
        """A file of all bytes, as many units, and a small write and sync after each as an index has."""
        self._raw.unlink(missing_ok=True)
        index = self._base / "raw-index"
        index.unlink(missing_ok=True)
        begun = time.perf_counter()
        fd, small = (self._ops.open(p, os.O_RDWR | os.O_CREAT | os.O_EXCL | DIRECT) for p in (self._raw, index))
        for i, start in enumerate(range(0, len(self._payload), UNIT_BYTES)):
            pieces = range(start, start + UNIT_BYTES, PIECE)
            list(self._pool.map(lambda at: self._ops.write(fd, self._payload[at : at + PIECE].data, at), pieces))
            self._ops.sync_data(fd)
            self._ops.write(small, self._payload[:PAGE].data, i * PAGE)
            self._ops.sync_data(small)
        seconds = time.perf_counter() - begun
        self._ops.close(fd)
        self._ops.close(small)
        return seconds

    def _read_raw(self, into: Bytes) -> float:
        fd = self._ops.open(self._raw, os.O_RDONLY | DIRECT)
        begun = time.perf_counter()
        pieces = range(0, len(into), PIECE)
        list(self._pool.map(lambda at: self._ops.read(fd, into[at : at + PIECE].data, at), pieces))
        seconds = time.perf_counter() - begun
        self._ops.close(fd)
        return seconds

    def close(self) -> None:
        self._pool.shutdown()


def _device_bytes() -> int:
    """What this process made the kernel read from devices so far; 0 where it does not say."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes")), 0)
