"""One run of ``kvloom bench data``."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvloom.bench.codecs import CodecRow
from kvloom.bench.core.report import machine
from kvloom.bench.data.disk import DiskBench
from kvloom.bench.data.memory import MakeTier, checksum_rows, memory_rows
from kvloom.bench.data.peer import FilePeer
from kvloom.bench.data.rows import Report, Row
from kvloom.bench.data.world import UNIT_BYTES, Bytes, World, payload_of
from kvloom.config import exact_size, format_size
from kvloom.errors import ConfigError
from kvloom.tiers.contract import Tier
from kvloom.tiers.host import HostStore, Verify

SIZES = (64 << 10, 512 << 10, 4 << 20)


def host(verify: Verify, total: int, object_bytes: int) -> Tier:
    """A host tier with room for all, as its own defaults make it."""
    return HostStore(total + total // 8 + (64 << 20), verify=verify, object_bytes=object_bytes)


TIERS: Mapping[str, MakeTier] = {
    "host, verified": functools.partial(host, Verify.ALWAYS),
    "host, not verified": functools.partial(host, Verify.NEVER),
}
"""Tiers in memory that are measured beside plain copies."""
Progress = Callable[[str, int, int], None]
"""What is measured, how many turns are done, and how many there are at least."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure: bytes of payload per cell, turns of every side, sizes of objects.

    Raises ConfigError for bytes that are not a multiple of 128 MiB.
    """

    total: int = 512 << 20
    repeats: int = 9
    sizes: tuple[int, ...] = SIZES

    def __post_init__(self) -> None:
        if self.total < UNIT_BYTES or self.total % UNIT_BYTES:
            raise ConfigError(f"--size {exact_size(self.total)}: use a multiple of 128MiB, such as 256MiB")


def make_folder(directory: Path, settings: Settings, peers: int = 0) -> Path:
    """A new folder of ``directory`` for a run beside so many peers; whoever calls removes it.

    Raises ConfigError when ``directory`` is none, or has no room.
    """
    if not directory.is_dir():
        raise ConfigError(f"--directory {directory}: there is no such directory; name one on the disk to measure")
    # Plain file, store, and what every peer keeps; a quarter to spare.
    needed = settings.total * (2 + peers) * 5 // 4 + (256 << 20)
    if shutil.disk_usage(directory).free < needed:
        raise ConfigError(
            f"--directory {directory}: less than {format_size(needed)} are free there; use a smaller --size"
        )
    try:
        return Path(tempfile.mkdtemp(prefix="kvloom-bench-", dir=directory))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--directory {directory}: {reason}; name one that you may write to") from None


def run_all(base: Path, settings: Settings, progress: Progress, peers: Sequence[FilePeer] = ()) -> list[Row]:
    """Measure everything in an empty folder; DataError when what was stored does not come back."""
    turns, done = (3 * len(settings.sizes) + 2) * (settings.repeats + 1), 0

    def report(what: str) -> None:
        nonlocal done
        progress(what, done, turns)
        done += 1

    report("making the data")
    payload = payload_of(settings.total)
    rows: list[Row] = []
    for size in settings.sizes:
        rows += memory_rows(World(payload, size), TIERS, settings.repeats, report)
    for size in settings.sizes:
        rows += _disk_rows(base, payload, size, settings.repeats, report, peers)
    ends = sorted({settings.sizes[0], settings.sizes[-1]})
    return rows + checksum_rows(payload[:UNIT_BYTES], ends, settings.repeats, report)


def _disk_rows(
    base: Path, payload: Bytes, size: int, repeats: int, report: Report, peers: Sequence[FilePeer]
) -> list[Row]:
    bench = DiskBench(base, World(payload, size), peers)
    try:
        return bench.rows(repeats, report)
    finally:
        bench.close()


def report_of(
    directory: Path,
    settings: Settings,
    versions: Mapping[str, str],
    rows: Sequence[Row],
    codecs: Sequence[CodecRow] = (),
) -> dict[str, Any]:
    """Everything about a run as plain values."""
    return {
        "machine": machine() | {"file_system": file_system(directory)},
        "clock": "wall time; gbps is 10^9 bytes of payload per second; medians of turns that all sides take",
        "versions": dict(versions),
        "settings": asdict(settings),
        "rows": [row.to_json() for row in rows],
        "codecs": [row.to_json() for row in codecs],
    }


def file_system(directory: Path) -> str:
    """Type of the file system that a directory lies on, ``unknown`` where the system does not say."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    place, best = directory.resolve(), ("", "unknown")
    for line in lines:
        _, where, kind, *_ = line.split(" ")
        if place.is_relative_to(where) and len(where) >= len(best[0]):
            best = where, kind
    return best[1]
