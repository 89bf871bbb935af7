"""XXH3-128 around the passes over the bytes: how it begins, and what becomes of its accumulators at the end."""

from __future__ import annotations

from typing import Any

from kvloom.core._jit import jit_of
from kvloom.tiers.hashing.xxh3 import (
    P32_1,
    P32_2,
    P32_3,
    P64_1,
    P64_2,
    P64_3,
    P64_4,
    P64_5,
    U,
)
from kvloom.types import AnyArray

jit = jit_of("kvloom.tiers.hashing")


@jit
def begin(acc: AnyArray, secret: AnyArray, plain: AnyArray, seed: Any) -> None:
    """Set accumulators and secret for a seed; ``plain`` is ``SECRET``."""
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
def first_word(acc: AnyArray, secret: AnyArray, size: int) -> Any:
    """The first eight bytes of the digest, as they lie in memory, of ``size`` bytes."""
    return _swap(_merge(acc, secret, 117, U(~U(U(size) * P64_2))))


@jit
def second_word(acc: AnyArray, secret: AnyArray, size: int) -> Any:
    """The last eight bytes of the digest."""
    return _swap(_merge(acc, secret, 11, U(U(size) * P64_1)))
