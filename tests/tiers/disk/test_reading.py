"""Reads in pieces: what is read together, objects that come in parts in any order, and reads that are broken off."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.tiers.disk import DiskStore, FileOps, Result
from kvloom.tiers.disk import reading as reading_module
from kvloom.tiers.disk.format import HEADER, PAGE, PLACE, padded
from kvloom.tiers.disk.pieces import BUFFER, CHUNK, GAP, pieces
from kvloom.tiers.values import Need, NewObject, Places, Unit
from kvloom.types import AnyArray, Grade

LAYOUT, ROOT = b"l" * 32, b"r" * 32
KIB, MIB = 1 << 10, 1 << 20
LARGE = (CHUNK + 70_000, 5 * MIB + 1234, 2 * CHUNK, 2 * CHUNK + 100, 3 * CHUNK + PAGE)
SIZES = (700, *LARGE, 64 * KIB, CHUNK, 1)


def payloads(sizes: tuple[int, ...] = SIZES) -> list[bytes]:
    rng = np.random.Generator(np.random.PCG64(3))
    return [rng.integers(0, 256, size, np.uint8).tobytes() for size in sizes]


def stored(directory: Path, ops: FileOps | None = None, threads: int = 4, sizes: tuple[int, ...] = SIZES) -> DiskStore:
    store = DiskStore.open(directory, 512 * MIB, ops=ops, threads=threads)
    objects = [NewObject(0, 0, i, Grade.CANONICAL, data) for i, data in enumerate(payloads(sizes))]
    digests = np.full((1, 32), 9, np.uint8)
    unit = Unit(LAYOUT, ROOT, digests, np.arange(4, dtype=np.int32), 4, objects, [Need(0, 0, len(objects))])
    assert store.publish(unit).stored
    return store


def found(store: DiskStore) -> Places:
    places = store.lookup(LAYOUT, np.full((1, 32), 9, np.uint8)).places
    order = np.argsort(places.entries["column"])
    return places.take(order)


def read_into(store: DiskStore, places: Places, stop=lambda: False, gap: int = 3) -> tuple[AnyArray, list[AnyArray]]:
    """Results, and the region of each object; nothing beside the regions is touched."""
    lengths = places.entries["length"].astype(np.int64)
    offsets = np.cumsum(lengths + gap) - lengths
    into = np.full(int((lengths + gap).sum()) + gap, 0xA5, np.uint8)
    results = store.read(places, into, offsets, stop).results
    regions = [into[a : a + n].copy() for a, n in zip(offsets.tolist(), lengths.tolist(), strict=True)]
    for at, n in zip(offsets.tolist(), lengths.tolist(), strict=True):
        into[at : at + n] = 0xA5
    assert (into == 0xA5).all()
    return results, regions


def untouched(region: AnyArray) -> bool:
    return bool((region == 0xA5).all() or not region.any())


class Turned(FileOps):
    """The first reads end last, so that parts of an object arrive in another order than they are read in."""

    def __init__(self) -> None:
        self.number, self.order = 0, []

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        self.number += 1
        time.sleep(0.03 if self.number % 2 else 0)
        count = super().read(fd, into, offset)
        self.order.append(offset)
        return count


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_parts_in_any_order(tmp_path: Path, threads: int) -> None:
    ops = Turned()
    with stored(tmp_path / "s", ops, threads) as store:
        places = found(store)
        for gap in (3, 64, 256):
            ops.order.clear()
            results, regions = read_into(store, places, gap=gap)
            assert (results == Result.OK).all()
            assert [region.tobytes() for region in regions] == payloads()
            assert (ops.order != sorted(ops.order)) == (threads > 1)


@pytest.mark.parametrize("helpers", [0, 1])
def test_with_and_without_a_thread_that_helps(tmp_path: Path, helpers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_module, "HELPERS", helpers)
    with stored(tmp_path / "s", Turned()) as store:
        results, regions = read_into(store, found(store))
        assert (results == Result.OK).all()
        assert [region.tobytes() for region in regions] == payloads()


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.999999])
@pytest.mark.parametrize("which", [2, 3, 5])
def test_a_damaged_part_leaves_nothing(tmp_path: Path, which: int, part: float) -> None:
    with stored(tmp_path / "s") as store:
        places = found(store)
        entry = places.entries[which]
        at = int(entry["offset"]) + HEADER + int(int(entry["length"]) * part)
        flip(next((tmp_path / "s" / "extents").iterdir()), at)
        results, regions = read_into(store, places)
        assert results.tolist() == [Result.INTEGRITY if i == which else Result.OK for i in range(len(SIZES))]
        assert untouched(regions[which])
        assert all(regions[i].tobytes() == data for i, data in enumerate(payloads()) if i != which)


def test_a_damaged_header_of_a_large_object(tmp_path: Path) -> None:
    with stored(tmp_path / "s") as store:
        places = found(store)
        flip(next((tmp_path / "s" / "extents").iterdir()), int(places.entries[2]["offset"]) + 60)
        results, regions = read_into(store, places)
        assert np.flatnonzero(results).tolist() == [2]
        assert results[2] == Result.INTEGRITY
        assert untouched(regions[2])


def test_an_extent_that_ends_within_a_large_object(tmp_path: Path) -> None:
    with stored(tmp_path / "s", sizes=(700, 5 * MIB)) as store:
        places = found(store)
        os.truncate(next((tmp_path / "s" / "extents").iterdir()), int(places.entries[1]["offset"]) + 3 * MIB)
        results, regions = read_into(store, places)
        assert results.tolist() == [Result.OK, Result.INTEGRITY]
        assert untouched(regions[1])


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


class Failing(FileOps):
    """The read with this number fails."""

    def __init__(self, number: int) -> None:
        self.number = number

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        self.number -= 1
        if self.number == -1:
            raise OSError(5, "the device failed")
        return super().read(fd, into, offset)


@pytest.mark.parametrize("number", range(0, 12, 2))
def test_a_part_that_cannot_be_read(tmp_path: Path, number: int) -> None:
    stored(tmp_path / "s").close()
    with DiskStore.open(tmp_path / "s", ops=Failing(number), threads=1) as store:
        results, regions = read_into(store, found(store))
        assert set(results.tolist()) == {Result.OK, Result.IO_ERROR}
        for result, region, data in zip(results.tolist(), regions, payloads(), strict=True):
            assert region.tobytes() == data if result == Result.OK else untouched(region)
        results, regions = read_into(store, found(store))
        assert (results == Result.OK).all()
        assert [region.tobytes() for region in regions] == payloads()


@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_stopped_within_a_large_object(tmp_path: Path, after: int) -> None:
    with stored(tmp_path / "s", threads=1) as store:
        asked = iter(range(1000))
        results, regions = read_into(store, found(store), lambda: next(asked) >= after)
        assert set(results.tolist()) <= {Result.OK, Result.STOPPED}
        assert (results == Result.STOPPED).any()
        for result, region, data in zip(results.tolist(), regions, payloads(), strict=True):
            assert region.tobytes() == data if result == Result.OK else untouched(region)


class BrokenOffError(Exception):
    """What a caller may raise while it is delivered to."""


@pytest.mark.parametrize("helpers", [0, 1])
def test_what_a_caller_raises_ends_the_read_and_nothing_is_lost(
    tmp_path: Path, helpers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More often than there are buffers: each comes back."""
    monkeypatch.setattr(reading_module, "HELPERS", helpers)
    ended = threading.Event()

    def deliver(_number: int, _data: AnyArray) -> None:
        assert not ended.is_set(), "delivered after the call ended"
        raise BrokenOffError

    with stored(tmp_path / "s", sizes=(3 * MIB, 600 * KIB) * 6) as store:
        places = found(store)
        for _ in range(12):
            ended.clear()
            with pytest.raises(BrokenOffError):
                store.read_each(places, deliver)
            ended.set()
        results, regions = read_into(store, places)
        assert (results == Result.OK).all()
        assert [region.tobytes() for region in regions] == payloads((3 * MIB, 600 * KIB) * 6)


def test_an_interrupt_within_a_large_object_leaves_nothing_of_it(tmp_path: Path) -> None:
    sizes = (9 * MIB, 5 * MIB)
    with stored(tmp_path / "s", Interrupting(), sizes=sizes) as store:
        places = found(store)
        into = np.full(14 * MIB, 0xA5, np.uint8)
        with pytest.raises(KeyboardInterrupt):
            store.read(places, into, np.array([0, 9 * MIB]))
        assert untouched(into[: 9 * MIB])
        assert untouched(into[9 * MIB :])
        results, regions = read_into(store, places)
        assert (results == Result.OK).all()
        assert [region.tobytes() for region in regions] == payloads(sizes)


class Interrupting(FileOps):
    """What is no OSError comes out of the third read."""

    def __init__(self) -> None:
        self.number = 0

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        self.number += 1
        if self.number == 3:
            raise KeyboardInterrupt
        return super().read(fd, into, offset)


def test_many_reads_at_once_share_the_buffers(tmp_path: Path) -> None:
    with stored(tmp_path / "s", Turned()) as store:
        places, wrong = found(store), []

        def work() -> None:
            results, regions = read_into(store, places)
            wrong.extend(
                i for i, data in enumerate(payloads()) if results[i] != Result.OK or regions[i].tobytes() != data
            )

        threads = [threading.Thread(target=work, daemon=True) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not wrong


@settings(max_examples=200, deadline=None)
@given(
    objects=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([1, 500, 64 * KIB, MIB, CHUNK, LARGE[0], LARGE[1], 40 * MIB])),
        min_size=1,
        max_size=30,
    ),
    gaps=st.lists(st.sampled_from([0, 1, 256, GAP // 256, GAP // 256 + 17]), min_size=30, max_size=30),
    shuffle=st.randoms(),
)
def test_pieces_cover_everything_once(objects: list[tuple[int, int]], gaps: list[int], shuffle) -> None:
    places, at = np.zeros(len(objects), PLACE), [PAGE] * 3
    for i, (extent, length) in enumerate(objects):
        at[extent] += 256 * gaps[i]
        places[i]["extent"], places[i]["offset"], places[i]["length"] = extent, at[extent], length
        at[extent] += HEADER + padded(length)
    order = list(range(len(objects)))
    shuffle.shuffle(order)
    places = places[order]
    cut = places["length"] > CHUNK + 4 * PAGE
    whole: list[int] = []
    came = {int(i): 0 for i in np.flatnonzero(cut)}
    for piece in pieces(places, cut):
        assert piece.begin % PAGE == piece.end % PAGE == 0
        entries = places[piece.which]
        assert (entries["extent"] == piece.extent).all()
        starts, lengths = entries["offset"].astype(np.int64), entries["length"].astype(np.int64)
        if piece.size is None:
            whole += piece.which.tolist()
            assert piece.end - piece.begin <= (CHUNK if len(entries) > 1 else BUFFER)
            assert (starts >= piece.begin).all()
            assert (starts + HEADER + lengths <= piece.end).all()
        else:
            (number,) = piece.which.tolist()
            assert piece.first == came[number], "parts come in their order"
            came[number] += piece.size
            assert piece.end - piece.begin <= BUFFER
            assert piece.begin <= starts[0] + (HEADER + piece.first if piece.first else 0)
            assert starts[0] + HEADER + came[number] <= piece.end
            assert piece.first % PAGE == 0
            assert piece.size % PAGE == 0 or came[number] == lengths[0]
            assert piece.size > 240
    assert sorted(whole) == np.flatnonzero(~cut).tolist()
    assert all(size == places[i]["length"] for i, size in came.items())
