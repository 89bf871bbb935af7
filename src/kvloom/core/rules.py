"""What each group needs to resume at a position: the arithmetic that match, commit and footprint share.

Positions are token counts; an object range is half-open in blocks of the group.
"""

from __future__ import annotations

from kvloom.core._jit import jit
from kvloom.core.arrays import RULE_PREFIX, RULE_SNAPSHOT, RULE_WINDOW, Arrays


@jit
def needed_from(a: Arrays, g: int, position: int) -> int:
    """First token whose state group ``g`` needs to resume at ``position`` (block groups)."""
    if a.rule[g] == RULE_PREFIX:
        return 0
    window = a.window[g]
    if a.chunked[g]:
        return position // window * window
    return max(0, position - window + 1)


@jit
def first_block_needed(a: Arrays, g: int, position: int) -> int:
    """First block that group ``g`` needs at ``position``."""
    return needed_from(a, g, position) // a.block_tokens[g]


@jit
def blocks_at(a: Arrays, g: int, position: int) -> int:
    """Blocks that hold the entries of [0, position): one past the last block in use."""
    entries = position // a.ratio[g]
    per_block = a.block_tokens[g] // a.ratio[g]
    return (entries + per_block - 1) // per_block


@jit
def snapshot_needed(a: Arrays, g: int, position: int) -> bool:
    """Whether snapshot group ``g`` needs its snapshot to resume at ``position``."""
    if position < a.first_needed[g]:
        return False
    multiple = a.unless_multiple[g]
    return multiple == 0 or position % multiple != 0


@jit
def snapshot_kept(a: Arrays, g: int, position: int) -> bool:
    """Whether a segment end at ``position`` keeps a snapshot of group ``g`` without being asked."""
    return snapshot_needed(a, g, position) and position % a.interval[g] == 0


@jit
def block_useful(a: Arrays, g: int, block: int, end: int) -> bool:
    """Whether block ``block`` is needed to resume at segment end ``end``, so worth publishing there."""
    if a.rule[g] == RULE_SNAPSHOT:
        return False
    if a.rule[g] == RULE_WINDOW:
        lowest = needed_from(a, g, end)
        return lowest < end and (block + 1) * a.block_tokens[g] > lowest
    return True
