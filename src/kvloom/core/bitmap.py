"""Hierarchical bitmap of the free slots: find the lowest free slot from a place on in a handful of steps.

Level 0 has one bit per global slot; every higher level has one bit per word of the level below, set while that word
is not zero.  A bit of a slot is set while the slot is free and its page belongs to a group.
"""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.extending import intrinsic

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.fields import BIT_BASE, BIT_LEVELS


def _lowest_bit(_typing: Any, _word: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        from llvmlite import ir

        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), generate


lowest_bit = intrinsic(_lowest_bit)
"""Number of zero bits below the lowest set bit of an int64."""


@jit
def _note_filled(a: Arrays, word: int) -> None:
    """Word ``word`` of level 0 is not zero any more."""
    for level in range(1, a.scalars[BIT_LEVELS]):
        base = a.scalars[BIT_BASE + level]
        bit, word = word & 63, word >> 6
        before = a.free_bits[base + word]
        a.free_bits[base + word] = before | (1 << bit)
        if before != 0:
            return


@jit
def _note_emptied(a: Arrays, word: int) -> None:
    """Word ``word`` of level 0 became zero."""
    for level in range(1, a.scalars[BIT_LEVELS]):
        base = a.scalars[BIT_BASE + level]
        bit, word = word & 63, word >> 6
        a.free_bits[base + word] &= ~(1 << bit)
        if a.free_bits[base + word] != 0:
            return


@inlined
def mark_free(a: Arrays, s: int) -> None:
    """Set the bit of slot ``s``."""
    before = a.free_bits[s >> 6]
    a.free_bits[s >> 6] = before | (1 << (s & 63))
    if before == 0:
        _note_filled(a, s >> 6)


@inlined
def take_bits(a: Arrays, word: int, taken: int) -> None:
    """Clear the bits ``taken`` of word ``word`` of level 0."""
    a.free_bits[word] &= ~taken
    if a.free_bits[word] == 0:
        _note_emptied(a, word)


@inlined
def _span_of_word(word: int, first: int, last: int) -> int:
    """The bits of ``word`` that stand for slots in [first, last)."""
    mask = -1
    if first > word << 6:
        mask = mask << (first & 63)
    if last < (word + 1) << 6:
        mask &= (1 << (last & 63)) - 1
    return mask


@jit
def mark_range_free(a: Arrays, first: int, last: int) -> None:
    """Set the bits of the slots [first, last)."""
    for word in range(first >> 6, ((last - 1) >> 6) + 1):
        before = a.free_bits[word]
        a.free_bits[word] = before | _span_of_word(word, first, last)
        if before == 0:
            _note_filled(a, word)


@jit
def take_range(a: Arrays, first: int, last: int) -> None:
    """Clear the bits of the slots [first, last)."""
    for word in range(first >> 6, ((last - 1) >> 6) + 1):
        take_bits(a, word, _span_of_word(word, first, last))


@jit
def next_free(a: Arrays, s: int) -> int:
    """The lowest free slot that is not below ``s``, or -1."""
    word, level = s >> 6, 0
    here = a.free_bits[word] & (-1 << (s & 63))
    while here == 0:
        level += 1
        if level == a.scalars[BIT_LEVELS]:
            return -1
        bit, word = word & 63, word >> 6
        above = -1 << (bit + 1) if bit < 63 else 0
        here = a.free_bits[a.scalars[BIT_BASE + level] + word] & above
    while level > 0:
        word = (word << 6) + lowest_bit(here)
        level -= 1
        here = a.free_bits[a.scalars[BIT_BASE + level] + word]
    return (word << 6) + lowest_bit(here)


def level_words(slots: int) -> list[int]:
    """Words of each level for this many slots, lowest level first."""
    words = [max(1, -(-slots // 64))]
    while words[-1] > 1:
        words.append(-(-words[-1] // 64))
    return words
