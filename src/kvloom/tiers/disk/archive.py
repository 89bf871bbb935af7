"""Archives: units of a store in one file, to carry elsewhere.

An archive is a page that says so, runs as they are in extents (of one unit each, after the units that it builds on),
and a page that ends it.  Whatever an archive says is checked against what is there before it is believed; its runs go
through ``publish`` like units of anybody else.  Whether the state in it is right is for whoever made it to know.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kvloom.errors import FormatError, InputError, StoreError
from kvloom.tiers.disk.format import (
    HEADER,
    PAGE,
    TYPE_ARCHIVE,
    TYPE_END,
    BoundaryInfo,
    Manifest,
    NodeInfo,
    checksum,
    first_page,
    padded,
    parse_header,
    seal,
)
from kvloom.tiers.disk.index import Index
from kvloom.tiers.disk.marks import Boundary, Snapshot, snapshot
from kvloom.tiers.disk.rows import layout_id, layouts, nodes
from kvloom.tiers.disk.runs import Run, object_headers, run_header, unplaced
from kvloom.tiers.disk.scanning import ScannedRun, read_run
from kvloom.tiers.values import DIGEST, MAX_PAYLOAD, Fill, Need, NewObject, Places, Result, Unit
from kvloom.types import AnyArray, Grade, PayloadForm

AT_ONCE = 16 << 20

ReadEach = Callable[[Places, Callable[[int, AnyArray], None]], AnyArray]
"""Reads places, delivers payloads, returns results."""


@dataclass(slots=True)
class Exported:
    """What an archive was given.  ``skipped``: units that could not be read whole."""

    units: int = 0
    objects: int = 0
    bytes: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A unit without what earlier units of the archive have: rows of the snapshot."""

    boundary: Boundary
    nodes: tuple[int, ...]
    entries: AnyArray


def in_order(snap: Snapshot) -> Iterator[Piece]:
    """Units from the roots down, each with what it adds."""
    given = np.zeros(len(snap.entries), np.bool_)
    told = np.zeros(len(snap.ids), np.bool_)
    for boundary in sorted(snap.boundaries, key=lambda b: (int(snap.layouts[b.node]), int(snap.depth[b.node]))):
        chain, row = [], boundary.node
        while row >= 0:
            chain.append(row)
            row = int(snap.parents[row])
        chain.reverse()
        first = {int(n["group"]): (int(n["first_node"]), int(n["first_column"])) for n in boundary.needs}
        wanted = [
            at
            for depth, row in enumerate(chain)
            for at in range(int(snap.starts[row]), int(snap.starts[row + 1]))
            if not given[at] and _from(first, snap.entries[at], depth)
        ]
        piece = Piece(boundary, tuple(row for row in chain if not told[row]), np.array(wanted, np.int64))
        told[chain], given[piece.entries] = True, True
        yield piece


def _from(first: dict[int, tuple[int, int]], entry: AnyArray, depth: int) -> bool:
    begin = first.get(int(entry["group"]))
    return begin is not None and (depth, int(entry["column"])) >= begin


def export(index: Index, path: Path, read: ReadEach) -> Exported:
    """Write everything to a new file, which is there whole or not at all.  Raises StoreError, OSError."""
    if path.exists():
        raise StoreError(f"{path} exists already; name a new file")
    snap, done = snapshot(index), Exported()
    with index.read() as db:
        names = layouts(db)
    with _appearing(path) as file:
        file.write(first_page(TYPE_ARCHIVE))
        for piece in in_order(snap):
            start = file.tell()
            if _write_piece(file, start, index, names, snap, piece, read):
                done.units += 1
                done.objects += len(piece.entries)
            else:
                file.seek(start)
                file.truncate()
                done.skipped += 1
        file.write(first_page(TYPE_END, extent=done.units))
        done.bytes = file.tell()
    return done


@contextlib.contextmanager
def _appearing(path: Path) -> Iterator[BinaryIO]:
    """A file without a name that gets its name when all is in it."""
    try:
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        message = f"{path} cannot be written: {path.parent}: {error.strerror}; name a file in a directory that exists"
        raise StoreError(message) from error
    with os.fdopen(fd, "wb") as file:
        try:
            yield file
            file.flush()
            os.fsync(fd)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                raise
            message = f"{path} cannot be written: {error.strerror}; free some room, or name a file on another disk"
            raise StoreError(message) from error
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Only with a directory's descriptor is the link in /proc followed, as a file without a name needs it.
            os.link(f"/proc/self/fd/{fd}", path.name, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=True)
            os.fsync(parent)
        except FileExistsError:
            raise StoreError(f"{path} exists already; name a new file") from None
        finally:
            os.close(parent)


def _write_piece(
    file: BinaryIO, start: int, index: Index, names: dict[int, bytes], snap: Snapshot, piece: Piece, read: ReadEach
) -> bool:
    keys = list(snap.rows)
    layout = int(snap.layouts[piece.boundary.node])
    with index.read() as db:
        found = nodes(db, layout, [keys[row][1] for row in piece.nodes])
    if len(found) != len(piece.nodes):
        return False
    infos = [NodeInfo(r.digest, r.parent, r.depth, np.frombuffer(r.tokens, "<i4")) for r in found.values()]
    infos.sort(key=lambda info: info.depth)
    digests = [keys[row][1] for row in snap.owner[piece.entries].tolist()]
    rows = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST)
    objects = [
        NewObject(0, int(e["group"]), int(e["column"]), Grade(int(e["grade"])), Fill(int(e["length"]), _nothing))
        for e in snap.entries[piece.entries]
    ]
    ends = [BoundaryInfo(keys[piece.boundary.node][1], piece.boundary.needs)]
    run = Run.of(names[layout], rows, objects, unplaced(objects), Manifest(infos, ends, len(objects), 0))
    places = run.places(0, start)
    for name in ("form", "check"):
        places[name] = snap.entries[piece.entries][name]
    file.write(run_header(run, 0, start).tobytes())
    file.write(run.manifest.ljust(padded(len(run.manifest)), b"\0"))
    heads = seal(object_headers(names[layout], rows, places))
    sizes = np.cumsum(places["length"].astype(np.int64)) // AT_ONCE
    for part in np.split(np.arange(len(places)), np.flatnonzero(np.diff(sizes)) + 1):
        got: list[bytes] = [b""] * len(part)
        wanted = Places(names[layout], rows[part], snap.entries[piece.entries][part], part)

        def keep(i: int, data: AnyArray, got: list[bytes] = got) -> None:
            got[i] = data.tobytes()

        if (read(wanted, keep) != Result.OK).any():
            return False
        file.writelines(
            heads[i : i + 1].tobytes() + data.ljust(padded(len(data)), b"\0")
            for i, data in zip(part.tolist(), got, strict=True)
        )
    file.write(bytes(start + run.size - file.tell()))
    return True


def _nothing(_room: memoryview) -> None:
    raise AssertionError


def units(path: Path, above: Callable[[bytes, bytes], list[NodeInfo]]) -> Iterator[Unit | None]:
    """The units of an archive; None for one that builds on what the archive brought and the store has not kept.

    ``above``: nodes that are stored already, from a node up (layout, digest): the archive builds on what it brought.
    Raises FormatError for anything that is no archive, StoreError when it cannot be opened.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}; name an archive of kvloom store export") from error
    with file:
        size = os.fstat(file.fileno()).st_size
        if int(parse_header(file.read(PAGE), f"{path} is no archive of kvloom store export")["type"]) != TYPE_ARCHIVE:
            raise FormatError(f"{path} is no archive")
        at, count = PAGE, 0
        brought: set[bytes] = set()
        while True:
            where = f"{path} at {at}"
            file.seek(at)
            head = parse_header(file.read(HEADER), where)
            if int(head["type"]) == TYPE_END:
                if int(head["extent"]) != count:
                    raise FormatError(f"{where}: {count} units are there, {int(head['extent'])} were written")
                return
            run = read_run(file, at, size, where, None)
            yield unit_of(run, file, above, where, brought)
            brought.update(run.layout + node.digest for node in run.manifest.nodes)
            at, count = run.end, count + 1


def unit_of(
    run: ScannedRun, file: BinaryIO, above: Callable[[bytes, bytes], list[NodeInfo]], where: str, brought: set[bytes]
) -> Unit | None:
    """The unit that a run of an archive holds; raises FormatError when it holds none.

    None when nodes below it are not stored that the archive ``brought`` (layout and digest): they had no room.
    """
    if len(run.manifest.boundaries) != 1:
        raise FormatError(f"{where}: a run of an archive holds one unit, not {len(run.manifest.boundaries)}")
    end = run.manifest.boundaries[0]
    chain = _chain(run, end.node, above, where, brought)
    if chain is None:
        return None
    at = {node.digest: i for i, node in enumerate(chain)}
    if any(digest not in at for digest in run.nodes):
        raise FormatError(f"{where}: objects of nodes that the unit does not have")
    objects = []
    for digest, place in zip(run.nodes, run.places, strict=True):
        fill = Fill(int(place["length"]), _from_file(file, place, where))
        form, grade = PayloadForm(int(place["form"])), Grade(int(place["grade"]))
        objects.append(NewObject(at[digest], int(place["group"]), int(place["column"]), grade, fill, form))
    needs = [Need(int(n["group"]), int(n["first_node"]), int(n["count"]), int(n["first_column"])) for n in end.needs]
    digests = np.frombuffer(b"".join(node.digest for node in chain), np.uint8).reshape(-1, DIGEST)
    tokens = np.concatenate([node.tokens for node in chain]).astype(np.int32)
    segment = len(chain[0].tokens)
    if any(len(node.tokens) != segment for node in chain[:-1]):
        raise FormatError(f"{where}: segments of different lengths")
    try:
        return Unit(run.layout, chain[0].parent, digests, tokens, segment, objects, needs)
    except InputError as error:
        raise FormatError(f"{where}: {error}") from error


def _chain(
    run: ScannedRun, end: bytes, above: Callable[[bytes, bytes], list[NodeInfo]], where: str, brought: set[bytes]
) -> list[NodeInfo] | None:
    mine = {node.digest: node for node in run.manifest.nodes}
    chain: list[NodeInfo] = []
    at = end
    while at in mine:
        chain.append(mine.pop(at))
        at = chain[-1].parent
    if not chain or chain[-1].depth:
        chain += above(run.layout, at)
        below = chain[-1].parent if chain else at
        if (not chain or chain[-1].depth) and not mine and run.layout + below in brought:
            return None
    chain.reverse()
    if not chain or mine or [node.depth for node in chain] != list(range(len(chain))):
        raise FormatError(f"{where}: the nodes are not one chain, or the archive lacks what it builds on")
    return chain


def _from_file(file: BinaryIO, place: AnyArray, where: str) -> Callable[[memoryview], None]:
    at, check = int(place["offset"]) + HEADER, place["check"].tobytes()

    def write(room: memoryview) -> None:
        assert len(room) <= MAX_PAYLOAD
        file.seek(at)
        if file.readinto(room) != len(room) or checksum(room) != check:  # type: ignore[attr-defined]
            raise FormatError(f"{where}: an object at {at - HEADER} has another checksum than it says")

    return write


def stored_chain(index: Index, layout: bytes, digest: bytes) -> list[NodeInfo]:
    """Stored nodes from one up to the first of its chain, deepest first."""
    chain: list[NodeInfo] = []
    with index.read() as db:
        number = layout_id(db, layout)
        while number is not None:
            row = nodes(db, number, [digest]).get(digest)
            if row is None or (chain and row.depth != chain[-1].depth - 1):
                break
            chain.append(NodeInfo(row.digest, row.parent, row.depth, np.frombuffer(row.tokens, "<i4")))
            digest = row.parent
            if row.depth == 0:
                break
    return chain
