"""Reading runs without an index: out of extents when it is lost, and out of archives.  Nothing in them is trusted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kvloom.errors import FormatError
from kvloom.tiers.disk.format import (
    HEADER,
    PAGE,
    PLACE,
    TYPE_EXTENT,
    TYPE_OBJECT,
    TYPE_RUN,
    Manifest,
    checksum,
    padded,
    parse_header,
    stored_bytes,
)
from kvloom.tiers.values import MAX_NODE_TOKENS
from kvloom.types import AnyArray, Grade

FORMS = 3


@dataclass(frozen=True, slots=True)
class ScannedRun:
    """A whole run: its manifest, and its objects' nodes (32 bytes each) and places.  ``end``: where the next one is."""

    layout: bytes
    manifest: Manifest
    nodes: tuple[bytes, ...]
    places: AnyArray
    end: int


def extent_header(file: BinaryIO, path: Path) -> tuple[int, int, int]:
    """Number, reserved bytes and the cap at the time, as the first page says; raises FormatError."""
    file.seek(0)
    row = parse_header(file.read(PAGE), str(path))
    if int(row["type"]) != TYPE_EXTENT:
        raise FormatError(f"{path}: an extent does not begin with a record of type {row['type']}")
    return int(row["extent"]), int(row["offset"]), int(row["length"])


def runs(file: BinaryIO, extent: int, path: Path) -> Iterator[ScannedRun]:
    """Every whole run of an extent; what is damaged is passed over, page by page."""
    size = os.fstat(file.fileno()).st_size
    at = PAGE
    while at + HEADER <= size:
        try:
            run = read_run(file, at, size, f"{path} at {at}", extent)
        except FormatError as error:
            if "newer" in str(error):
                raise
            at += PAGE
            continue
        yield run
        at = run.end


def read_run(file: BinaryIO, at: int, size: int, where: str, extent: int | None) -> ScannedRun:
    """The run that begins at ``at``; its payloads are not looked at.  Raises FormatError, OSError.

    ``extent``: number that every record must have; None: any (an archive), and then offsets are as they are here.
    """
    file.seek(at)
    head = parse_header(file.read(HEADER), where)
    if int(head["type"]) != TYPE_RUN or not _placed(head, at, extent):
        raise FormatError(f"{where}: no run begins here")
    length = int(head["length"])
    if length > size - at - HEADER:
        raise FormatError(f"{where}: the file ends within a run")
    payload = file.read(length)
    if len(payload) != length or checksum(payload) != head["payload"].tobytes():
        raise FormatError(f"{where}: the manifest has another checksum than it says")
    manifest = Manifest.decode(payload, where)
    layout = head["layout"].tobytes()
    if manifest.run_bytes > size - at or manifest.objects > manifest.run_bytes // HEADER:
        raise FormatError(f"{where}: the file ends within a run")
    check_manifest(manifest, where)
    places, nodes, here = np.zeros(manifest.objects, PLACE), [], at + stored_bytes(length)
    for i in range(manifest.objects):
        file.seek(here)
        row = parse_header(file.read(HEADER), f"{where}, object {i}")
        if int(row["type"]) != TYPE_OBJECT or row["layout"].tobytes() != layout or not _placed(row, here, extent):
            raise FormatError(f"{where}: object {i} belongs elsewhere")
        known = int(row["form"]) < FORMS and int(row["grade"]) <= max(Grade)
        if not known or not row["length"] or max(int(row["group"]), int(row["column"])) >= 1 << 31:
            raise FormatError(f"{where}: object {i} is of no known form or grade, or empty")
        for name in ("group", "column", "form", "grade", "length"):
            places[i][name] = row[name]
        places[i]["extent"], places[i]["offset"], places[i]["check"] = extent or 0, here, row["payload"]
        nodes.append(row["node"].tobytes())
        here += stored_bytes(int(row["length"]))
    if padded(here - at, PAGE) != manifest.run_bytes:
        raise FormatError(f"{where}: the run is of another size than it says")
    return ScannedRun(layout, manifest, tuple(nodes), places, at + manifest.run_bytes)


def _placed(row: AnyArray, at: int, extent: int | None) -> bool:
    return extent is None or (int(row["extent"]) == extent and int(row["offset"]) == at)


def check_manifest(manifest: Manifest, where: str) -> None:
    """Raise FormatError for nodes that no store can have."""
    for node in manifest.nodes:
        if not 1 <= len(node.tokens) <= MAX_NODE_TOKENS or node.depth >= 1 << 31 or node.parent == node.digest:
            raise FormatError(f"{where}: a node that cannot be")
    for boundary in manifest.boundaries:
        if len(boundary.needs) and int(boundary.needs["group"].max()) >= 1 << 31:
            raise FormatError(f"{where}: a boundary that cannot be")
        if boundary.touched >= 1 << 62 or boundary.hits >= 1 << 31:
            raise FormatError(f"{where}: a boundary that cannot be")
