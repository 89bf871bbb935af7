"""BLAKE3 in compiled loops: many equal pieces of a buffer side by side, and chains of single blocks.

Digests are uint32 words, little-endian as the standard has them.  ``hash_items`` runs sixteen chunks in sixteen lanes
that the compiler turns into vector registers; ``chain`` is one dependency from link to link and runs in scalars.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvloom.core._jit import inlined, jit
from kvloom.types import AnyArray

CHUNK_START, CHUNK_END, PARENT, ROOT = 1, 2, 4, 8
KEYED_HASH, DERIVE_KEY_CONTEXT, DERIVE_KEY_MATERIAL = 16, 32, 64

LANES = 16
CHUNK_WORDS = 256

IV = np.array(
    [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19], dtype=np.uint32
)
_PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)


def _schedule() -> AnyArray:
    """Which message word each of the seven rounds takes where; unsigned, so that no index is checked for its sign."""
    rows = [list(range(16))]
    for _ in range(6):
        rows.append([rows[-1][i] for i in _PERMUTATION])
    return np.array(rows, dtype=np.uint64)


_SCHEDULE = _schedule()
_U: Any = np.uint32


@inlined
def _mix(a: int, b: int, c: int, d: int, x: int, y: int) -> tuple[int, int, int, int]:
    """The quarter round G; every step is cut back to 32 bits, since Numba widens."""
    a = _U(a + b + x)
    d = _U(d ^ a)
    d = _U((d >> _U(16)) | (d << _U(16)))
    c = _U(c + d)
    b = _U(b ^ c)
    b = _U((b >> _U(12)) | (b << _U(20)))
    a = _U(a + b + y)
    d = _U(d ^ a)
    d = _U((d >> _U(8)) | (d << _U(24)))
    c = _U(c + d)
    b = _U(b ^ c)
    b = _U((b >> _U(7)) | (b << _U(25)))
    return a, b, c, d


@inlined
def _compress(key: AnyArray, m: AnyArray, flags: int) -> None:
    """One whole block ``m`` uint32 [16] under ``key``, counter 0; the first eight words of ``m`` get the result."""
    v0, v1, v2, v3, v4, v5, v6, v7 = key[0], key[1], key[2], key[3], key[4], key[5], key[6], key[7]
    v8, v9, v10, v11 = IV[0], IV[1], IV[2], IV[3]
    v12, v13, v14, v15 = _U(0), _U(0), _U(64), _U(flags)
    for r in range(7):
        v0, v4, v8, v12 = _mix(v0, v4, v8, v12, m[_SCHEDULE[r, 0]], m[_SCHEDULE[r, 1]])
        v1, v5, v9, v13 = _mix(v1, v5, v9, v13, m[_SCHEDULE[r, 2]], m[_SCHEDULE[r, 3]])
        v2, v6, v10, v14 = _mix(v2, v6, v10, v14, m[_SCHEDULE[r, 4]], m[_SCHEDULE[r, 5]])
        v3, v7, v11, v15 = _mix(v3, v7, v11, v15, m[_SCHEDULE[r, 6]], m[_SCHEDULE[r, 7]])
        v0, v5, v10, v15 = _mix(v0, v5, v10, v15, m[_SCHEDULE[r, 8]], m[_SCHEDULE[r, 9]])
        v1, v6, v11, v12 = _mix(v1, v6, v11, v12, m[_SCHEDULE[r, 10]], m[_SCHEDULE[r, 11]])
        v2, v7, v8, v13 = _mix(v2, v7, v8, v13, m[_SCHEDULE[r, 12]], m[_SCHEDULE[r, 13]])
        v3, v4, v9, v14 = _mix(v3, v4, v9, v14, m[_SCHEDULE[r, 14]], m[_SCHEDULE[r, 15]])
    m[0], m[1], m[2], m[3] = v0 ^ v8, v1 ^ v9, v2 ^ v10, v3 ^ v11
    m[4], m[5], m[6], m[7] = v4 ^ v12, v5 ^ v13, v6 ^ v14, v7 ^ v15


@jit
def chain(key: AnyArray, first: AnyArray, digests: AnyArray, m: AnyArray) -> None:
    """Turn leaf digests into links in place: ``link[i] = keyed_hash(key, link[i - 1] || leaf[i])``, link[-1] = first.

    key, first: uint32 [8]; digests: uint32 [n, 8]; m: uint32 [16] scratch.
    """
    for j in range(8):
        m[j] = first[j]
    for i in range(digests.shape[0]):
        for j in range(8):
            m[8 + j] = digests[i, j]
        _compress(key, m, KEYED_HASH | CHUNK_START | CHUNK_END | ROOT)
        for j in range(8):
            digests[i, j] = m[j]


@jit
def merge_chunks(key: AnyArray, flags: int, chunks: AnyArray, out: AnyArray, m: AnyArray) -> None:
    """Root digests of items of several chunks: ``chunks`` uint32 [n, k >= 2, 8] (overwritten), ``out`` uint32 [n, 8].

    Neighbours are paired level by level and an odd one goes up as it is, which makes the standard's left-heavy tree.
    """
    for i in range(chunks.shape[0]):
        count = chunks.shape[1]
        while count > 1:
            up = PARENT | flags | (ROOT if count == 2 else 0)
            for pair in range(count // 2):
                for j in range(8):
                    m[j] = chunks[i, 2 * pair, j]
                    m[8 + j] = chunks[i, 2 * pair + 1, j]
                _compress(key, m, up)
                for j in range(8):
                    chunks[i, pair, j] = m[j]
            if count % 2:
                for j in range(8):
                    chunks[i, count // 2, j] = chunks[i, count - 1, j]
            count = (count + 1) // 2
        for j in range(8):
            out[i, j] = chunks[i, 0, j]


@jit
def _round(v: AnyArray, m: AnyArray) -> None:
    """One round over sixteen lanes: word w of lane t lies at 16 w + t.  Permutes the message for the next round."""
    for t in range(LANES):
        v0, v1, v2, v3, v4, v5, v6, v7 = (
            v[t],
            v[16 + t],
            v[32 + t],
            v[48 + t],
            v[64 + t],
            v[80 + t],
            v[96 + t],
            v[112 + t],
        )
        v8, v9, v10, v11 = v[128 + t], v[144 + t], v[160 + t], v[176 + t]
        v12, v13, v14, v15 = v[192 + t], v[208 + t], v[224 + t], v[240 + t]
        m0, m1, m2, m3, m4, m5, m6, m7 = (
            m[t],
            m[16 + t],
            m[32 + t],
            m[48 + t],
            m[64 + t],
            m[80 + t],
            m[96 + t],
            m[112 + t],
        )
        m8, m9, m10, m11 = m[128 + t], m[144 + t], m[160 + t], m[176 + t]
        m12, m13, m14, m15 = m[192 + t], m[208 + t], m[224 + t], m[240 + t]
        v0, v4, v8, v12 = _mix(v0, v4, v8, v12, m0, m1)
        v1, v5, v9, v13 = _mix(v1, v5, v9, v13, m2, m3)
        v2, v6, v10, v14 = _mix(v2, v6, v10, v14, m4, m5)
        v3, v7, v11, v15 = _mix(v3, v7, v11, v15, m6, m7)
        v0, v5, v10, v15 = _mix(v0, v5, v10, v15, m8, m9)
        v1, v6, v11, v12 = _mix(v1, v6, v11, v12, m10, m11)
        v2, v7, v8, v13 = _mix(v2, v7, v8, v13, m12, m13)
        v3, v4, v9, v14 = _mix(v3, v4, v9, v14, m14, m15)
        v[t], v[16 + t], v[32 + t], v[48 + t], v[64 + t], v[80 + t], v[96 + t], v[112 + t] = (
            v0,
            v1,
            v2,
            v3,
            v4,
            v5,
            v6,
            v7,
        )
        v[128 + t], v[144 + t], v[160 + t], v[176 + t] = v8, v9, v10, v11
        v[192 + t], v[208 + t], v[224 + t], v[240 + t] = v12, v13, v14, v15
        m[t], m[16 + t], m[32 + t], m[48 + t], m[64 + t], m[80 + t], m[96 + t], m[112 + t] = (
            m2,
            m6,
            m3,
            m10,
            m7,
            m0,
            m4,
            m13,
        )
        m[128 + t], m[144 + t], m[160 + t], m[176 + t] = m1, m11, m12, m5
        m[192 + t], m[208 + t], m[224 + t], m[240 + t] = m9, m14, m15, m8


@inlined
def _lane_block(lanes: AnyArray, size: int, kind: int) -> None:
    """Sixteen blocks of ``size`` bytes side by side, with the flags ``kind``; the chaining values are replaced."""
    cv, v, m, counters = lanes[:128], lanes[128:384], lanes[384:640], lanes[640:]
    for i in range(128):
        v[i] = cv[i]
    for t in range(LANES):
        v[128 + t], v[144 + t], v[160 + t], v[176 + t] = IV[0], IV[1], IV[2], IV[3]
        v[192 + t], v[208 + t], v[224 + t], v[240 + t] = counters[t], _U(0), _U(size), _U(kind)
    for _ in range(7):
        _round(v, m)
    for i in range(128):
        cv[i] = v[i] ^ v[128 + i]


@inlined
def _begin_chunks(key: AnyArray, shape: AnyArray, job: int, lanes: AnyArray, starts: AnyArray) -> None:
    """Point the lanes at chunks ``job`` to ``job + 15``; what is past the last chunk repeats it."""
    stride, offset, per_item, first = shape[1], shape[2], shape[3], shape[5]
    last = shape[0] * per_item - 1
    for t in range(LANES):
        own = min(job + t, last)
        item, chunk = own // per_item, own % per_item
        lanes[640 + t] = _U(first + chunk)
        starts[t] = item * stride + offset + chunk * CHUNK_WORDS
        for j in range(8):
            lanes[16 * j + t] = key[j]


@jit
def hash_chunks(
    key: AnyArray, flags: int, words: AnyArray, shape: AnyArray, out: AnyArray, lanes: AnyArray, starts: AnyArray
) -> None:
    """Chaining values of equal chunks, sixteen at a time.

    Args:
        key: uint32 [8].
        flags: KEYED_HASH or the like, and ROOT where the chunk is all of its item.
        words: uint32, the message, zero beyond its end.
        shape: int64 [6]: items; words from one item to the next; first word within an item; chunks per item; bytes of
            each chunk, 0 to 1,024; index of the first of these chunks within its item.
        out: uint32 [items, first + chunks or more, 8], filled from ``first`` on.
        lanes: uint32 [656] scratch: 8 chaining values, 16 state words, 16 message words and a counter for each lane.
        starts: uint64 [16] scratch.
    """
    per_item, length, first = shape[3], shape[4], shape[5]
    blocks = max(1, (length + 63) // 64)
    total = shape[0] * per_item
    message = lanes[384:640]
    for job in range(0, total, LANES):
        _begin_chunks(key, shape, job, lanes, starts)
        for b in range(blocks):
            size = min(64, length - 64 * b)
            count = (size + 3) // 4
            for j in range(count):
                for t in range(LANES):
                    message[16 * j + t] = words[starts[t] + np.uint64(16 * b + j)]
            message[16 * count :] = 0
            kind = flags & ~ROOT
            if b == 0:
                kind |= CHUNK_START
            if b == blocks - 1:
                kind |= CHUNK_END | (flags & ROOT)
            _lane_block(lanes, size, kind)
        for t in range(min(LANES, total - job)):
            item, chunk = (job + t) // per_item, (job + t) % per_item
            for j in range(8):
                out[item, first + chunk, j] = lanes[16 * j + t]


def hash_items(key: AnyArray, flags: int, words: AnyArray, stride: int, length: int, digests: AnyArray) -> AnyArray:
    """Digests of messages of ``length`` bytes each, ``stride`` words apart in ``words``.

    Args:
        key: uint32 [8]: the key of KEYED_HASH and DERIVE_KEY_MATERIAL, else ``IV``.
        flags: 0, KEYED_HASH, DERIVE_KEY_CONTEXT or DERIVE_KEY_MATERIAL.
        words: uint32, contiguous, little-endian; the bytes after ``length`` in an item's last word must be 0.
        digests: uint32 [items, 8], contiguous; filled, and returned.
    """
    items = len(digests)
    whole, rest = divmod(length, 4 * CHUNK_WORDS)
    count = max(1, whole + (rest > 0))
    chunks = digests.reshape(items, 1, 8) if count == 1 else np.empty((items, count, 8), dtype=np.uint32)
    root = ROOT if count == 1 else 0
    lanes, starts = np.empty(656, dtype=np.uint32), np.empty(LANES, dtype=np.uint64)
    if whole:
        shape = np.array([items, stride, 0, whole, 4 * CHUNK_WORDS, 0])
        hash_chunks(key, flags | root, words, shape, chunks, lanes, starts)
    if rest or not whole:
        shape = np.array([items, stride, whole * CHUNK_WORDS, 1, rest, whole])
        hash_chunks(key, flags | root, words, shape, chunks, lanes, starts)
    if count > 1:
        merge_chunks(key, flags, chunks, digests, lanes[:16])
    return digests
