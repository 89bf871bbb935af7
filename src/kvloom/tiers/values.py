"""What goes in and comes out of a cold tier: frozen values, checked where they are made."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.errors import InputError
from kvloom.types import AnyArray, Grade, PayloadForm

Digests = npt.NDArray[np.uint8]

DIGEST = 32
"""Bytes of a digest."""
MAX_PAYLOAD = 1 << 30
"""Bytes of one object."""
MAX_NODE_TOKENS = 1 << 20
"""Tokens of one node."""
MOST_TAILS = 64
"""Ends of units within the next segment that a lookup tells of."""

OBJECT = np.dtype([("group", "<u4"), ("column", "<u4"), ("form", "u1"), ("grade", "u1"), ("length", "<u4")])
"""What every tier says of an object; tiers add fields of their own, which only they read."""


class Outcome(enum.StrEnum):
    """How a publication ended.  Only after ``PUBLISHED`` and ``KNOWN`` is the unit there."""

    PUBLISHED = "published"
    KNOWN = "known"
    """Everything was there already; nothing was written."""
    INCOMPLETE = "incomplete"
    """Objects that the boundary needs were neither brought along nor are they stored (any more); or a digest is
    in the chain twice, or is stored already with other tokens or in another place."""
    NO_ROOM = "no_room"
    """The unit does not fit under the cap, whatever is evicted; or others read at present what would have to go."""
    UNAVAILABLE = "unavailable"
    """The disk does not take writes at present; ``Published.reason`` says why."""


class Result(enum.IntEnum):
    """What became of one object of a read."""

    OK = 0
    INTEGRITY = 1
    """It is not what was stored; it is quarantined and will not be found again."""
    IO_ERROR = 2
    MISSING = 3
    """It was removed since it was looked up."""
    STOPPED = 4
    """The caller asked the read to stop before it came to this object."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A payload that writes itself: ``write`` is called with exactly ``size`` writable bytes, 256-byte aligned.

    It runs in the thread that publishes, straight into the buffer that goes to the disk; again when others evicted
    meanwhile what the unit builds on.
    """

    size: int
    write: Callable[[memoryview], None]


@dataclass(frozen=True, slots=True)
class NewObject:
    """An object to store: column ``column`` of group ``group`` within node ``node`` (index into the unit's chain)."""

    node: int
    group: int
    column: int
    grade: Grade
    payload: bytes | bytearray | memoryview | AnyArray | Fill
    form: PayloadForm = PayloadForm.RAW

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        if isinstance(self.payload, Fill):
            return self.payload.size
        return self.payload.nbytes if isinstance(self.payload, np.ndarray) else memoryview(self.payload).nbytes


@dataclass(frozen=True, slots=True)
class Need:
    """What a boundary needs of one group: the ``count`` objects from (first_node, first_column) on to its own node.

    COMPRESSED and INDEXER groups begin at node 0, windows where they begin, snapshots at the boundary's own node.
    """

    group: int
    first_node: int
    count: int
    first_column: int = 0


@dataclass(frozen=True, slots=True)
class Unit:
    """A prefix unit to publish: the chain of nodes from depth 0 to the boundary, and what is new of it.

    Attributes:
        layout: 32 bytes, digest of the layout identity.
        root: 32 bytes, digest of the empty prefix in this namespace.
        digests: uint8 ``[n, 32]``, n >= 1: of every node of the chain; the last one is the boundary.
        tokens: int32, of the whole chain.
        segment: tokens of every node but the last, which has the rest of them (at least one).
        objects: what is new, in the order in which it is to lie on the disk.
        needs: what the boundary needs, of what is new and of what is stored.
    """

    layout: bytes
    root: bytes
    digests: Digests
    tokens: npt.NDArray[np.int32]
    segment: int
    objects: Sequence[NewObject]
    needs: Sequence[Need]

    def __post_init__(self) -> None:
        check_layout(self.layout)
        check_digests(self.digests)
        if len(self.root) != DIGEST:
            raise InputError(f"a root digest has {DIGEST} bytes, not {len(self.root)}")
        n = len(self.digests)
        if self.tokens.dtype != np.int32 or self.tokens.ndim != 1:
            raise InputError(f"tokens are int32 of one dimension, not {self.tokens.dtype} of shape {self.tokens.shape}")
        if not 1 <= self.segment <= MAX_NODE_TOKENS or -(-len(self.tokens) // self.segment) != n or n == 0:
            raise InputError(f"{len(self.tokens)} tokens in segments of {self.segment} are not a chain of {n} nodes")
        seen = set()
        for item in self.objects:
            key = (item.node, item.group, item.column)
            if not 0 <= item.node < n or not 0 <= item.group < 1 << 31 or not 0 <= item.column < 1 << 31:
                raise InputError(f"object (node, group, column) = {key} does not fit into a chain of {n} nodes")
            if not 1 <= item.size <= MAX_PAYLOAD:
                raise InputError(f"object {key} has {item.size} bytes; use 1 to {MAX_PAYLOAD}")
            if key in seen:
                raise InputError(f"object (node, group, column) = {key} is there twice")
            seen.add(key)
        for need in self.needs:
            if not 0 <= need.first_node < n or need.first_column < 0 or need.count < 0 or need.group < 0:
                raise InputError(f"{need} does not fit into a chain of {n} nodes")


@dataclass(frozen=True, slots=True)
class Published:
    """What a publication did: objects and bytes written (headers and padding included), and why nothing was."""

    outcome: Outcome
    objects: int = 0
    bytes_written: int = 0
    reason: str = ""

    @property
    def stored(self) -> bool:
        """Whether the unit is there now."""
        return self.outcome in {Outcome.PUBLISHED, Outcome.KNOWN}


@dataclass(frozen=True, slots=True)
class Places:
    """Objects and where they lie.

    Attributes:
        layout: 32 bytes.
        digests: uint8 ``[m, 32]``, the node of every object.
        entries: structured ``[m]``: the fields of ``OBJECT``, and what the tier itself adds to find the object again.
        rows: int64 ``[m]``, the row of the lookup's digests that every object belongs to.
    """

    layout: bytes
    digests: Digests
    entries: AnyArray
    rows: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.entries)

    def take(self, which: AnyArray) -> Places:
        """Some of them: indices or a mask."""
        return Places(self.layout, self.digests[which], self.entries[which], self.rows[which])

    @classmethod
    def join(cls, parts: Sequence[Places]) -> Places:
        """All of several, which are of one layout, so that one read takes them; ``rows`` stay as they are."""
        layouts = {part.layout for part in parts}
        if len(layouts) != 1:
            raise InputError(f"places of {len(layouts)} layouts cannot be joined; read one layout at a time")
        digests, entries, rows = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("digests", "entries", "rows")
        )
        return cls(parts[0].layout, digests, entries, rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads."""
        return int(self.entries["length"].sum(dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Found:
    """What is stored of a chain.

    Attributes:
        known: bool ``[n]``, whether the node is known.
        boundary: bool ``[n]``, whether a unit was published that ends there.
        places: of all objects of all known nodes.
        tails: int32 ``[k, 2]``: (row, tokens) of units that end less than a segment behind the deepest known node of
            the chain, whatever their tokens are: each number once, the newest ``MOST_TAILS``, as far as the tier tells.
            Row -1 is the root, where the numbers may be those of whole segments too.
    """

    known: npt.NDArray[np.bool_]
    boundary: npt.NDArray[np.bool_]
    places: Places
    tails: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 2), np.int32))


@dataclass(frozen=True, slots=True)
class Batch:
    """Some nodes of one layout.

    Attributes:
        layout: 32 bytes.
        digests, parents: uint8 ``[n, 32]``.
        depth: int64 ``[n]``, 0 for the first node of a chain.
        tokens: int32, of all nodes one after the other; those of node i are ``[starts[i], starts[i + 1])``.
        starts: int64 ``[n + 1]``.
        boundary: bool ``[n]``.
        touched: int64 ``[n]``: when the unit that ends there was last used, 0 where there is none.
        places: objects of these nodes; ``places.rows`` are rows of ``digests``.
    """

    layout: bytes
    digests: Digests
    parents: Digests
    depth: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    boundary: npt.NDArray[np.bool_]
    touched: npt.NDArray[np.int64]
    places: Places


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What became of the objects of a read: ``results`` uint8 ``[m]`` of ``Result``; ``bytes_read`` from the disk."""

    results: npt.NDArray[np.uint8]
    bytes_read: int
    reads: int
    reason: str = field(default="")

    @property
    def ok(self) -> bool:
        """Whether every object arrived."""
        return not self.results.any()


def check_layout(layout: bytes) -> None:
    """Raise InputError for anything but 32 bytes."""
    if len(layout) != DIGEST:
        raise InputError(f"a layout digest is {DIGEST} bytes")


def check_digests(digests: Digests) -> None:
    """Raise InputError for anything but uint8 ``[n, 32]``."""
    if digests.dtype != np.uint8 or digests.ndim != 2:
        raise InputError(f"digests are a uint8 array of shape [n, {DIGEST}]")
    if digests.shape[1] != DIGEST:
        raise InputError(f"a digest has {DIGEST} bytes, not {digests.shape[1]}")


def no_places(layout: bytes, dtype: np.dtype[Any] = OBJECT) -> Places:
    """Nothing, with entries of ``dtype``."""
    return Places(layout, np.empty((0, DIGEST), np.uint8), np.empty(0, dtype), np.empty(0, np.int64))
