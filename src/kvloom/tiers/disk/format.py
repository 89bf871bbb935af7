"""The bytes of extent files: record headers and run manifests (``docs/format.md`` describes them one by one).

Everything is little-endian.  An extent is one header page and then runs; a run is what one publication wrote: a
manifest record and object records, from one page boundary to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvloom.errors import FormatError
from kvloom.tiers.values import DIGEST, MAX_NODE_TOKENS, MAX_PAYLOAD
from kvloom.types import AnyArray

FORMAT = 1
MAGIC = b"KVLMREC1"
PAGE = 4096
ALIGN = 256
HEADER = 256
MAX_MANIFEST = 1 << 28

TYPE_EXTENT, TYPE_RUN, TYPE_OBJECT, TYPE_ARCHIVE, TYPE_END = 1, 2, 3, 4, 5

RECORD = np.dtype(
    {
        "names": [
            *("magic", "version", "type", "header", "length", "extent", "offset", "group", "column", "form", "grade"),
            *("layout", "node", "payload", "check"),
        ],
        "formats": [
            *("S8", "<u2", "<u2", "<u4", "<u8", "<u8", "<u8", "<u4", "<u4", "u1", "u1"),
            *(("u1", 32), ("u1", 32), ("u1", 16), ("u1", 16)),
        ],
        "offsets": [0, 8, 10, 12, 16, 24, 32, 40, 44, 48, 49, 56, 88, 120, 240],
        "itemsize": HEADER,
    }
)
"""A record header.  ``payload`` is the checksum of the payload, ``check`` that of the 240 bytes before it."""
PAYLOAD_AT, CHECK_AT = 120, 240

PLACE = np.dtype(
    [
        *(("group", "<u4"), ("column", "<u4"), ("form", "u1"), ("grade", "u1"), ("unused", "<u2"), ("length", "<u4")),
        *(("extent", "<u8"), ("offset", "<u8"), ("check", "u1", 16)),
    ]
)
"""Where an object lies and what it is: one entry of a node's list in the index, 48 bytes."""

NODE = np.dtype([("digest", "u1", 32), ("parent", "u1", 32), ("depth", "<u4"), ("tokens", "<u4")])
NEED = np.dtype([("group", "<u4"), ("first_node", "<u4"), ("first_column", "<u4"), ("count", "<u4")])
BOUNDARY = np.dtype([("node", "u1", 32), ("needs", "<u4"), ("hits", "<u4"), ("touched", "<u8")])
COUNTS = np.dtype([("nodes", "<u4"), ("boundaries", "<u4"), ("objects", "<u4"), ("unused", "<u4"), ("run", "<u8")])


def padded(size: int, to: int = ALIGN) -> int:
    """``size`` rounded up to a multiple of ``to``."""
    return -(-size // to) * to


def stored_bytes(payload: int) -> int:
    """Bytes that an object takes in an extent, header and padding included."""
    return HEADER + padded(payload)


def checksum(data: bytes | memoryview | AnyArray) -> bytes:
    """XXH3-128, 16 bytes; for accidents, not for forgers."""
    return xxhash.xxh3_128_digest(data)  # type: ignore[arg-type]  # arrays are buffers


def headers(count: int, record_type: int) -> AnyArray:
    """``RECORD[count]`` of a type with everything else zero; ``seal`` it when the rest is filled in."""
    made = np.zeros(count, RECORD)
    made["magic"], made["version"], made["type"], made["header"] = MAGIC, FORMAT, record_type, HEADER
    return made


def seal(made: AnyArray) -> AnyArray:
    """Fill in the checksums of headers; returns them."""
    # As bytes: of small objects there are many, and slices of arrays cost more than what they are slices of.
    data = memoryview(made.tobytes())
    checks = b"".join(checksum(data[at : at + CHECK_AT]) for at in range(0, len(data), HEADER))
    made["check"] = np.frombuffer(checks, np.uint8).reshape(-1, 16)
    return made


def parse_header(data: bytes | memoryview, where: str) -> AnyArray:
    """The checked header at the start of ``data``; raises FormatError for anything that is none."""
    if len(data) < HEADER:
        raise FormatError(f"{where}: the file ends within a record header")
    row: AnyArray = np.frombuffer(data, RECORD, count=1)[0]
    if bytes(row["magic"]) != MAGIC:
        raise FormatError(f"{where}: no record begins here")
    if checksum(memoryview(data)[:CHECK_AT]) != row["check"].tobytes():
        raise FormatError(f"{where}: the header has another checksum than it says")
    if int(row["version"]) > FORMAT:
        raise FormatError(f"{where}: written by a newer kvloom (format {row['version']}, this one reads {FORMAT})")
    limit = {TYPE_RUN: MAX_MANIFEST, TYPE_OBJECT: MAX_PAYLOAD}.get(int(row["type"]))
    if int(row["header"]) != HEADER or (limit is not None and int(row["length"]) > limit):
        raise FormatError(f"{where}: a record of impossible size")
    return row


def first_page(record_type: int, *, extent: int = 0, reserved: int = 0, cap: int = 0) -> bytes:
    """The first page of an extent or archive."""
    made = headers(1, record_type)
    made["extent"], made["offset"], made["length"] = extent, reserved, cap
    made["payload"] = np.frombuffer(checksum(b""), np.uint8)
    return seal(made).tobytes().ljust(PAGE, b"\0")


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node as it is stored: 32-byte digests, depth from 0, tokens int32."""

    digest: bytes
    parent: bytes
    depth: int
    tokens: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BoundaryInfo:
    """A boundary as it is stored; ``needs`` is ``NEED[n]``."""

    node: bytes
    needs: AnyArray
    touched: int = 0
    hits: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a run says about itself besides its objects.  ``run_bytes``: from its first byte to its last page's end."""

    nodes: Sequence[NodeInfo]
    boundaries: Sequence[BoundaryInfo]
    objects: int
    run_bytes: int

    def encode(self) -> bytes:
        """The payload of the run's first record."""
        counts = np.zeros(1, COUNTS)
        counts[0] = (len(self.nodes), len(self.boundaries), self.objects, 0, self.run_bytes)
        nodes = np.zeros(len(self.nodes), NODE)
        for name in ("digest", "parent"):
            nodes[name] = _bytes(b"".join(getattr(node, name) for node in self.nodes)).reshape(-1, DIGEST)
        nodes["depth"] = [node.depth for node in self.nodes]
        nodes["tokens"] = [len(node.tokens) for node in self.nodes]
        parts = [counts.tobytes(), nodes.tobytes()]
        parts += [node.tokens.astype("<i4", copy=False).tobytes() for node in self.nodes]
        for boundary in self.boundaries:
            head = np.zeros(1, BOUNDARY)
            head[0] = (_bytes(boundary.node), len(boundary.needs), boundary.hits, boundary.touched)
            parts += [head.tobytes(), boundary.needs.astype(NEED, copy=False).tobytes()]
        return b"".join(parts)

    @staticmethod
    def put_run_bytes(encoded: bytearray, run_bytes: int) -> None:
        """Change what an encoded manifest says of the size of its run."""
        encoded[COUNTS.itemsize - 8 : COUNTS.itemsize] = run_bytes.to_bytes(8, "little")

    @classmethod
    def decode(cls, data: bytes | memoryview, where: str) -> Manifest:
        """The manifest in a payload; raises FormatError where it cannot be one."""
        view = _Cursor(memoryview(data), where)
        counts = view.take(COUNTS, 1)[0]
        rows = view.take(NODE, int(counts["nodes"]))
        if len(rows) and int(rows["tokens"].max()) > MAX_NODE_TOKENS:
            raise FormatError(f"{where}: a node of impossible length")
        nodes = [
            NodeInfo(
                row["digest"].tobytes(), row["parent"].tobytes(), int(row["depth"]), view.take("<i4", row["tokens"])
            )
            for row in rows
        ]
        boundaries = []
        for _ in range(int(counts["boundaries"])):
            head = view.take(BOUNDARY, 1)[0]
            needs = view.take(NEED, int(head["needs"]))
            boundaries.append(BoundaryInfo(head["node"].tobytes(), needs, int(head["touched"]), int(head["hits"])))
        view.end()
        return cls(nodes, boundaries, int(counts["objects"]), int(counts["run"]))


class _Cursor:
    """Takes typed pieces out of bytes and never goes beyond their end."""

    def __init__(self, data: memoryview, where: str) -> None:
        self._data, self._at, self._where = data, 0, where

    def take(self, dtype: npt.DTypeLike, count: int) -> AnyArray:
        size = np.dtype(dtype).itemsize * int(count)
        if size > len(self._data) - self._at:
            raise FormatError(f"{self._where}: the manifest is shorter than it says")
        self._at += size
        return np.frombuffer(self._data[self._at - size : self._at], dtype).copy()

    def end(self) -> None:
        if self._at != len(self._data):
            raise FormatError(f"{self._where}: the manifest is longer than it says")


def _bytes(digest: bytes) -> AnyArray:
    return np.frombuffer(digest, np.uint8)
