"""Many objects in one compiled call: copied, and the XXH3-128 digest of each."""

from __future__ import annotations

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
def _digests(
    sources: AnyArray, lengths: AnyArray, to: AnyArray, out: AnyArray, plain: AnyArray, acc: AnyArray, secret: AnyArray
) -> None:
    """Addresses of objects, their bytes, addresses to copy them to (0: nowhere); ``out`` uint64 ``[n, 2]``.

    Of what is not longer than ``SHORT`` there is no digest in ``out``.
    """
    sums, key = acc.ctypes.data, secret.ctypes.data
    for i in range(len(sources)):
        source, size, there = sources[i], lengths[i], to[i]
        if size <= SHORT:
            if there != 0:
                memcpy(there, source, size)
            continue
        begin(acc, secret, plain, U(0))
        blocks = (size - 1) // BLOCK
        done = blocks * BLOCK
        stripes = (size - 1 - done) // STRIPE
        if there == 0:
            hash_blocks(0, source, blocks, key, sums)
            hash_stripes(0, source + done, stripes, key, sums)
        else:
            if there & (STRIPE - 1) == 0:
                stream_blocks(there, source, blocks, key, sums)
            else:
                copy_blocks(there, source, blocks, key, sums)
            copy_stripes(there + done, source + done, stripes, key, sums)
            rest = done + stripes * STRIPE
            memcpy(there + rest, source + rest, size - rest)
        hash_stripes(0, source + size - STRIPE, 1, key + 121, sums)
        out[i, 0], out[i, 1] = first_word(acc, secret, size), second_word(acc, secret, size)
    fence()


def digests(data: AnyArray, starts: IntArray, lengths: IntArray, to: IntArray) -> AnyArray:
    """The digests, uint8 ``[n, 16]``, of objects at ``starts`` of uint8 ``data``; they are copied to addresses ``to``.

    An address of 0: nowhere.  Whoever calls knows that objects lie within ``data`` and that their places are writable.
    Without the GIL.  Thread-safe.
    """
    out = np.empty((len(starts), 2), np.uint64)
    _digests(starts + data.ctypes.data, lengths, to, out, SECRET, *scratch())
    made = out.view(np.uint8)
    for i in np.flatnonzero(lengths <= SHORT).tolist():
        part = data[int(starts[i]) : int(starts[i] + lengths[i])]
        made[i] = np.frombuffer(xxhash.xxh3_128_digest(part.data), np.uint8)
    return made


def warm_up() -> int:
    """Compile what is not on disk yet, and return how many functions that were."""
    data, one = np.zeros(300, np.uint8), np.zeros(1, np.int64)
    digests(data, one, one + 300, one)
    return len(_digests.stats.cache_misses)  # type: ignore[attr-defined]  # Numba's
