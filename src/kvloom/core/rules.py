"""What each group needs to resume at a position: the arithmetic that match, commit and footprint share.

Positions are token counts; an object range is half-open in blocks of the group.
"""

from __future__ import annotations

from kvloom.core._jit import jit
from kvloom.core.arrays import (
    BLOCK_TOKENS,
    CHUNKED,
    FIRST_NEEDED,
    INTERVAL,
    RATIO,
    RULE,
    RULE_PREFIX,
    RULE_SNAPSHOT,
    RULE_WINDOW,
    UNLESS_MULTIPLE,
    WINDOW,
    Arrays,
)


@jit
def needed_from(a: Arrays, g: int, position: int) -> int:
    """First token whose state group ``g`` needs to resume at ``position`` (block groups)."""
    if a.group[RULE, g] == RULE_PREFIX:
        return 0
    window = a.group[WINDOW, g]
    if a.group[CHUNKED, g]:
        return position // window * window
    return max(0, position - window + 1)


@jit
def first_block_needed(a: Arrays, g: int, position: int) -> int:
    """First block that group ``g`` needs at ``position``."""
    return needed_from(a, g, position) // a.group[BLOCK_TOKENS, g]


@jit
def blocks_at(a: Arrays, g: int, position: int) -> int:
    """Blocks that hold the entries of [0, position): one past the last block in use."""
    entries = position // a.group[RATIO, g]
    per_block = a.group[BLOCK_TOKENS, g] // a.group[RATIO, g]
    return (entries + per_block - 1) // per_block


@jit
def snapshot_needed(a: Arrays, g: int, position: int) -> bool:
    """Whether snapshot group ``g`` needs its snapshot to resume at ``position``."""
    if position < a.group[FIRST_NEEDED, g]:
        return False
    multiple = a.group[UNLESS_MULTIPLE, g]
    return multiple == 0 or position % multiple != 0


@jit
def snapshot_kept(a: Arrays, g: int, position: int) -> bool:
    """Whether a segment end at ``position`` keeps a snapshot of group ``g`` without being asked."""
    return snapshot_needed(a, g, position) and position % a.group[INTERVAL, g] == 0


@jit
def block_useful(a: Arrays, g: int, block: int, end: int) -> bool:
    """Whether block ``block`` is needed to resume at segment end ``end``, so worth publishing there."""
    if a.group[RULE, g] == RULE_SNAPSHOT:
        return False
    if a.group[RULE, g] == RULE_WINDOW:
        lowest = needed_from(a, g, end)
        return lowest < end and (block + 1) * a.group[BLOCK_TOKENS, g] > lowest
    return True
