"""Publish, look up, read, restart."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.disk.world import FULL, LAYOUT, MIB, SNAPSHOT, World, hit, payload, read_all, tokens_of

from kvloom.errors import InputError, StoreError
from kvloom.tiers.disk import DiskStore, Fill, Need, NewObject, Outcome, Unit
from kvloom.tiers.disk.directory import why_unusable
from kvloom.tiers.disk.files import HUGE, FileOps, aligned
from kvloom.tiers.disk.format import PAGE
from kvloom.types import Grade

WORLD = World()


@pytest.fixture
def store(tmp_path: Path):
    with DiskStore.open(tmp_path / "store", 64 * MIB) as opened:
        yield opened


def test_a_unit_is_found_and_read(store: DiskStore) -> None:
    unit = WORLD.unit(tokens_of(1, 5, ragged=3))
    done = store.publish(unit)
    assert done.outcome is Outcome.PUBLISHED
    assert done.objects == len(unit.objects)
    found = store.lookup(LAYOUT, unit.digests)
    assert found.known.all()
    assert found.boundary.tolist() == [False] * 5 + [True]
    into = np.zeros(found.places.nbytes, np.uint8)
    lengths = found.places.entries["length"].astype(np.int64)
    offsets = np.cumsum(lengths) - lengths
    result = store.read(found.places, into, offsets)
    assert result.ok
    for i, entry in enumerate(found.places.entries):
        right = payload(found.places.digests[i].tobytes(), int(entry["group"]), int(entry["column"]), int(lengths[i]))
        assert (into[offsets[i] : offsets[i] + lengths[i]] == right).all()


def test_d11_everything_is_there_after_a_restart_and_nothing_is_written_twice(tmp_path: Path) -> None:
    units = [WORLD.unit(tokens_of(i, 4)) for i in range(5)]
    with DiskStore.open(tmp_path / "store", 64 * MIB) as store:
        assert all(store.publish(unit).outcome is Outcome.PUBLISHED for unit in units)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "store" / "extents").iterdir()}
    with DiskStore.open(tmp_path / "store") as store:
        assert all(hit(store, WORLD, unit) for unit in units)
        assert all(store.publish(unit).outcome is Outcome.KNOWN for unit in units)
    assert sizes == {path.name: path.stat().st_size for path in (tmp_path / "store" / "extents").iterdir()}


def test_a_longer_unit_brings_only_what_is_new(store: DiskStore) -> None:
    tokens = tokens_of(1, 8)
    store.publish(WORLD.unit(tokens[:32]))
    longer = WORLD.unit(tokens, have=4)
    assert store.publish(longer).outcome is Outcome.PUBLISHED
    assert hit(store, WORLD, longer)
    assert hit(store, WORLD, WORLD.unit(tokens[:32]))


def test_a_unit_that_lacks_objects_stays_absent(store: DiskStore) -> None:
    tokens = tokens_of(1, 8)
    assert store.publish(WORLD.unit(tokens, have=4)).outcome is Outcome.INCOMPLETE
    assert not store.lookup(LAYOUT, WORLD.unit(tokens).digests).known.any()


def test_a_better_grade_replaces_and_a_worse_one_does_not(store: DiskStore) -> None:
    tokens = tokens_of(1, 2)
    faithful, canonical = (WORLD.unit(tokens, grade=grade) for grade in (Grade.FAITHFUL, Grade.CANONICAL))
    assert store.publish(faithful).objects == 7
    assert store.publish(canonical).objects == 7
    assert set(store.lookup(LAYOUT, canonical.digests).places.entries["grade"].tolist()) == {int(Grade.CANONICAL)}
    assert store.publish(faithful).outcome is Outcome.KNOWN
    assert hit(store, WORLD, canonical)


def test_a_payload_may_write_itself(store: DiskStore) -> None:
    unit = WORLD.unit(tokens_of(1, 1))
    seen = []

    def write(room: memoryview) -> None:
        seen.append(np.frombuffer(room, np.uint8).ctypes.data % 256)
        room[:] = payload(unit.digests[0].tobytes(), FULL, 0, 5 * MIB).tobytes()

    item = NewObject(0, FULL, 0, Grade.CANONICAL, Fill(5 * MIB, write))
    one = Unit(LAYOUT, unit.root, unit.digests, unit.tokens, unit.segment, [item], [Need(FULL, 0, 1)])
    assert store.publish(one).stored
    assert seen == [0]
    data, results = read_all(store, store.lookup(LAYOUT, unit.digests).places)
    assert not results.any()
    assert data == [payload(unit.digests[0].tobytes(), FULL, 0, 5 * MIB).tobytes()]


@pytest.mark.parametrize("size", [1, 255, 256, 257, 4096, 65_536, 4 * MIB - 256, 4 * MIB, 4 * MIB + 1, 9 * MIB])
def test_objects_of_any_size(store: DiskStore, size: int) -> None:
    world = World((size, 700, 1), columns=3)
    unit = world.unit(tokens_of(2, 1))
    assert store.publish(unit).stored
    assert hit(store, world, unit)


def test_d9_another_layout_is_not_found(store: DiskStore) -> None:
    unit = WORLD.unit(tokens_of(1, 3))
    store.publish(unit)
    assert not store.lookup(b"x" * 32, unit.digests).known.any()
    other = World(layout=b"x" * 32).unit(tokens_of(1, 3))
    assert store.publish(other).stored
    assert store.lookup(b"x" * 32, unit.digests).known.all()
    assert hit(store, WORLD, unit)


def test_the_catalogue_has_every_node_with_its_tokens(store: DiskStore) -> None:
    tokens = tokens_of(1, 6, ragged=5)
    unit = WORLD.unit(tokens)
    store.publish(unit)
    store.publish(World(layout=b"x" * 32).unit(tokens_of(2, 2)))
    batch = next(batch for batch in store.catalogue() if batch.layout == LAYOUT)
    assert sorted(row.tobytes() for row in batch.digests) == sorted(row.tobytes() for row in unit.digests)
    parent = dict(zip((d.tobytes() for d in batch.digests), (p.tobytes() for p in batch.parents), strict=True))
    assert parent[unit.digests[0].tobytes()] == unit.root
    for i in range(1, 7):
        assert parent[unit.digests[i].tobytes()] == unit.digests[i - 1].tobytes()
    for i, depth in enumerate(batch.depth.tolist()):
        part = batch.tokens[batch.starts[i] : batch.starts[i + 1]]
        assert part.tolist() == tokens[depth * 8 : depth * 8 + 8].tolist()
    assert len(batch.places) == len(unit.objects)
    assert batch.boundary.sum() == 1


def test_the_directory_is_private(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path / "store", 64 * MIB) as store:
        store.publish(WORLD.unit(tokens_of(1, 1)))
        assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
        for path in (tmp_path / "store").rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_directories_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").touch()
    with pytest.raises(StoreError, match=r"not a kvloom store, it holds 'thesis.tex'"):
        DiskStore.open(tmp_path / "theirs", 64 * MIB)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(StoreError, match="symbolic link"):
        DiskStore.open(tmp_path / "link", 64 * MIB)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="not a directory"):
        DiskStore.open(tmp_path / "file", 64 * MIB)
    with pytest.raises(StoreError, match="no such directory"):
        DiskStore.open(tmp_path / "nothing", create=False)
    with pytest.raises(InputError, match="too few; use at least 8MiB"):
        DiskStore.open(tmp_path / "new", 1000)
    for cap in ("1GiB", 1e9, True):
        with pytest.raises(InputError, match=r"store .*new: .* is not a number of bytes"):
            DiskStore.open(tmp_path / "new", cap)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="by the path of its directory, not by NoneType"):
        DiskStore.open(None, 64 * MIB)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()
    with pytest.raises(InputError, match="no cap"):
        DiskStore.open(tmp_path / "new")
    DiskStore.open(tmp_path / "open", 64 * MIB).close()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(StoreError, match="chmod 700"):
        DiskStore.open(tmp_path / "open")
    (tmp_path / "open").chmod(0o700)
    (tmp_path / "open" / "KVLOOM").rename(tmp_path / "elsewhere")
    (tmp_path / "open" / "KVLOOM").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="link or special file"):
        DiskStore.open(tmp_path / "open")


def test_a_full_disk_is_called_so() -> None:
    """There is never any room in ``/proc``."""
    full, denied = (OSError(number, "no") for number in (errno.ENOSPC, errno.EACCES))
    assert why_unusable(Path("/proc/no/store"), full).startswith("its disk is full; free some room there")
    assert why_unusable(Path("/proc/no/store"), denied) == "no; name a directory on a disk that you may write to"


def test_units_are_checked_where_they_are_made() -> None:
    good = WORLD.unit(tokens_of(1, 2))
    parts = (good.layout, good.root, good.digests, good.tokens, good.segment)
    with pytest.raises(InputError, match="layout digest"):
        Unit(b"short", *parts[1:], good.objects, good.needs)
    with pytest.raises(InputError, match="not a chain of 2 nodes"):
        Unit(*parts[:3], good.tokens[:5], 8, good.objects, good.needs)
    with pytest.raises(InputError, match="twice"):
        Unit(*parts, [good.objects[0], good.objects[0]], good.needs)
    with pytest.raises(InputError, match="does not fit"):
        Unit(*parts, [NewObject(2, 0, 0, Grade.CANONICAL, b"x")], good.needs)
    with pytest.raises(InputError, match="0 bytes"):
        Unit(*parts, [NewObject(0, SNAPSHOT, 0, Grade.CANONICAL, b"")], good.needs)


def test_a_store_of_an_earlier_version_is_given_the_key_of_parents(tmp_path: Path) -> None:
    tokens = tokens_of(1, 2, ragged=3)
    with DiskStore.open(tmp_path / "store", 64 * MIB) as store:
        store.publish(WORLD.unit(tokens))
    (path,) = (tmp_path / "store").glob("index-*.sqlite")

    def without() -> None:
        db = sqlite3.connect(path, isolation_level=None)
        db.execute("DROP INDEX nodes_parent")
        db.close()

    without()
    digests = WORLD.unit(np.concatenate([tokens[:16], tokens_of(2, 1)])).digests
    with DiskStore.open(tmp_path / "store") as store:
        assert store.lookup(LAYOUT, digests).tails.tolist() == [[1, 3]]
        without()
        assert len(store.lookup(LAYOUT, digests).tails) == 0
        assert store.publish(WORLD.unit(tokens_of(3, 2))).stored
        assert hit(store, WORLD, WORLD.unit(tokens))
    with DiskStore.open(tmp_path / "store") as store:
        assert store.lookup(LAYOUT, digests).tails.tolist() == [[1, 3]]
        assert store.verify().ok


def test_usage_follows_what_others_do(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path / "store", 64 * MIB) as one, DiskStore.open(tmp_path / "store") as two:
        before = two.usage()
        unit = WORLD.unit(tokens_of(1, 3))
        one.publish(unit)
        for store in (one, two):
            usage = store.usage()
            assert (usage.units, usage.objects, usage.capacity) == (1, len(unit.objects), 64 * MIB)
            assert before.bytes < usage.bytes <= usage.capacity
            assert usage.bytes == store.contents().in_use
    assert two.usage().units == 1


def test_buffers_for_direct_transfers_are_aligned_and_zero() -> None:
    for size in (1, PAGE, HUGE - 1, HUGE, HUGE + PAGE, 5 * HUGE + 1):
        buffer = aligned(size)
        assert len(buffer) == size
        assert buffer.ctypes.data % (PAGE if size < HUGE else HUGE) == 0
        assert not buffer.any()
        buffer[-1] = 1


def test_a_part_of_a_file_is_allocated_where_the_file_system_can(tmp_path: Path) -> None:
    ops = FileOps()
    fd = ops.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    ops.allocate(fd, 2 * PAGE, MIB)
    status = os.fstat(fd)
    assert status.st_size in {0, 2 * PAGE + MIB}
    assert status.st_size == 0 or status.st_blocks * 512 >= MIB
    ops.close(fd)
    with pytest.raises(OSError, match="descriptor"):
        ops.allocate(fd, 0, PAGE)
