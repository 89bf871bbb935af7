"""Bytes that are not what they were: every kind of byte of extents, index and marker (D2, D5), and newer formats."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.disk.scenarios import SMALL, units
from tests.tiers.disk.world import FULL, LAYOUT, MIB, World, hit, read_all, tokens_of, wrong_bytes

from kvloom.errors import FormatError
from kvloom.tiers.disk import DiskStore, Result
from kvloom.tiers.disk.format import (
    FORMAT,
    HEADER,
    PAGE,
    RECORD,
    TYPE_EXTENT,
    TYPE_OBJECT,
    TYPE_RUN,
    checksum,
    first_page,
    seal,
)
from kvloom.tiers.disk.sinks import Handing


def flip(path: Path, at: int, bits: int = 0x10) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bits]))


def only_extent(directory: Path) -> Path:
    (path,) = (directory / "extents").iterdir()
    return path


def records(path: Path) -> list[tuple[int, int, int]]:
    """(type, offset, payload bytes) of every record, by looking for headers."""
    data = path.read_bytes()
    found = []
    for at in range(0, len(data) - HEADER + 1, 256):
        row = np.frombuffer(data, RECORD, count=1, offset=at)[0]
        if bytes(row["magic"]) == b"KVLMREC1":
            found.append((int(row["type"]), at, int(row["length"])))
    return found


@pytest.fixture
def made(fast_path: Path) -> Path:
    with DiskStore.open(fast_path / "made", 64 * MIB) as store:
        for unit in units(SMALL, 2):
            assert store.publish(unit).stored
    return fast_path / "made"


# The checksum of a header itself is only asked for where there is no index.
FIELDS = [(name, int(RECORD.fields[name][1])) for name in RECORD.names if name != "check"]  # type: ignore[index,union-attr]


@pytest.mark.parametrize(("name", "at"), FIELDS)
def test_d5_every_field_of_an_object_header(made: Path, name: str, at: int) -> None:
    path = only_extent(made)
    where = next(offset for kind, offset, _ in records(path) if kind == TYPE_OBJECT)
    flip(path, where + at)
    with DiskStore.open(made) as store:
        there = [hit(store, SMALL, unit) for unit in units(SMALL, 2)]
        assert sorted(there) == [False, True]
        assert store.activity().integrity == 1
        assert store.activity().quarantined == 1
        assert store.contents().quarantined == 1
        again = units(SMALL, 2)[there.index(False)]
        assert store.publish(again).objects == 1
        assert hit(store, SMALL, again)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.999])
def test_d5_payloads(made: Path, part: float) -> None:
    path = only_extent(made)
    _, where, length = [record for record in records(path) if record[0] == TYPE_OBJECT][3]
    flip(path, where + HEADER + int(part * length), 1)
    with DiskStore.open(made) as store:
        assert sorted(hit(store, SMALL, unit) for unit in units(SMALL, 2)) == [False, True]
        assert store.activity().integrity == 1


def test_d5_what_no_reader_needs_does_no_harm(made: Path) -> None:
    """Page of the extent, manifests, padding: only a new index is made from them."""
    path = only_extent(made)
    for kind, where, _ in records(path):
        if kind in {TYPE_EXTENT, TYPE_RUN}:
            flip(path, where + 60)
    _, where, length = next(record for record in records(path) if record[0] == TYPE_OBJECT)
    flip(path, where + HEADER + length)
    flip(path, where + HEADER - 1)
    with DiskStore.open(made) as store:
        assert all(hit(store, SMALL, unit) for unit in units(SMALL, 2))
        assert store.verify().ok


def test_d5_every_page_of_the_index(made: Path, fast_path: Path) -> None:
    """Flipped bits all over it: a miss or a hit, never anything wrong, and the store works afterwards."""
    (index,) = made.glob("index-*.sqlite")
    rng, healed = random.Random(0), 0
    data = index.read_bytes()
    in_use = [at for at in range(len(data)) if data[at]]
    offsets = [*range(0, 100, 3), *rng.sample(in_use, 200)]
    for at in offsets:
        place = fast_path / "copy"
        shutil.copytree(made, place)
        flip(next(place.glob("index-*.sqlite")), at, 1 << rng.randrange(8))
        with DiskStore.open(place, 64 * MIB) as store:
            for unit in units(SMALL, 2):
                hit(store, SMALL, unit)
            store.verify()
            healed += store.activity().rebuilds
            for unit in units(SMALL, 2):
                assert store.publish(unit).stored
                assert hit(store, SMALL, unit)
            store.gc()
            assert store.verify().ok
        shutil.rmtree(place)
    assert healed > 100


@pytest.mark.parametrize("table", ["nodes", "extents", "boundaries", "layouts"])
def test_d5_rows_that_are_well_formed_and_wrong(made: Path, table: str) -> None:
    (index,) = made.glob("index-*.sqlite")
    changes = {
        "nodes": "objects = (SELECT objects FROM nodes ORDER BY id DESC LIMIT 1)",
        "extents": "reserved = reserved / 2",
        "boundaries": "needs = x''",
        "layouts": "digest = zeroblob(32)",
    }
    with sqlite3.connect(index) as db:
        db.execute(f"UPDATE {table} SET {changes[table]}")
    db.close()
    with DiskStore.open(made) as store:
        assert (
            store.verify().problems == ["the index was damaged; a new one was made from the extents"] or store.rebuilt
        )
        assert store.rebuilt is not None
        assert store.rebuilt.units == 2
        assert all(hit(store, SMALL, unit) for unit in units(SMALL, 2))


@pytest.mark.parametrize("what", ["index", "marker", "both", "empty index", "cut index"])
def test_an_index_that_is_gone_is_made_anew_from_the_extents(made: Path, what: str) -> None:
    (index,) = made.glob("index-*.sqlite")
    if what in {"index", "both"}:
        index.unlink()
    if what in {"marker", "both"}:
        (made / "KVLOOM").write_bytes(b"nonsense")
    if what == "empty index":
        index.write_bytes(b"")
    if what == "cut index":
        os.truncate(index, 20_000)
    with DiskStore.open(made, 64 * MIB) as store:
        assert all(hit(store, SMALL, unit) for unit in units(SMALL, 2))
        assert store.rebuilt is not None
        assert (store.rebuilt.units, store.rebuilt.lost) == (2, 0)
        assert store.activity().rebuilds == 1
        assert store.verify().ok


def test_the_cap_survives_the_index(made: Path) -> None:
    next(made.glob("index-*.sqlite")).unlink()
    with DiskStore.open(made) as store:
        assert store.contents().capacity == 64 * MIB


def test_a_damaged_run_is_passed_over_when_an_index_is_made(made: Path) -> None:
    path = only_extent(made)
    runs = [record for record in records(path) if record[0] == TYPE_RUN]
    flip(path, runs[0][1] + HEADER + 5)
    next(made.glob("index-*.sqlite")).unlink()
    with DiskStore.open(made) as store:
        assert [hit(store, SMALL, unit) for unit in units(SMALL, 2)] == [False, True]
        assert store.verify().ok


def test_d2_records_in_each_others_place(made: Path) -> None:
    """Right length and right checksums, but another object's."""
    path = only_extent(made)
    objects = [r for r in records(path) if r[0] == TYPE_OBJECT and r[2] == SMALL.sizes[FULL]]
    (_, a, size), (_, b, _) = objects[:2]
    data = bytearray(path.read_bytes())
    data[a : a + HEADER + size], data[b : b + HEADER + size] = data[b : b + HEADER + size], data[a : a + HEADER + size]
    path.write_bytes(data)
    with DiskStore.open(made) as store:
        for unit in units(SMALL, 2):
            assert wrong_bytes(store, store.lookup(LAYOUT, unit.digests).places) == 0
        assert store.activity().integrity == 2


def test_d2_another_extent_under_this_name(made: Path, fast_path: Path) -> None:
    with DiskStore.open(fast_path / "other", 64 * MIB) as store:
        for unit in units(SMALL, 2):
            store.publish(unit)
    shutil.copyfile(only_extent(fast_path / "other"), only_extent(made))
    with DiskStore.open(made) as store:
        assert not any(hit(store, SMALL, unit) for unit in units(SMALL, 2))
        assert store.activity().integrity == 14


@pytest.mark.parametrize("left", [0, PAGE, PAGE + 300, 20_000])
def test_a_cut_extent_is_a_miss(made: Path, left: int) -> None:
    os.truncate(only_extent(made), left)
    with DiskStore.open(made) as store:
        assert not hit(store, SMALL, units(SMALL, 2)[1])
        assert store.publish(units(SMALL, 2)[1]).stored
        assert hit(store, SMALL, units(SMALL, 2)[1])


def test_a_removed_extent_is_a_miss(made: Path) -> None:
    with DiskStore.open(made) as store:
        places = store.lookup(LAYOUT, units(SMALL, 2)[0].digests).places
        only_extent(made).unlink()
        assert set(read_all(store, places)[1].tolist()) == {Result.MISSING}
        assert len(store.lookup(LAYOUT, units(SMALL, 2)[0].digests).places) == 0
        assert not hit(store, SMALL, units(SMALL, 2)[1])
        assert all(store.publish(unit).stored and hit(store, SMALL, unit) for unit in units(SMALL, 2))


def test_a_newer_store_is_refused(made: Path) -> None:
    marker = made / "KVLOOM"
    body = marker.read_bytes().rpartition(b"check ")[0].replace(b"format 1", b"format 2")
    marker.write_bytes(body + b"check " + checksum(body).hex().encode() + b"\n")
    before = sorted(path.name for path in made.rglob("*"))
    with pytest.raises(FormatError, match=r"newer kvloom \(format 2, this one reads 1\); update kvloom"):
        DiskStore.open(made)
    assert sorted(path.name for path in made.rglob("*")) == before


@pytest.mark.parametrize(
    "body",
    [b"", b"kvloom disk store\n", b"kvloom disk store\nformat 1\n", b"\xff\xfe", b"kvloom disk store\nformat x\n",
     b"kvloom disk store\nformat 1\nindex ../../x.sqlite\ncap 0\n",
     b"kvloom disk store\nformat 1\nindex index-0123456789abcdef.sqlite\ncap 0\nmore\n"],
)  # fmt: skip
def test_a_marker_that_says_something_odd(made: Path, body: bytes) -> None:
    """With a right checksum."""
    (made / "KVLOOM").write_bytes(body + b"check " + checksum(body).hex().encode() + b"\n")
    with DiskStore.open(made, 64 * MIB) as store:
        assert all(hit(store, SMALL, unit) for unit in units(SMALL, 2))
        assert store.activity().rebuilds == 1


def test_a_newer_marker_may_look_otherwise(made: Path) -> None:
    body = b"kvloom disk store\nformat 12\nand so on, as nobody knows yet\n"
    (made / "KVLOOM").write_bytes(body + b"check " + checksum(body).hex().encode() + b"\n")
    with pytest.raises(FormatError, match="format 12"):
        DiskStore.open(made)


def test_a_newer_index_or_extent_is_refused(made: Path) -> None:
    page = np.frombuffer(bytearray(first_page(TYPE_EXTENT, extent=1)), RECORD, count=1).copy()
    page["version"] = FORMAT + 1
    (made / "extents" / f"{1:016x}.extent").write_bytes(seal(page).tobytes().ljust(PAGE, b"\0"))
    (index,) = made.glob("index-*.sqlite")
    index.unlink()
    with pytest.raises(FormatError, match="newer kvloom"):
        DiskStore.open(made)


def test_d9_every_part_of_an_identity_is_its_own(fast_path: Path) -> None:
    """Layout, form and grade are in what a header is compared with, so no place can be read as something else."""
    with DiskStore.open(fast_path / "s", 64 * MIB) as store:
        unit = World().unit(tokens_of(1, 2))
        store.publish(unit)
        places = store.lookup(LAYOUT, unit.digests).places
        for name in ("group", "column", "form", "grade"):
            entries = places.entries.copy()
            entries[name] += 1
            assert (
                store._reader.read(type(places)(LAYOUT, places.digests, entries, places.rows), Handing(print)).results
                == 1
            ).all()
        other = type(places)(b"y" * 32, places.digests, places.entries, places.rows)
        assert (store._reader.read(other, Handing(print)).results == Result.INTEGRITY).all()


@pytest.mark.parametrize("size", [1000, 300_000, 5 * MIB, 9 * MIB])
@pytest.mark.parametrize("part", [-200, 0, 0.6, 0.99])
def test_what_was_not_verified_is_never_left_in_memory(fast_path: Path, size: int, part: float) -> None:
    """Header, begin, middle and end of objects that are read whole, block by block, and part by part."""
    unit = World((size, 100, 100), columns=3).unit(tokens_of(1, 1))
    with DiskStore.open(fast_path / "s", 256 * MIB) as store:
        assert store.publish(unit).stored
        path = only_extent(fast_path / "s")
        where = [offset for kind, offset, length in records(path) if kind == TYPE_OBJECT and length == size][1]
        flip(path, where + HEADER + (part if part < 0 else int(part * size)))
        places = store.lookup(LAYOUT, unit.digests).places
        places = places.take(places.entries["group"] == FULL)
        into = np.full(3 * size, 7, np.uint8)
        result = store.read(places, into, np.arange(3) * size)
        assert result.results.tolist() == [Result.OK, Result.INTEGRITY, Result.OK]
        left = into[size : 2 * size]
        assert (left == 7).all() or not left.any()
        for i in (0, 2):
            assert into[i * size : (i + 1) * size].tobytes() == unit.objects[i].payload.tobytes()
