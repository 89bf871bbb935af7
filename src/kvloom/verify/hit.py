"""The only door from a match to a lease: a hit passes four levels, or there is no ``VerifiedHit``.

1. LCM: the boundary is a whole number of segments, or a checkpoint with its tail.
2. Kernel ABI: the namespace carries the layout identity of this manager.
3. Groups: every group has, at this boundary, every object it needs, at the grade asked for.
4. Bytes: the slots of every group are aligned for the device.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass

from kvloom.core.arrays import Arrays
from kvloom.core.fields import NTOKENS
from kvloom.core.hybrid_match import first_bad_group
from kvloom.errors import IntegrityError
from kvloom.plan import ArenaGeometry
from kvloom.types import Grade, Int32Array

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


def verify(
    arrays: Arrays,
    geometry: ArenaGeometry,
    path: Int32Array,
    depth: int,
    checkpoint: int,
    position: int,
    floor: Grade,
    layouts: tuple[bytes, bytes],
) -> VerifiedHit:
    """Check a matched boundary; raises IntegrityError when a level fails, since the match should not offer such a hit.

    ``layouts``: the identity stored with the namespace and the one of this manager.
    """
    segment = arrays.tokens.shape[1]
    tail = 0 if checkpoint < 0 else int(arrays.node[checkpoint, NTOKENS])
    if position != depth * segment + tail or tail >= segment:
        raise IntegrityError(f"LCM level: {position} is neither {depth} segments of {segment} tokens nor a checkpoint")
    if layouts[0] != layouts[1]:
        raise IntegrityError("kernel ABI level: the prefix was stored under another layout identity")
    group = int(first_bad_group(arrays, path, depth, checkpoint, position, int(floor)))
    if group >= 0:
        raise IntegrityError(f"group level: group {group} lacks an object that resuming at token {position} needs")
    if ((geometry.base | geometry.page_bytes | geometry.slot_bytes) % SLOT_ALIGN).any():
        raise IntegrityError(f"byte level: slots are not aligned to {SLOT_ALIGN} bytes")
    return VerifiedHit(position, depth, checkpoint, path[: depth + 1].copy(), _DOOR)
