"""What ``kvloom bench data`` shows."""

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvloom.bench.codecs import DATA, CodecRow, codec_rows
from kvloom.bench.core.sides import PeerName
from kvloom.bench.data.peer import NAMES, FilePeer
from kvloom.bench.data.rows import Row
from kvloom.bench.data.run import Settings, make_folder, run_all
from kvloom.cli import streams
from kvloom.cli.interrupts import cleaning
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


def measure(
    directory: Path, settings: Settings, names: Sequence[PeerName]
) -> tuple[dict[str, str], list[Row], list[CodecRow]]:
    """Versions of the peers, all cells, and codecs; whatever was written is removed, however this ends."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    base = make_folder(directory, settings, len(names))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with contextlib.ExitStack() as stack:
        stack.enter_context(cleaning(functools.partial(shutil.rmtree, base, ignore_errors=True)))
        peers = []
        for name in names:
            peers.append(FilePeer(name))
            stack.enter_context(cleaning(peers[-1].close))
        versions = {peer.name: peer.version() for peer in peers}
        show = Progress(*columns, console=streams.progress(), transient=True, disable=not sys.stderr.isatty())
        progress = stack.enter_context(show)
        task = progress.add_task("starting")

        def report(what: str, done: int, of: int) -> None:
            progress.update(task, description=what, completed=done, total=of)

        rows = run_all(base, settings, report, peers)
        codecs = codec_rows(report, repeats=settings.repeats)
    return versions, rows, codecs


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


def codec_sheet(rows: Sequence[CodecRow]) -> Sheet:
    """Forms that state takes in cold tiers."""
    sheet = Sheet(
        f"Cold forms with one thread, GB/s of uncompressed bytes; {DATA}",
        ("what", "dtype"),
        ("bytes", "GB/s", "memcpy", "torch", "times as fast", "compression"),
    )
    for row in rows:
        peer = ("", "") if row.torch_gbps is None else (f"{row.torch_gbps:.2f}", f"{row.speedup:.1f}")
        own = format_size(row.total_bytes), f"{row.gbps:.2f}", f"{row.memcpy_gbps:.2f}"
        sheet.add(row.what, row.dtype, *own, *peer, f"{row.compression:.2f}")
    return sheet


def notes(rows: Sequence[Row], total: int) -> Iterator[str]:
    """What is wanted of every cell and whether it is met, and what has to be known about a run beside its figures."""
    for row in rows:
        if row.ratio is not None and row.met is not None:
            spread = f"{row.ratio:.2f} ({row.ratio_least:.2f} to {row.ratio_most:.2f})"
            met = "met" if row.met else "not met"
            yield f"{row.object_bytes >> 10} KiB, {row.what}: {spread} of {row.beside}, at least {row.wanted}: {met}"
    read = [int(row.facts["device_bytes"]) for row in rows if row.what == "restore, verified"]
    if read and min(read) < total:
        yield "the kernel says that less was read from a device than restored: name a --directory on a disk"
