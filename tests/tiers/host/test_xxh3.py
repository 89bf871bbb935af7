"""The compiled checksum is the library's, to the bit, and copies what it says."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.tiers.hashing.xxh3 import SECRET, scratch
from kvloom.tiers.host import HostStore
from kvloom.tiers.host.arrays import RUN
from kvloom.tiers.host.checked import BAD, GOOD, check_many

STORE = HostStore(16 << 20)
STORE._books.memory[: 8 << 20] = np.random.Generator(np.random.PCG64(1)).integers(0, 256, 8 << 20, np.uint8)
STORE._books.memory[9 << 20 : 10 << 20] = 0


def run(sizes: list[int], size: int, seed: int, off: int, damage: int = -1) -> None:
    """Lay an object over runs of so many pages, and read it to an address ``off`` bytes behind a multiple of 64."""
    a, page, parts, left = STORE._books.a, 0, [], -(-size // 4096)
    a.obj[0, RUN] = 0
    for pages in [*sizes, left]:
        pages = min(pages, left)
        if not pages:
            break
        parts.append(STORE._books.memory[page * 4096 : (page + pages) * 4096])
        left -= pages
        a.run[page] = pages, page + pages + 3 if left else -1
        page += pages + 3
    data = np.concatenate(parts)[:size]
    out = np.full(size + 192, 0xA5, np.uint8)
    begin = -out.ctypes.data % 64 + off
    right = data if damage < 0 else changed(data, damage)
    check = np.frombuffer(bytearray(xxhash.xxh3_128_digest(right.data, seed)), np.int64).reshape(1, 2)
    good = np.zeros(1, np.uint8)
    one = [np.array([n]) for n in (0, size, out.ctypes.data + begin)]
    check_many(a, *one, np.array([seed], np.uint64), check, SECRET, *scratch(), good)
    part = out[begin : begin + size]
    if damage >= 0:
        assert good[0] == BAD
        assert not part.any()
    else:
        assert good[0] == GOOD
        assert (part == data).all()
    assert (out[:begin] == 0xA5).all()
    assert (out[begin + size :] == 0xA5).all()


def changed(data: np.ndarray, at: int) -> np.ndarray:
    made = data.copy()
    made[at] ^= 16
    return made


@pytest.mark.parametrize("size", [241, 255, 256, 257, 1023, 1024, 1025, 1088, 2048, 4095, 4096, 4097, 4159, 65_536])
@pytest.mark.parametrize("off", [0, 8, 3])
def test_sizes_at_which_something_changes(size: int, off: int) -> None:
    for seed in (0, 5, 2**64 - 3):
        run([], size, seed, off)
        run([1, 1], size, seed, off)
    for damage in (0, size // 2, size - 1):
        run([1], size, 9, off, damage)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), max_size=6),
    size=st.integers(241, 60_000),
    seed=st.integers(0, 2**64 - 1),
    off=st.integers(0, 63),
)
def test_any_runs_sizes_and_addresses(sizes: list[int], size: int, seed: int, off: int) -> None:
    run(sizes, size, seed, off)
