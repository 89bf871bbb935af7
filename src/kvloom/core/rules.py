"""What each group needs to resume at a position: the compiled form of ``kvloom.kinds``.

Positions are token counts; an object range is half-open in blocks of the group.
"""

from __future__ import annotations

from kvloom.core._jit import inlined
from kvloom.core.arrays import Arrays
from kvloom.core.fields import (
    BLOCK_SHIFT,
    BLOCK_TOKENS,
    CHUNKED,
    FIRST_NEEDED,
    INTERVAL,
    RATIO,
    RATIO_SHIFT,
    REST_INTERVAL,
    RULE,
    RULE_PREFIX,
    UNLESS_MULTIPLE,
    WINDOW,
)


@inlined
def needed_from(a: Arrays, g: int, position: int) -> int:
    """First token whose state group ``g`` needs to resume at ``position`` (block groups)."""
    if a.group[g, RULE] == RULE_PREFIX:
        return 0
    window = a.group[g, WINDOW]
    if a.group[g, CHUNKED]:
        return position // window * window
    return max(0, position - window + 1)


@inlined
def block_of(a: Arrays, g: int, token: int) -> int:
    """Block that holds token ``token``: ``token // BLOCK_TOKENS``."""
    shift = a.group[g, BLOCK_SHIFT]
    return token >> shift if shift >= 0 else token // a.group[g, BLOCK_TOKENS]


@inlined
def first_block_needed(a: Arrays, g: int, position: int) -> int:
    """First block that group ``g`` needs at ``position``."""
    return block_of(a, g, needed_from(a, g, position))


@inlined
def blocks_at(a: Arrays, g: int, position: int) -> int:
    """Blocks that hold the entries of [0, position): one past the last block in use."""
    ratio, shift = a.group[g, RATIO], a.group[g, RATIO_SHIFT]
    complete = position & -ratio if shift >= 0 else position // ratio * ratio
    return block_of(a, g, complete + a.group[g, BLOCK_TOKENS] - 1)


@inlined
def snapshot_needed(a: Arrays, g: int, position: int) -> bool:
    """Whether snapshot group ``g`` needs its snapshot to resume at ``position``."""
    if position < a.group[g, FIRST_NEEDED]:
        return False
    multiple = a.group[g, UNLESS_MULTIPLE]
    return multiple == 0 or position % multiple != 0


@inlined
def snapshot_kept(a: Arrays, g: int, position: int) -> bool:
    """Whether a segment end at ``position`` keeps a snapshot of group ``g`` without being asked."""
    return snapshot_needed(a, g, position) and position % a.group[g, INTERVAL] == 0


@inlined
def next_rest(a: Arrays, position: int) -> int:
    """The first rest at or after ``position``: boundaries that stay as long as their path; 0 where there is none.

    Rests lie at one, two, three, four, six, eight, twelve... times ``REST_INTERVAL``: half of any longer prefix lies
    before one, and two thirds of those from twice that on.
    """
    every = a.scalars[REST_INTERVAL]
    if every == 0:
        return 0
    times = max(1, (position + every - 1) // every)
    power = 1
    while 2 * power <= times:
        power *= 2
    if times > power:
        power = 2 * power if 2 * times > 3 * power else power + power // 2
    return power * every
