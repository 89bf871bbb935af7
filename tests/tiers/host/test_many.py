"""Digests of many objects, or of one that comes in parts, are the library's, and the copies are right."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.tiers.hashing.many import Parts, digests

DATA = np.random.Generator(np.random.PCG64(1)).integers(0, 256, 1 << 20, np.uint8)
EDGES = (0, 1, 16, 240, 241, 256, 1023, 1024, 1025, 1088, 2048, 4096, 4097, 70_001)


@settings(max_examples=150, deadline=None)
@given(
    objects=st.lists(
        st.tuples(st.sampled_from(EDGES) | st.integers(0, 9000), st.integers(0, 300), st.booleans()),
        min_size=1,
        max_size=9,
    ),
    off=st.integers(0, 63),
)
def test_many(objects: list[tuple[int, int, bool]], off: int) -> None:
    out, to, at = np.full(1 << 20, 0xA5, np.uint8), [], off
    for size, skip, copied in objects:
        at += skip
        to.append(at if copied else None)
        at += size
    starts, lengths = np.array([o[1] * 7 for o in objects]), np.array([o[0] for o in objects])
    made = digests(DATA, starts, lengths, np.array([0 if t is None else out.ctypes.data + t for t in to]))
    for (size, skip, _), place, digest in zip(objects, to, made, strict=True):
        data = DATA[skip * 7 : skip * 7 + size]
        assert digest.tobytes() == xxhash.xxh3_128_digest(data.data)
        if place is not None:
            assert (out[place : place + size] == data).all()
            out[place : place + size] = 0xA5
    assert (out == 0xA5).all(), "something beside the objects was written"


@pytest.mark.parametrize("off", [0, 5])
@pytest.mark.parametrize("last", [241, 256, 1024, 1025, 4096, 5000])
def test_parts(last: int, off: int) -> None:
    sizes = [4096, 1024, 8192, last]
    out = np.full(30_000, 0xA5, np.uint8)
    begin = -out.ctypes.data % 64 + off
    parts, at = Parts(sum(sizes), out.ctypes.data + begin), 0
    for size in sizes:
        assert parts.digest() == b""
        parts.add(DATA[at : at + size])
        at += size
    assert parts.digest() == xxhash.xxh3_128_digest(DATA[:at].data)
    assert (out[begin : begin + at] == DATA[:at]).all()
    assert (out[:begin] == 0xA5).all()
    assert (out[begin + at :] == 0xA5).all()
