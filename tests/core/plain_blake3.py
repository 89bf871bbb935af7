"""BLAKE3 as its paper describes it, in plain Python: what the compiled one is compared with."""

from __future__ import annotations

import struct

IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
CORNERS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
DIAGONALS = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))
CHUNK_START, CHUNK_END, PARENT, ROOT, KEYED, CONTEXT, MATERIAL = 1, 2, 4, 8, 16, 32, 64


def _turn(x: int, n: int) -> int:
    return (x >> n | x << (32 - n)) & 0xFFFFFFFF


def compress(cv: tuple[int, ...], block: bytes, counter: int, flags: int) -> tuple[int, ...]:
    m = struct.unpack("<16I", block.ljust(64, b"\0"))
    v = [*cv, *IV[:4], counter & 0xFFFFFFFF, counter >> 32, len(block), flags]
    for _ in range(7):
        for i, (a, b, c, d) in enumerate(CORNERS + DIAGONALS):
            for word, turns in ((m[2 * i], (16, 12)), (m[2 * i + 1], (8, 7))):
                v[a] = (v[a] + v[b] + word) & 0xFFFFFFFF
                v[d] = _turn(v[d] ^ v[a], turns[0])
                v[c] = (v[c] + v[d]) & 0xFFFFFFFF
                v[b] = _turn(v[b] ^ v[c], turns[1])
        m = tuple(m[p] for p in PERMUTATION)
    return tuple(v[i] ^ v[i + 8] for i in range(8))


def _tree(key: tuple[int, ...], data: bytes, first_chunk: int, flags: int, root: int) -> tuple[int, ...]:
    if len(data) <= 1024:
        cv, blocks = key, [data[i : i + 64] for i in range(0, len(data), 64)] or [b""]
        for i, block in enumerate(blocks):
            last = CHUNK_END | root if i == len(blocks) - 1 else 0
            cv = compress(cv, block, first_chunk, flags | (CHUNK_START if i == 0 else 0) | last)
        return cv
    left = 1024
    while 2 * left < len(data):
        left *= 2
    halves = (
        _tree(key, data[:left], first_chunk, flags, 0),
        _tree(key, data[left:], first_chunk + left // 1024, flags, 0),
    )
    return compress(key, b"".join(struct.pack("<8I", *h) for h in halves), 0, flags | PARENT | root)


def _words(data: bytes) -> tuple[int, ...]:
    return struct.unpack("<8I", data)


def blake3(data: bytes) -> bytes:
    return struct.pack("<8I", *_tree(IV, data, 0, 0, ROOT))


def keyed_hash(key: bytes, data: bytes) -> bytes:
    return struct.pack("<8I", *_tree(_words(key), data, 0, KEYED, ROOT))


def derive_key(context: str, material: bytes) -> bytes:
    context_key = _tree(IV, context.encode(), 0, CONTEXT, ROOT)
    return struct.pack("<8I", *_tree(context_key, material, 0, MATERIAL, ROOT))
