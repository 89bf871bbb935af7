"""Compiled steps: objects copied out of their pages and checked in one pass."""

from __future__ import annotations

from typing import Any

from kvloom.tiers.host.arrays import MEMORY, PAGE, PAGES, RUN
from kvloom.tiers.host.pages import gather, jit
from kvloom.tiers.host.streaming import fence
from kvloom.tiers.host.xxh3 import (
    BLOCK,
    P32_1,
    P32_2,
    P32_3,
    P64_1,
    P64_2,
    P64_3,
    P64_4,
    P64_5,
    SHORT,
    STRIPE,
    U,
    copy_blocks,
    copy_stripes,
    hash_stripes,
    stream_blocks,
)
from kvloom.tiers.rows import memcpy, zero
from kvloom.types import AnyArray

GOOD, BAD, UNCHECKED = 1, 0, 2


@jit
def _begin(acc: AnyArray, secret: AnyArray, plain: AnyArray, seed: Any) -> None:
    acc[0], acc[1], acc[2], acc[3] = P32_3, P64_1, P64_2, P64_3
    acc[4], acc[5], acc[6], acc[7] = P64_4, P32_2, P64_5, P32_1
    for i in range(12):
        secret[2 * i] = U(plain[2 * i] + seed)
        secret[2 * i + 1] = U(plain[2 * i + 1] - seed)


@jit
def _secret_word(secret: AnyArray, at: int) -> Any:
    """Eight bytes of the secret from byte ``at`` on."""
    low, shift = at >> 3, U(8 * (at & 7))
    if at & 7 == 0:
        return secret[low]
    return U((secret[low] >> shift) | (secret[low + 1] << (U(64) - shift)))


@jit
def _fold(x: Any, y: Any) -> Any:
    """The upper half of a product of 128 bits, xor the lower one."""
    mask, half = U(0xFFFFFFFF), U(32)
    a, b, c, d = U(x & mask), U(x >> half), U(y & mask), U(y >> half)
    low, cross, other, high = U(a * c), U(b * c), U(a * d), U(b * d)
    middle = U((low >> half) + (cross & mask) + other)
    return U(U((cross >> half) + (middle >> half) + high) ^ U((middle << half) | (low & mask)))


@jit
def _merge(acc: AnyArray, secret: AnyArray, at: int, start: Any) -> Any:
    h = start
    for i in range(4):
        x = U(acc[2 * i] ^ _secret_word(secret, at + 16 * i))
        y = U(acc[2 * i + 1] ^ _secret_word(secret, at + 16 * i + 8))
        h = U(h + _fold(x, y))
    h = U((h ^ (h >> U(37))) * U(0x165667919E3779F9))
    return U(h ^ (h >> U(32)))


@jit
def _swap(x: Any) -> Any:
    """The other order of bytes."""
    y = U(0)
    for i in range(8):
        y = U((y << U(8)) | ((x >> U(8 * i)) & U(255)))
    return y


@jit
def _copy_and_hash(a: Any, page: int, size: int, to: int, acc: AnyArray, secret: AnyArray) -> int:
    """Copy an object of more than ``SHORT`` bytes; 0 where its runs are not what they can be."""
    blocks = (size - 1) // BLOCK
    done, begin = 0, to
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
    hash_stripes(0, begin + size - STRIPE, 1, key + 121, sums)
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
        _begin(acc, secret, plain, seeds[i])
        good[i] = _copy_and_hash(a, page, size, to[i], acc, secret)
        if good[i] == GOOD:
            low = _merge(acc, secret, 11, U(U(size) * P64_1))
            high = _merge(acc, secret, 117, U(~U(U(size) * P64_2)))
            if _swap(high) != U(checks[i, 0]) or _swap(low) != U(checks[i, 1]):
                good[i] = BAD
        if good[i] == BAD:
            zero(to[i], size)
    fence()
