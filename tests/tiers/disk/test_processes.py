"""Two processes, one directory, killed and started again at random (D6, D8, D12)."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.tiers.disk import herd
from tests.tiers.disk.faults import CountingOps, statements
from tests.tiers.disk.world import MIB, World, hit, tokens_of

from kvloom.tiers.disk import DiskStore, FileOps
from kvloom.tiers.disk.directory import Directory

PACE = herd.Pace(0.01, 0.4, (3, 120))


def test_d6_processes_that_are_killed_and_come_again(fast_path: Path) -> None:
    log = fast_path / "log"
    with log.open("w+") as file:
        try:
            done = herd.run(fast_path / "s", file, kills=40, seed=1, operations=600, interrupts=0.3, pace=PACE)
        finally:
            file.seek(0)
            said = file.read()
    assert done.operations >= 600
    assert done.interrupts > 0
    assert done.kills > 0
    assert "Traceback" not in said
    assert done.most > 2 * MIB
    assert done.polls > 50


def test_d6_what_was_published_is_there_after_others_were_killed(fast_path: Path) -> None:
    with (fast_path / "log").open("w+") as file:
        done = herd.run(fast_path / "s", file, kills=30, seed=2, processes=3, pace=PACE, plan="roomy")
        file.seek(0)
        assert "Traceback" not in file.read()
    assert done.kills >= 30
    assert done.kept > 20
    assert done.hits >= done.kept
    assert done.polls > done.whole > 0


def test_d6_two_handles_store_the_same_thing(fast_path: Path) -> None:
    world = World()
    with DiskStore.open(fast_path / "s", 64 * MIB) as one, DiskStore.open(fast_path / "s") as two:
        for i in range(20):
            unit = world.unit(tokens_of(i, 3))
            outcomes = [store.publish(unit) for store in (one, two)]
            assert [o.objects for o in outcomes] == [len(unit.objects), 0]
            assert hit(one, world, unit)
            assert hit(two, world, unit)
        assert len(list((fast_path / "s" / "extents").iterdir())) == 1


def test_d12_keys_do_not_depend_on_the_hash_seed(fast_path: Path) -> None:
    code = (
        "import sys; from tests.tiers.disk.world import *; from kvloom.tiers.disk import DiskStore\n"
        "store = DiskStore.open(sys.argv[1], 64 << 20); unit = World().unit(tokens_of(1, 3))\n"
        "print(hit(store, World(), unit), store.publish(unit).outcome.value); store.close()"
    )
    said = []
    for seed in ("1", "2"):
        environment = {
            **os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }  # fmt: skip
        command = [sys.executable, "-c", code, str(fast_path / "s")]
        root = Path(__file__).parents[3]
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
        said.append(done.stdout.split())
    assert said == [["False", "published"], ["True", "known"]]


def test_d6_a_store_that_another_one_makes_at_this_moment(fast_path: Path) -> None:
    """Its files come and go meanwhile."""
    looks = 0
    for number in range(40):
        place = fast_path / f"s{number}"
        maker = threading.Thread(target=lambda place=place: DiskStore.open(place, 64 * MIB).close())
        maker.start()
        while maker.is_alive():
            Directory(place, FileOps(), create=True)
            looks += 1
        maker.join()
        with DiskStore.open(place) as store:
            assert store.capacity == 64 * MIB
    assert looks > 200


@pytest.mark.parametrize("when", ["begin", "after begin", "insert", "commit", "after commit"])
def test_an_interrupt_leaves_no_transaction_open(fast_path: Path, when: str) -> None:
    """SIGINT while SQLite waits for its lock is raised when it has it."""
    world, armed = World(), list[str]()

    def interrupt(what: str) -> None:
        if what in armed:
            armed.clear()
            raise KeyboardInterrupt

    with (
        statements(interrupt),
        DiskStore.open(fast_path / "s", 64 * MIB) as one,
        DiskStore.open(fast_path / "s") as two,
    ):
        armed.append(when)
        with pytest.raises(KeyboardInterrupt):
            one.publish(world.unit(tokens_of(1, 3)))
        assert not armed
        assert not one._index.run(lambda index: index._writer.in_transaction)
        for store, number in ((two, 2), (one, 3)):
            unit = world.unit(tokens_of(number, 3))
            assert store.publish(unit).stored
            assert hit(store, world, unit)
        assert one.activity().rebuilds == two.activity().rebuilds == 0
    with DiskStore.open(fast_path / "s") as store:
        assert store.verify().ok
        unit = world.unit(tokens_of(1, 3))
        assert hit(store, world, unit) == bool(store.lookup(unit.layout, unit.digests).boundary[-1])


@pytest.mark.parametrize("when", ["begin", "after begin", "insert", "commit", "after commit"])
def test_a_process_that_is_interrupted_leaves_only_whole_units(fast_path: Path, when: str) -> None:
    """Interrupted at any statement of a publication, it closes its store at once."""
    world, points = World(), 0
    units = [world.unit(tokens_of(number, 3)) for number in range(3)]
    for at in range(100):
        steps = list[str]()

        def interrupt(what: str, at: int = at, steps: list[str] = steps) -> None:
            steps.extend([what] * (what == when))
            if len(steps) == at + 1 and what == when:
                raise KeyboardInterrupt

        place = fast_path / f"s{at}"
        DiskStore.open(place, 64 * MIB).close()
        with statements(interrupt), contextlib.suppress(KeyboardInterrupt), DiskStore.open(place) as store:
            for unit in units:
                assert store.publish(unit).stored
        with DiskStore.open(place) as store:
            assert store.verify().ok
            for unit in units:
                assert hit(store, world, unit) == bool(store.lookup(unit.layout, unit.digests).boundary[-1])
        if len(steps) <= at:
            break
        points += 1
    assert points > 3


@pytest.mark.parametrize("clear", [True, False])
def test_another_process_renews_the_index_under_an_open_handle(fast_path: Path, clear: bool) -> None:
    world = World()
    first, second = world.unit(tokens_of(1, 3)), world.unit(tokens_of(2, 3))
    with DiskStore.open(fast_path / "s", 64 * MIB) as one, DiskStore.open(fast_path / "s") as two:
        assert one.publish(first).stored
        if clear:
            two.clear()
        else:
            next((fast_path / "s").glob("index-*.sqlite")).write_bytes(b"nonsense" * 1000)
            two._index.run(lambda index: index.checkpoint()) if False else two.verify()
        assert hit(one, world, first) == (not clear)
        outcome = one.publish(second)
        if not outcome.stored:  # the extent that it was about to write to is gone
            assert outcome.reason
        assert two.publish(second).stored or outcome.stored
        assert hit(one, world, second)
        assert hit(two, world, second)
        assert one.verify().ok


def test_who_has_the_store_open_goes_on_after_a_clear_that_did_not_get_to_its_end(fast_path: Path) -> None:
    """Whoever clears may end anywhere; the others then find the units whole or not at all, and may store them again."""
    world, points = World(), 0
    unit = world.unit(tokens_of(1, 3))
    for at in range(1000):
        steps = list[str]()

        def fail(_number: int, what: str, at: int = at, steps: list[str] = steps) -> None:
            steps.append(what)
            if len(steps) > at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        ops = CountingOps()
        place = fast_path / f"s{at}"
        with DiskStore.open(place, 64 * MIB) as one, DiskStore.open(place, ops=ops) as two:
            assert one.publish(unit).stored
            assert two.publish(world.unit(tokens_of(2, 3))).stored
            ops.before = fail
            try:
                two.clear()
            except OSError:
                points += 1
            else:
                break
            finally:
                ops.before = lambda _number, _what: None
            for store in (one, two):
                assert hit(store, world, unit) == bool(store.lookup(unit.layout, unit.digests).boundary[-1])
            assert one.publish(unit).stored
            assert hit(one, world, unit)
            with DiskStore.open(place) as other:
                assert hit(other, world, unit)
                assert other.verify().ok
    assert points > 10
