"""The cap, at every instant; what goes first; compaction; orphans (D8)."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Self

import pytest
from tests.tiers.disk.world import LAYOUT, MIB, SEGMENT, World, hit, tokens_of

from kvloom.tiers.disk import DiskStore, Outcome
from kvloom.tiers.disk.checking import disk_usage
from kvloom.tiers.disk.format import PAGE, TYPE_EXTENT, first_page
from kvloom.tiers.disk.index import Index, set_meta

BIG = World((60_000, 90_000, 3000))


class Watch:
    """Looks at the bytes on disk all the time."""

    def __init__(self, store: DiskStore) -> None:
        self.most, self.looks = 0, 0
        self._store, self._stop = store, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.most = max(self.most, disk_usage(self._store._directory))
            self.looks += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("cap", [8, 16, 40])
@pytest.mark.parametrize("world", [BIG, World((300, 200, 100), columns=6)], ids=["large", "tiny"])
def test_d8_never_above_the_cap(fast_path: Path, cap: int, world: World) -> None:
    rng, kept = random.Random(cap), 0
    with DiskStore.open(fast_path / "s", cap * MIB) as one, DiskStore.open(fast_path / "s") as two, Watch(one) as watch:
        for step in range(250):
            store = rng.choice((one, two))
            unit = world.unit(tokens_of(rng.randrange(40), 12)[: SEGMENT * rng.randint(1, 12)])
            if rng.random() < 0.7:
                assert store.publish(unit).outcome in {Outcome.PUBLISHED, Outcome.KNOWN}
                assert hit(store, world, unit)
            elif hit(store, world, unit):
                kept += 1
                store.touch(unit.layout, unit.digests[-1].tobytes())
            if step % 100 == 99:
                store.gc()
        assert one.verify().ok
        contents = one.contents()
    assert watch.looks > 50
    assert watch.most <= cap * MIB
    assert contents.on_disk <= contents.in_use <= contents.capacity
    if world is BIG:
        assert contents.live > 0.3 * cap * MIB, "the room is used"
    assert kept or cap == 8


def test_d8_long_runs_end_as_they_were(fast_path: Path) -> None:
    """Neither index nor extents grow with time."""
    sizes = []
    with DiskStore.open(fast_path / "s", 12 * MIB) as store:
        for i in range(300):
            assert store.publish(BIG.unit(tokens_of(i, 3))).stored
            if i % 100 == 99:
                sizes.append((store.contents().index, store.contents().in_use))
        activity = store.activity()
        assert activity.units_evicted > 250
        contents = store.contents()
        assert contents.bytes_published == activity.bytes_published
        assert contents.bytes_moved == activity.bytes_moved
        assert contents.payload_published == 300 * sum(item.size for item in BIG.unit(tokens_of(0, 3)).objects)
        assert contents.write_amplification is not None
        assert 1 < contents.write_amplification < 2
    assert max(index for index, _ in sizes) < 3 * MIB
    assert max(used for _, used in sizes) <= 12 * MIB


def test_what_was_used_lately_stays(fast_path: Path) -> None:
    with DiskStore.open(fast_path / "s", 12 * MIB) as store:
        favourite = BIG.unit(tokens_of(1000, 3))
        assert store.publish(favourite).stored
        for i in range(100):
            store.touch(LAYOUT, favourite.digests[-1].tobytes())
            assert store.publish(BIG.unit(tokens_of(i, 3))).stored
        assert hit(store, BIG, favourite)
        assert not hit(store, BIG, BIG.unit(tokens_of(0, 3)))
        assert hit(store, BIG, BIG.unit(tokens_of(99, 3)))


def test_a_prefix_of_what_stays_keeps_its_objects(fast_path: Path) -> None:
    """The shared part of a chain goes with the last boundary that needs it, windows and snapshots of others before."""
    with DiskStore.open(fast_path / "s", 12 * MIB) as store:
        tokens = tokens_of(5, 6)
        assert store.publish(BIG.unit(tokens[: 3 * SEGMENT])).stored
        longer = BIG.unit(tokens, have=3)
        assert store.publish(longer).stored
        for i in range(100):
            store.touch(LAYOUT, longer.digests[-1].tobytes())
            assert store.publish(BIG.unit(tokens_of(100 + i, 3))).stored
        assert hit(store, BIG, longer)
        found = store.lookup(LAYOUT, longer.digests)
        assert found.known.all()
        assert found.boundary.tolist() == [False] * 5 + [True]
        assert len(found.places) == len(BIG.needed(6))


def test_what_a_unit_builds_on_is_not_evicted_for_it(fast_path: Path) -> None:
    with DiskStore.open(fast_path / "s", 8 * MIB) as store:
        tokens = tokens_of(5, 14)
        for n in range(2, 15, 2):
            unit = BIG.unit(tokens[: n * SEGMENT], have=max(0, n - 2))
            assert store.publish(unit).outcome is Outcome.PUBLISHED, n
            assert hit(store, BIG, unit)
            for i in range(4):
                store.publish(BIG.unit(tokens_of(100 * n + i, 3)))
            store.publish(BIG.unit(tokens[: n * SEGMENT]))


def test_what_can_never_fit_evicts_nothing(fast_path: Path) -> None:
    with DiskStore.open(fast_path / "s", 8 * MIB) as store:
        small = BIG.unit(tokens_of(1, 3))
        assert store.publish(small).stored
        huge = World((4 * MIB, 5 * MIB, 10)).unit(tokens_of(2, 2))
        assert store.publish(huge).outcome is Outcome.NO_ROOM
        assert hit(store, BIG, small)
        assert not store.lookup(LAYOUT, huge.digests).known.any()


def test_a_unit_larger_than_an_extent(fast_path: Path) -> None:
    world = World((500_000, 9000, 500))
    with DiskStore.open(fast_path / "s", 16 * MIB) as store:
        for i in range(6):
            unit = world.unit(tokens_of(i, 4))
            assert store.publish(unit).stored
            assert hit(store, world, unit)
        assert store.verify().ok


def test_compaction_keeps_what_is_needed_and_moves_readers_along(fast_path: Path) -> None:
    with DiskStore.open(fast_path / "s", 64 * MIB) as store:
        keep = [BIG.unit(tokens_of(i, 3)) for i in range(0, 12, 4)]
        for i in range(12):
            store.publish(BIG.unit(tokens_of(i, 3), root=b"k" * 32 if i % 4 else b"r" * 32))
        before = store.lookup(LAYOUT, keep[1].digests).places
        assert store.clear(LAYOUT, b"k" * 32) == 9
        store.gc()
        after = store.lookup(LAYOUT, keep[1].digests).places
        assert set(before.entries["extent"].tolist()).isdisjoint(after.entries["extent"].tolist())
        assert store.read_each(before, lambda _i, _data: None).ok, "places from before the move are found again"
        assert all(hit(store, BIG, unit) for unit in keep)
        contents = store.contents()
        assert contents.units == 3
        assert contents.on_disk < 1.3 * contents.live + 1 * MIB
        assert store.contents().bytes_moved == store.activity().bytes_moved > 0
        assert store.verify().ok
    (index,) = (fast_path / "s").glob("index-*.sqlite")
    index.unlink()
    with DiskStore.open(fast_path / "s") as store:
        assert all(hit(store, BIG, unit) for unit in keep), "what was moved is still described where it lies"
        assert store.contents().units == 3
        assert not any(hit(store, BIG, BIG.unit(tokens_of(i, 3), root=b"k" * 32)) for i in (1, 2, 3))


def test_orphans_are_collected(fast_path: Path) -> None:
    directory = fast_path / "s"
    with DiskStore.open(directory, 64 * MIB) as store:
        unit = BIG.unit(tokens_of(1, 3))
        store.publish(unit)
    stray = directory / "extents" / f"{77:016x}.extent"
    stray.write_bytes(first_page(TYPE_EXTENT, extent=77) + bytes(5 * PAGE))
    (extent,) = (p for p in (directory / "extents").iterdir() if p != stray)
    size = extent.stat().st_size
    with extent.open("ab") as file:
        file.write(os.urandom(1 * MIB))
    with DiskStore.open(directory) as store:
        assert not stray.exists()
        store.gc()
        assert hit(store, BIG, unit)
        assert store.activity().orphans >= 1
        assert sum(p.stat().st_size for p in (directory / "extents").iterdir()) <= size + 1 * MIB


def test_the_cap_can_be_changed(fast_path: Path) -> None:
    with DiskStore.open(fast_path / "s", 32 * MIB) as store:
        for i in range(30):
            store.publish(BIG.unit(tokens_of(i, 3)))
    with DiskStore.open(fast_path / "s", 12 * MIB) as store:
        assert store.publish(BIG.unit(tokens_of(99, 3))).stored
        assert disk_usage(store._directory) <= 12 * MIB
        assert hit(store, BIG, BIG.unit(tokens_of(99, 3)))


def test_a_lower_cap_holds_at_once(fast_path: Path) -> None:
    units = [BIG.unit(tokens_of(i, 3)) for i in range(30)]
    with DiskStore.open(fast_path / "s", 32 * MIB) as store:
        assert all(store.publish(unit).stored for unit in units)
        store.touch(LAYOUT, units[3].digests[-1].tobytes())
        assert disk_usage(store._directory) > 12 * MIB
    with DiskStore.open(fast_path / "s", 9 * MIB) as store:
        assert disk_usage(store._directory) <= 9 * MIB
        assert store.verify().ok
        assert hit(store, BIG, units[3])
        assert sum(hit(store, BIG, unit) for unit in units) > 5


def test_gc_goes_below_the_cap(fast_path: Path) -> None:
    """The cap was lowered while nothing could go."""

    def lower(index: Index) -> None:
        with index.write() as db:
            set_meta(db, "capacity", 9 * MIB)

    units = [BIG.unit(tokens_of(i, 3)) for i in range(30)]
    with DiskStore.open(fast_path / "s", 32 * MIB) as store:
        assert all(store.publish(unit).stored for unit in units)
        assert store.gc().units == 0
        store._index.run(lower)
        assert "more than the cap" in store.verify().problems[0]
        assert 0 < store.gc().units < 25
        assert store.verify().ok
        assert hit(store, BIG, units[-1])


def test_d15_nothing_lives_by_the_wall_clock(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = BIG.unit(tokens_of(1, 2))
    for year in (0, 4e9, 1e9):
        monkeypatch.setattr(time, "time", lambda year=year: year)
        with DiskStore.open(fast_path / "s", 64 * MIB) as store:
            assert store.publish(unit).outcome is (Outcome.PUBLISHED if year == 0 else Outcome.KNOWN)
            for path in (fast_path / "s").rglob("*"):
                os.utime(path, (year, year))
            assert hit(store, BIG, unit)
            assert store.verify().ok


def test_d14_names_are_hex(fast_path: Path) -> None:
    with DiskStore.open(fast_path / "s", 64 * MIB) as store:
        for i in range(3):
            store.publish(BIG.unit(tokens_of(i, 2), root=b"../../etc/passwd\0".ljust(32, b"/")))
        names = [path.name for path in (fast_path / "s" / "extents").iterdir()]
    assert names
    assert all(
        len(name) == 23 and set(name[:16]) <= set("0123456789abcdef") and name[16:] == ".extent" for name in names
    )


def test_d13_no_salt_is_in_any_file(fast_path: Path) -> None:
    from kvloom.core.digests import PrefixKeys, prefix_digests
    from kvloom.core.namespace import encode_namespace
    from kvloom.tiers.disk import Need, NewObject, Unit
    from kvloom.types import Grade

    salt, other = b"a-very-secret-tenant-salt", b"another-very-secret-salt"
    tokens = tokens_of(1, 4)
    with DiskStore.open(fast_path / "s", 64 * MIB) as store:
        keys = {name: PrefixKeys.of(encode_namespace(name, (), b"layout")) for name in (salt, other)}
        digests = {name: prefix_digests(keys[name], tokens, SEGMENT) for name in keys}
        item = NewObject(3, 0, 0, Grade.CANONICAL, b"state")
        unit = Unit(LAYOUT, keys[salt].root, digests[salt], tokens, SEGMENT, [item], [Need(0, 3, 1)])
        assert store.publish(unit).stored
        assert store.lookup(LAYOUT, digests[salt]).known.all()
        assert not store.lookup(LAYOUT, digests[other]).known.any()
        store.export_archive(fast_path / "archive")
        said = f"{store.contents()} {store.activity()}".encode()
    files = [path.read_bytes() for path in (fast_path / "s").rglob("*") if path.is_file()]
    for data in [*files, (fast_path / "archive").read_bytes(), said]:
        assert salt not in data
        assert keys[salt].leaf.tobytes() not in data
        assert keys[salt].link.tobytes() not in data
    assert any(digests[salt][0].tobytes() in data for data in files)


def test_the_index_gives_back_what_it_does_not_need(fast_path: Path) -> None:
    with DiskStore.open(fast_path / "s", 64 * MIB) as store:
        for i in range(40):
            store.publish(World((300, 200, 100)).unit(tokens_of(i, 60), root=b"x" * 32 if i else b"r" * 32))
        before = store.contents().index
        assert store.clear(LAYOUT, b"x" * 32) == 39
        store.gc()
        assert store.contents().index < before / 2
        assert hit(store, World((300, 200, 100)), World((300, 200, 100)).unit(tokens_of(0, 60)))
        assert store.verify().ok
