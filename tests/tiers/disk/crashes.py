"""A process that is killed at its n-th change of a store, and what has to be true of the store afterwards."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.tiers.disk.faults import CountingOps, kill_now, statements
from tests.tiers.disk.world import MIB, World, hit, tokens_of

from kvloom.tiers.disk import DiskStore, Outcome, Unit
from kvloom.tiers.disk.checking import Verified

SMALL = World((3000, 9000, 500))
LARGE = World((150_000, 200_000, 5000))
CAP = 8 * MIB

Say = Callable[[int], None]


def filling(directory: Path, ops: CountingOps, say: Say) -> None:
    """Opens a store, publishes units that build on one another, reads, restarts, publishes more."""
    for restart in range(2):
        with DiskStore.open(directory, 64 * MIB, ops=ops, threads=1) as store:
            for i in range(3):
                number = 3 * restart + i
                assert store.publish(units(SMALL, 6)[number]).outcome is Outcome.PUBLISHED
                say(number)


def evicting(directory: Path, ops: CountingOps, say: Say) -> None:
    """Publishes more than there is room for, so that units go, extents are copied and removed."""
    with DiskStore.open(directory, CAP, ops=ops, threads=1) as store:
        for number, unit in enumerate(units(LARGE, 14)):
            store.publish(unit)
            say(number)
            if number % 4 == 3:
                store.touch(unit.layout, unit.digests[-1].tobytes())
            if number == 9:
                store.gc()


def clearing(directory: Path, ops: CountingOps, say: Say) -> None:
    """Publishes, clears one namespace, then all, then publishes again."""
    with DiskStore.open(directory, 64 * MIB, ops=ops, threads=1) as store:
        for number, unit in enumerate(units(SMALL, 4)):
            assert store.publish(unit).stored
            say(number)
        store.clear(SMALL.layout, b"a" * 32)
        store.clear()
        say(-1)
        assert store.publish(units(SMALL, 6)[5]).stored


def units(world: World, count: int) -> list[Unit]:
    """Two namespaces in turn; in each, units that go on where the one before ended, from fresh prompts in between."""
    made = []
    for i in range(count):
        root = bytes([b"ab"[i % 2]]) * 32
        made.append(world.unit(tokens_of(i // 4, 2 + i // 2 % 2 * 2), root=root))
    return made


@dataclass
class Crash:
    """How a child ended: ``done`` is what it said, ``killed`` whether it got to the moment at all."""

    killed: bool
    done: list[int] = field(default_factory=list)


def run_child(scenario: Callable[[Path, CountingOps, Say], None], directory: Path, at: int | None) -> Crash:
    """Run a scenario in a child process that is killed at its ``at``-th change; raises when it fails otherwise."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            ops = CountingOps(lambda n, _what: kill_now() if n == at else None)
            with statements(ops.step):
                scenario(directory, ops, lambda n: os.write(writer, bytes([n % 256])) and None)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        done = [n if n < 255 else -1 for n in said.read()]
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"the child failed at {at}"
    return Crash(os.WIFSIGNALED(status), done)


def count_steps(scenario: Callable[[Path, CountingOps, Say], None], directory: Path) -> list[str]:
    """Names of all changes of a scenario."""
    ops = CountingOps()
    with statements(ops.step):
        scenario(directory, ops, lambda _n: None)
    return ops.names


def check_after(directory: Path, world: World, made: list[Unit], must: list[int]) -> int:
    """Open the store and look at everything; returns how many units are there.

    Every unit is whole or absent, those in ``must`` are whole, nothing wrong is ever read, no orphan is left, and the
    store goes on as usual.
    """
    with DiskStore.open(directory, None if (directory / "KVLOOM").exists() else CAP) as store:
        checked = store.verify()
        assert checked.ok, checked
        assert isinstance(checked, Verified)
        there = [hit(store, world, unit) for unit in made]
        for unit, whole in zip(made, there, strict=True):
            assert whole == bool(store.lookup(unit.layout, unit.digests).boundary[-1])
        for number in must:
            assert there[number], f"unit {number} was published and is not there"
        store.gc()
        seen = store.contents()
        assert seen.extents == len(store._directory.extent_files())
        assert seen.on_disk <= seen.in_use <= seen.capacity
        assert store.publish(made[-1]).stored
        assert hit(store, world, made[-1])
    return sum(there)
