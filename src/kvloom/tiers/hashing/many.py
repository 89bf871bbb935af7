"""Objects copied and digested (XXH3-128, no seed) in one compiled pass: many in one call, or a large one part by part.

Nothing holds the GIL meanwhile.  Addresses are taken as they are: whoever calls knows that memory is there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from kvloom.tiers.hashing.streaming import fence
from kvloom.tiers.hashing.sums import begin, first_word, jit, second_word
from kvloom.tiers.hashing.xxh3 import (
    BLOCK,
    SECRET,
    SHORT,
    STRIPE,
    U,
    copy_blocks,
    copy_stripes,
    hash_blocks,
    hash_stripes,
    scratch,
    stream_blocks,
)
from kvloom.tiers.rows import memcpy
from kvloom.types import AnyArray, IntArray


@jit
def _blocks(source: int, blocks: int, to: int, acc: AnyArray, secret: AnyArray) -> None:
    """Whole blocks, copied to an address (0: nowhere)."""
    sums, key = acc.ctypes.data, secret.ctypes.data
    if to == 0:
        hash_blocks(0, source, blocks, key, sums)
    elif to & (STRIPE - 1) == 0:
        stream_blocks(to, source, blocks, key, sums)
    else:
        copy_blocks(to, source, blocks, key, sums)


@jit
def _end(source: int, size: int, to: int, acc: AnyArray, secret: AnyArray) -> None:
    """The last bytes of an object, at least a stripe unless they are the whole of it."""
    sums, key = acc.ctypes.data, secret.ctypes.data
    blocks = (size - 1) // BLOCK
    _blocks(source, blocks, to, acc, secret)
    done = blocks * BLOCK
    stripes = (size - 1 - done) // STRIPE
    if to == 0:
        hash_stripes(0, source + done, stripes, key, sums)
    else:
        copy_stripes(to + done, source + done, stripes, key, sums)
        rest = done + stripes * STRIPE
        memcpy(to + rest, source + rest, size - rest)
    hash_stripes(0, source + size - STRIPE, 1, key + 121, sums)


@jit
def _digests(
    sources: AnyArray, lengths: AnyArray, to: AnyArray, out: AnyArray, plain: AnyArray, acc: AnyArray, secret: AnyArray
) -> None:
    """``out`` uint64 ``[n, 2]``; of what is not longer than ``SHORT`` there is no digest, it is only copied."""
    for i in range(len(sources)):
        if lengths[i] <= SHORT:
            if to[i] != 0:
                memcpy(to[i], sources[i], lengths[i])
            continue
        begin(acc, secret, plain, U(0))
        _end(sources[i], lengths[i], to[i], acc, secret)
        out[i, 0], out[i, 1] = first_word(acc, secret, lengths[i]), second_word(acc, secret, lengths[i])
    fence()


@jit
def _part(
    source: int, size: int, to: int, total: int, out: AnyArray, plain: AnyArray, acc: AnyArray, secret: AnyArray
) -> None:
    """A part of a large object.  ``out`` uint64 ``[3]``: bytes that came, then the digest once they are ``total``."""
    if out[0] == U(0):
        begin(acc, secret, plain, U(0))
    out[0] += U(size)
    if out[0] < U(total):
        _blocks(source, size // BLOCK, to, acc, secret)
    else:
        _end(source, size, to, acc, secret)
        out[1], out[2] = first_word(acc, secret, total), second_word(acc, secret, total)
    fence()


def digests(data: AnyArray, starts: IntArray, lengths: IntArray, to: IntArray) -> AnyArray:
    """The digests, uint8 ``[n, 16]``, of objects at ``starts`` of uint8 ``data``; they are copied to addresses ``to``.

    An address of 0: nowhere.  Thread-safe.
    """
    out = np.empty((len(starts), 2), np.uint64)
    _digests(starts + data.ctypes.data, lengths, to, out, SECRET, *scratch())
    made = out.view(np.uint8)
    for i in np.flatnonzero(lengths <= SHORT).tolist():
        part = data[int(starts[i]) : int(starts[i] + lengths[i])]
        made[i] = np.frombuffer(xxhash.xxh3_128_digest(part.data), np.uint8)
    return made


class Parts:
    """The digest of an object of ``total`` bytes that comes in parts and is copied to the address ``to``.

    Every part but the last is whole blocks of ``BLOCK`` bytes, and the last one is longer than ``SHORT``.
    """

    def __init__(self, total: int, to: int) -> None:
        self._total, self._to = total, to
        self._out, self._scratch = np.zeros(3, np.uint64), scratch()

    def add(self, part: AnyArray) -> None:
        """The next bytes, uint8."""
        done = int(self._out[0])
        _part(part.ctypes.data, len(part), self._to + done, self._total, self._out, SECRET, *self._scratch)

    def digest(self) -> bytes:
        """16 bytes; empty while there is more to come."""
        made: bytes = self._out[1:].tobytes() if int(self._out[0]) == self._total else b""
        return made


def warm_up() -> int:
    """Compile what is not on disk yet, and return how many functions that were."""
    data, zero = np.zeros(4096, np.uint8), np.zeros(1, np.int64)
    digests(data, zero, zero + 300, zero + data.ctypes.data)
    Parts(2048, data.ctypes.data).add(data[:1024])
    functions: tuple[Any, ...] = (_blocks, _end, _digests, _part)
    return sum(len(function.stats.cache_misses) for function in functions)
