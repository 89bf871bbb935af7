"""Disks that fail and come back (D1, D7, D10)."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.disk.faults import ERRORS, CountingOps, FailingOps, statements
from tests.tiers.disk.scenarios import SMALL, units
from tests.tiers.disk.world import LAYOUT, MIB, World, hit, read_all, tokens_of

from kvloom.errors import StoreError
from kvloom.tiers.disk import DiskStore, Fill, NewObject, Outcome, Result, Unit
from kvloom.tiers.disk.health import FIRST_PAUSE, LONGEST_PAUSE
from kvloom.types import Grade


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EROFS"])
def test_d1_the_nth_operation_of_a_store_fails(fast_path: Path, error: str) -> None:
    """For every n that unit is a miss, earlier ones hit, and it is stored again when the pause is over."""
    made = units(SMALL, 4)
    steps = publication(fast_path / "dry", error, None)[1]
    names = [name for name in steps if not name.startswith("after")]
    assert {"allocate", "write", "torn write", "sync_data", "begin", "insert", "commit"} <= set(names)
    for n, name in enumerate(steps):
        if name.startswith("after"):
            continue
        clock, _ = publication(fast_path / str(n), error, n)
        clock.now += LONGEST_PAUSE
        with DiskStore.open(fast_path / str(n), clock=clock) as store:
            assert [hit(store, SMALL, unit) for unit in made[:3]] == [True, False, True], name
            assert store.publish(made[1]).stored
            assert store.verify().ok


def publication(place: Path, error: str, n: int | None) -> tuple[Clock, list[str]]:
    """Publish a unit, and one more of which the n-th operation fails; the operations of the second one."""
    made, clock, failing = units(SMALL, 4), Clock(), [-1]

    def fail(number: int, _what: str) -> None:
        if number == failing[0]:
            raise OSError(ERRORS[error], os.strerror(ERRORS[error]))

    ops = CountingOps(fail)
    with statements(ops.step), DiskStore.open(place, 64 * MIB, ops=ops, clock=clock) as store:
        assert store.publish(made[0]).outcome is Outcome.PUBLISHED
        begun = ops.number
        failing[0] = -1 if n is None else begun + n
        done = store.publish(made[1])
        names = ops.names[begun:]
        if n is not None:
            assert done.outcome is Outcome.UNAVAILABLE, names
            assert done.reason
            assert hit(store, SMALL, made[0])
            assert not hit(store, SMALL, made[1])
            assert store.publish(made[1]).outcome is Outcome.UNAVAILABLE
            assert not store.activity().available
            clock.now += LONGEST_PAUSE
            assert store.publish(made[2]).outcome is Outcome.PUBLISHED
            assert store.activity().available
            assert hit(store, SMALL, made[2])
    return clock, names


@pytest.mark.parametrize("what", ["create", "allocate", "write", "sync_data", "sync_directory"])
@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EROFS"])
def test_d7_it_comes_back_by_itself(fast_path: Path, what: str, error: str) -> None:
    clock, ops = Clock(), FailingOps()
    made = units(SMALL, 4)
    with DiskStore.open(fast_path / "s", 64 * MIB, ops=ops, clock=clock) as store:
        ops.failing[what] = ERRORS[error]
        assert store.publish(made[0]).outcome is Outcome.UNAVAILABLE
        for _ in range(8):
            clock.now += LONGEST_PAUSE
            assert store.publish(made[0]).outcome is Outcome.UNAVAILABLE
        assert not hit(store, SMALL, made[0])
        ops.failing.clear()
        assert store.publish(made[0]).outcome is Outcome.UNAVAILABLE, "within the pause nothing is tried"
        clock.now += LONGEST_PAUSE
        assert all(store.publish(unit).outcome is Outcome.PUBLISHED for unit in made)
        assert all(hit(store, SMALL, unit) for unit in made)
        assert store.activity().failures == 9
        assert store.verify().ok


@pytest.mark.parametrize("folder", [False, True])
def test_d7_files_that_somebody_removes_below_a_running_store(fast_path: Path, folder: bool) -> None:
    """What is written to a file without a name is nowhere: it is not called stored, and goes to one that has a name."""
    clock = Clock()
    first, second = units(SMALL, 2)
    with DiskStore.open(fast_path / "s", 64 * MIB, clock=clock) as store:
        assert store.publish(first).stored
        shutil.rmtree(fast_path / "s" / "extents")
        (fast_path / "s" / "extents").mkdir(mode=0o700)
        if folder:
            (fast_path / "s" / "extents").rmdir()
        outcome = store.publish(second).outcome
        assert outcome is (Outcome.UNAVAILABLE if folder else Outcome.PUBLISHED)
        assert hit(store, SMALL, second) is not folder
        (fast_path / "s" / "extents").mkdir(mode=0o700, exist_ok=True)
        for _ in range(3):
            clock.now += LONGEST_PAUSE
            for unit in (first, second):
                hit(store, SMALL, unit)  # finds out what is gone
                store.publish(unit)
        assert hit(store, SMALL, first)
        assert hit(store, SMALL, second)


def test_a_store_that_is_cleared_while_one_writes(fast_path: Path) -> None:
    """It is written again; and what the process opens meanwhile does not get the number of a file in use, nor bytes."""
    first, second = units(SMALL, 2)
    opened = list[tuple[Path, int]]()
    with DiskStore.open(fast_path / "s", 64 * MIB) as store, DiskStore.open(fast_path / "s") as other:
        assert store.publish(first).stored
        payload = second.objects[0].payload

        def fill(into: memoryview) -> None:
            if not opened:
                assert other.clear() == 1
                notices = threading.Thread(target=store.lookup, args=(second.layout, second.digests))
                notices.start()
                notices.join()
                for number in range(20):
                    path = fast_path / f"somebody's {number}"
                    path.write_bytes(b"precious")
                    opened.append((path, os.open(path, os.O_RDWR)))
            into[:] = memoryview(payload).cast("B")  # type: ignore[arg-type]

        late = replace(second.objects[0], payload=Fill(second.objects[0].size, fill))
        done = store.publish(replace(second, objects=(late, *second.objects[1:])))
        for path, number in opened:
            os.close(number)
            assert path.read_bytes() == b"precious"
        assert len(opened) == 20
        assert done.outcome is Outcome.PUBLISHED
        assert hit(store, SMALL, second)
        assert other.verify().ok


def test_d7_pauses_grow_and_are_bounded(fast_path: Path) -> None:
    clock, ops = Clock(), FailingOps()
    with DiskStore.open(fast_path / "s", 64 * MIB, ops=ops, clock=clock) as store:
        ops.failing["write"] = ERRORS["EIO"]
        unit, pauses = units(SMALL, 1)[0], []
        for _ in range(8):
            assert store.publish(unit).outcome is Outcome.UNAVAILABLE
            begin, failures = clock.now, store.activity().failures
            while store.activity().failures == failures:
                clock.now += 0.25
                store.publish(unit)
            pauses.append(clock.now - begin)
        assert pauses[0] <= 2 * FIRST_PAUSE
        assert pauses == sorted(pauses)
        assert pauses[-1] == LONGEST_PAUSE


def test_d7_errors_of_reads(fast_path: Path) -> None:
    """One passing error costs one miss; an object that fails again and again is given up."""
    ops = FailingOps()
    unit = units(SMALL, 1)[0]
    with DiskStore.open(fast_path / "s", 64 * MIB, ops=ops) as store:
        store.publish(unit)
        places = store.lookup(LAYOUT, unit.digests).places
        ops.failing["read"] = ERRORS["EIO"]
        data, results = read_all(store, places)
        assert set(results.tolist()) == {Result.IO_ERROR}
        assert data == [None] * len(places)
        ops.failing.clear()
        assert hit(store, SMALL, unit)
        ops.failing["read"] = ERRORS["EIO"]
        read_all(store, places)
        ops.failing.clear()
        assert len(store.lookup(LAYOUT, unit.digests).places) == 0
        assert store.publish(unit).outcome is Outcome.PUBLISHED
        assert hit(store, SMALL, unit)


def test_d7_an_index_that_cannot_be_read_is_a_miss(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, unit = Clock(), units(SMALL, 1)[0]
    with DiskStore.open(fast_path / "s", 64 * MIB, clock=clock) as store:
        store.publish(unit)

        def broken(*_: object, **__: object) -> None:
            raise OSError(ERRORS["EIO"], "broken")

        with monkeypatch.context() as patch:
            patch.setattr("kvloom.tiers.disk.lookups.lookup", broken)
            assert not store.lookup(LAYOUT, unit.digests).known.any()
            assert not store.activity().available
        assert not store.lookup(LAYOUT, unit.digests).known.any()
        clock.now += LONGEST_PAUSE
        assert hit(store, SMALL, unit)


def test_what_a_fill_raises_leaves_nothing_behind(fast_path: Path) -> None:
    unit = units(SMALL, 1)[0]

    def fail(_room: memoryview) -> None:
        raise ZeroDivisionError

    items = [*unit.objects[:3], NewObject(1, 0, 1, Grade.CANONICAL, Fill(100, fail)), *unit.objects[4:]]
    bad = Unit(unit.layout, unit.root, unit.digests, unit.tokens, unit.segment, items, unit.needs)
    with DiskStore.open(fast_path / "s", 64 * MIB) as store:
        with pytest.raises(ZeroDivisionError):
            store.publish(bad)
        assert not store.lookup(LAYOUT, unit.digests).known.any()
        assert store.publish(unit).stored
        assert hit(store, SMALL, unit)


class _Slow(FailingOps):
    def read(self, fd: int, into: memoryview, offset: int) -> int:
        time.sleep(0.05)
        return super().read(fd, into, offset)


def test_d10_a_slow_read_can_be_stopped(tmp_path: Path) -> None:
    world = World((3 * MIB, 9000, 500), columns=16)
    unit = world.unit(tokens_of(1, 1))
    with DiskStore.open(tmp_path / "s", 256 * MIB, ops=_Slow(), threads=1) as store:
        assert store.publish(unit).stored
        places = store.lookup(LAYOUT, unit.digests).places
        begun = time.monotonic()
        seen: list[int] = []
        result = store.read_each(places, lambda i, _data: seen.append(i), lambda: time.monotonic() - begun > 0.2)
        assert set(result.results.tolist()) == {Result.OK, Result.STOPPED}
        assert len(seen) == int((result.results == Result.OK).sum()) < len(places)
        assert time.monotonic() - begun < 1


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    made = units(World((70_000, 90_000, 500)), 8)
    world = World((70_000, 90_000, 500))
    with DiskStore.open(tmp_path / "s", 64 * MIB) as store:
        assert all(store.publish(unit).stored for unit in made)
        bad: list[int] = []

        def work() -> None:
            bad.extend(1 for unit in made * 3 if not hit(store, world, unit))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not bad


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    mount, umount = shutil.which("mount"), shutil.which("umount")
    place = tmp_path / "mount"
    place.mkdir()
    if mount is None or umount is None or os.geteuid() != 0:
        pytest.skip("mounting a file system of one's own takes root")
    command = [mount, "-t", "tmpfs", "-o", "size=3m,mode=0700", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run([umount, str(place)], check=True)


def test_d7_a_full_disk_and_then_room_again(small_mount: Path) -> None:
    clock, made = Clock(), units(World((60_000, 90_000, 500)), 14)
    world = World((60_000, 90_000, 500))
    (small_mount / "ballast").write_bytes(bytes(1 * MIB))
    (small_mount / "store").mkdir(mode=0o700)
    with DiskStore.open(small_mount / "store", 64 * MIB, clock=clock) as store:
        outcomes = [store.publish(unit).outcome for unit in made]
        assert Outcome.UNAVAILABLE in outcomes
        for unit, outcome in zip(made, outcomes, strict=True):
            assert hit(store, world, unit) == (outcome is Outcome.PUBLISHED)
        (small_mount / "ballast").unlink()
        clock.now += LONGEST_PAUSE
        first = outcomes.index(Outcome.UNAVAILABLE)
        assert store.publish(made[first]).outcome is Outcome.PUBLISHED
        assert hit(store, world, made[first])
        assert store.verify().ok


def test_d7_read_only_and_back(small_mount: Path) -> None:
    clock, made = Clock(), units(SMALL, 4)
    mount = str(shutil.which("mount"))
    with DiskStore.open(small_mount / "store", 64 * MIB, clock=clock) as store:
        assert store.publish(made[0]).stored
        store.gc()  # gives the open extent back: a file open for writing would keep the mount writable
    subprocess.run([mount, "-o", "remount,ro", str(small_mount)], check=True)
    with pytest.raises(StoreError, match="Read-only"):
        DiskStore.open(small_mount / "store", clock=clock)
    subprocess.run([mount, "-o", "remount,rw", str(small_mount)], check=True)
    with DiskStore.open(small_mount / "store", clock=clock) as store:
        assert hit(store, SMALL, made[0])
        assert store.publish(made[1]).stored


def test_arrays_of_any_dtype_are_stored_as_their_bytes(fast_path: Path) -> None:
    unit = units(SMALL, 1)[0]
    value = np.arange(300, dtype=np.float32).reshape(10, 30)
    item = NewObject(0, 0, 0, Grade.CANONICAL, value)
    one = Unit(unit.layout, unit.root, unit.digests, unit.tokens, unit.segment, [item], [])
    with DiskStore.open(fast_path / "s", 64 * MIB) as store:
        assert store.publish(one).stored
        assert read_all(store, store.lookup(LAYOUT, unit.digests).places)[0] == [value.tobytes()]
