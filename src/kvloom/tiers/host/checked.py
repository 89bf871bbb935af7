"""Compiled steps: objects copied out of their pages and checked in one pass."""

from __future__ import annotations

from typing import Any

from kvloom.tiers.hashing.streaming import fence
from kvloom.tiers.hashing.sums import begin, first_word, second_word
from kvloom.tiers.hashing.xxh3 import (
    BLOCK,
    SHORT,
    STRIPE,
    U,
    copy_blocks,
    copy_stripes,
    hash_stripes,
    stream_blocks,
)
from kvloom.tiers.host.arrays import MEMORY, PAGE, PAGES, RUN
from kvloom.tiers.host.pages import gather, jit
from kvloom.tiers.rows import memcpy, zero
from kvloom.types import AnyArray

GOOD, BAD, UNCHECKED = 1, 0, 2


@jit
def _copy_and_hash(a: Any, page: int, size: int, to: int, acc: AnyArray, secret: AnyArray) -> int:
    """Copy an object of more than ``SHORT`` bytes; 0 where its runs are not what they can be."""
    blocks = (size - 1) // BLOCK
    done, first = 0, to
    sums, key = acc.ctypes.data, secret.ctypes.data
    while done < size:
        if page < 0 or page >= a.scalars[PAGES]:
            return 0
        count = a.run[page, 0]
        if count < 1 or page + count > a.scalars[PAGES]:
            return 0
        source = a.scalars[MEMORY] + page * PAGE
        # Pages are whole blocks, so none lies in two runs.
        here = min(count * PAGE // BLOCK, blocks - done // BLOCK)
        if to & (STRIPE - 1) == 0:
            stream_blocks(to, source, here, key, sums)
        else:
            copy_blocks(to, source, here, key, sums)
        to += here * BLOCK
        source += here * BLOCK
        done += here * BLOCK
        if done == blocks * BLOCK and source < a.scalars[MEMORY] + (page + count) * PAGE:
            stripes = (size - 1 - done) // STRIPE
            copy_stripes(to, source, stripes, key, sums)
            rest = stripes * STRIPE
            memcpy(to + rest, source + rest, size - done - rest)
            done = size
        page = a.run[page, 1]
    hash_stripes(0, first + size - STRIPE, 1, key + 121, sums)
    return 1


@jit
def check_many(  # noqa: PLR0917
    a: Any,
    rows: AnyArray,
    lengths: AnyArray,
    to: AnyArray,
    seeds: AnyArray,
    checks: AnyArray,
    plain: AnyArray,
    acc: AnyArray,
    secret: AnyArray,
    good: AnyArray,
) -> None:
    """Copy objects to addresses ``to`` and compare them with ``checks`` int64 ``[m, 2]``.

    ``good`` gets ``GOOD``, ``BAD`` (then there are zeros), or ``UNCHECKED`` for what is too short.
    """
    for i in range(len(rows)):
        size, page = lengths[i], a.obj[rows[i], RUN]
        if size <= SHORT:
            good[i] = UNCHECKED if gather(a, page, 0, size, to[i]) == 1 else BAD
            continue
        begin(acc, secret, plain, seeds[i])
        good[i] = _copy_and_hash(a, page, size, to[i], acc, secret)
        if good[i] == GOOD:
            first, second = first_word(acc, secret, size), second_word(acc, secret, size)
            if first != U(checks[i, 0]) or second != U(checks[i, 1]):
                good[i] = BAD
        if good[i] == BAD:
            zero(to[i], size)
    fence()
