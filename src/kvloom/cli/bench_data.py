"""What ``kvloom bench data`` shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvloom.bench.core.sides import PeerName
from kvloom.bench.data.peer import NAMES
from kvloom.bench.data.rows import Row
from kvloom.cli.tables import Sheet
from kvloom.config import format_size
from kvloom.errors import ConfigError

TITLES = {
    "memory": "Within memory, GB/s",
    "disk": "Disk, GB/s; durable, and verified, unless a row says otherwise",
    "checksum": "Checksums with one thread, GB/s",
}


def peer_names(texts: Sequence[str]) -> list[PeerName]:
    """``--peer`` options; ConfigError says what is wrong with one."""
    names = [PeerName.parse(text) for text in texts]
    for name in names:
        if name.name not in NAMES:
            raise ConfigError(f"--peer {name.name}: has no tier on disk that is measured here; use: {', '.join(NAMES)}")
    return names


def sheets(rows: Sequence[Row]) -> Iterator[Sheet]:
    """A table for each section that has rows."""
    for section, title in TITLES.items():
        mine = [row for row in rows if row.section == section]
        if not mine:
            continue
        sheet = Sheet(title, ("objects", "what"), ("GB/s", "least-most", "ratio", "of", "read"))
        for row in mine:
            spread = f"{row.gbps_least:.2f}-{row.gbps_most:.2f}"
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            device = row.facts.get("device_bytes")
            read = "" if device is None else format_size(int(device))
            size = f"{row.object_bytes >> 10} KiB"
            sheet.add(size, row.what, f"{row.gbps:.2f}", spread, ratio, row.beside, read)
        yield sheet


def notes(rows: Sequence[Row], total: int) -> Iterator[str]:
    """What has to be known about a run beside its figures."""
    read = [int(row.facts["device_bytes"]) for row in rows if row.what == "restore, verified"]
    if read and min(read) < total:
        yield "the kernel says that less was read from a device than restored: name a --directory on a disk"
