"""The only door from a match to a lease: a hit passes four levels, or there is no ``VerifiedHit``.

1. LCM: the boundary is a whole number of segments, or a checkpoint with its tail.
2. Kernel ABI: the namespace carries the layout identity of this manager.
3. Groups: every group has, at this boundary, every object it needs, at the grade asked for.
4. Bytes: the slots of every group are aligned for the device.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Protocol

from kvloom.core.arrays import Arrays
from kvloom.core.calls import verify_groups
from kvloom.core.fields import NTOKENS
from kvloom.errors import IntegrityError
from kvloom.plan import ArenaGeometry
from kvloom.types import AnyArray, Grade, Int32Array

SLOT_ALIGN = 256

_DOOR = object()


@dataclass(frozen=True, slots=True)
class VerifiedHit:
    """A boundary that passed all four levels.

    Attributes:
        position: reused tokens; 0 is the empty hit.
        depth: whole segments before it; ``path[: depth + 1]`` are their nodes.
        checkpoint: node of the checkpoint, or -1 at a segment end.
        path: int32, a private copy.
    """

    position: int
    depth: int
    checkpoint: int
    path: Int32Array
    door: InitVar[object]

    def __post_init__(self, door: object) -> None:
        if door is not _DOOR:
            raise TypeError("a VerifiedHit is only made by kvloom.verify.hit.verify")


class Verifiable(Protocol):
    """What verification looks at: the core, how its arena is cut, and the layout identity."""

    arrays: Arrays
    handle: AnyArray
    geometry: ArenaGeometry
    layout: bytes


def verify(
    core: Verifiable, path: Int32Array, boundary: tuple[int, int, int], floor: Grade, layout: bytes
) -> VerifiedHit:
    """Check a matched boundary; raises IntegrityError when a level fails, since the match should not offer such a hit.

    Args:
        core: where the prefix lies.
        path: int32, the nodes of the segments.
        boundary: (segments before it, checkpoint node or -1, position).
        floor: worst grade that the request accepts.
        layout: the identity that was stored with the namespace.
    """
    depth, checkpoint, position = boundary
    segment = core.arrays.tokens.shape[1]
    tail = 0 if checkpoint < 0 else int(core.arrays.trunk[checkpoint, NTOKENS])
    if position != depth * segment + tail or tail >= segment:
        raise IntegrityError(f"LCM level: {position} is neither {depth} segments of {segment} tokens nor a checkpoint")
    if layout != core.layout:
        raise IntegrityError("kernel ABI level: the prefix was stored under another layout identity")
    group = verify_groups(core.handle, path, depth, checkpoint, position, floor.value)
    if group >= 0:
        raise IntegrityError(f"group level: group {group} lacks an object that resuming at token {position} needs")
    if core.geometry.alignment % SLOT_ALIGN:
        raise IntegrityError(f"byte level: slots are not aligned to {SLOT_ALIGN} bytes")
    return VerifiedHit(position, depth, checkpoint, path[: depth + 1].copy(), _DOOR)
