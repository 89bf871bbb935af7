"""What a process does to a store while it is killed at one of its steps, and what has to be left of it.

A *step* is a change of a file or of the index (``faults.CountingOps``, ``faults.statements``).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.tiers.disk.faults import CountingOps
from tests.tiers.disk.world import MIB, World, tokens_of

from kvloom.tiers.disk import DiskStore, Outcome, Unit

SMALL = World((3000, 9000, 500))
MEDIUM = World((30_000, 50_000, 2000))
LARGE = World((150_000, 200_000, 5000))
CAP = 8 * MIB

Say = Callable[[int], None]
Run = Callable[[Path, CountingOps, Say], None]


@dataclass(frozen=True)
class Scenario:
    """``run`` tells which units it has published; where ``keeps``, all those are there for good.

    ``prepare`` makes the store that it begins with; ``rival``: another process writes to the same store meanwhile.
    """

    run: Run
    world: World
    count: int
    capacity: int
    keeps: bool = False
    rival: bool = False
    prepare: Callable[[Path], None] | None = None

    @property
    def name(self) -> str:
        """Of its function."""
        return self.run.__name__

    @property
    def units(self) -> tuple[Unit, ...]:
        """All that it and its rival publish."""
        return units(self.world, self.count)


@functools.lru_cache(maxsize=16)
def units(world: World, count: int) -> tuple[Unit, ...]:
    """Two namespaces in turn; in each, units that go on where the one before ended, from fresh prompts in between."""
    made = []
    for i in range(count):
        root = bytes([b"ab"[i % 2]]) * 32
        made.append(world.unit(tokens_of(i // 4, 2 + i // 2 % 2 * 2), root=root))
    return tuple(made)


def filling(directory: Path, ops: CountingOps, say: Say) -> None:
    """Opens a store, publishes units that build on one another, reads, restarts, publishes more."""
    for restart in range(2):
        with DiskStore.open(directory, 64 * MIB, ops=ops, threads=1) as store:
            for i in range(3):
                number = 3 * restart + i
                assert store.publish(units(SMALL, 6)[number]).outcome is Outcome.PUBLISHED
                say(number)


def rolling(directory: Path, ops: CountingOps, say: Say) -> None:
    """Publishes units of several kinds until the third extent is begun; nothing has to go for them."""
    with DiskStore.open(directory, 16 * MIB, ops=ops, threads=1) as store:
        for number, unit in enumerate(units(MEDIUM, 12)):
            assert store.publish(unit).outcome is Outcome.PUBLISHED
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


def crowded(directory: Path) -> None:
    """A store from which units went already."""
    with DiskStore.open(directory, CAP) as store:
        for unit in units(MEDIUM, 36):
            store.publish(unit)


def wasteful(directory: Path) -> None:
    """A store whose extents are half waste, since whoever cleared a namespace did not get to collecting them."""

    def fail(_number: int, what: str) -> None:
        if cleared and what in {"open", "allocate", "unlink"}:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    cleared: list[bool] = []
    with DiskStore.open(directory, CAP, ops=CountingOps(fail)) as store:
        for unit in units(MEDIUM, 30):
            assert store.publish(unit).stored
        cleared.append(True)
        with contextlib.suppress(OSError):
            store.clear(MEDIUM.layout, b"a" * 32)
            raise AssertionError("nothing was collected")


def collecting(directory: Path, ops: CountingOps, say: Say) -> None:
    """Collects garbage: what lies in half-empty extents goes into new ones; goes on, and collects again."""
    with DiskStore.open(directory, CAP, ops=ops, threads=1) as store:
        store.gc()
        for number in (33, 35):
            store.publish(units(MEDIUM, 36)[number])
            say(number)
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


def competing(directory: Path, ops: CountingOps, say: Say) -> None:
    """Publishes while a rival publishes the same and more."""
    with DiskStore.open(directory, 64 * MIB, ops=ops, threads=1) as store:
        for number in range(6):
            assert store.publish(units(SMALL, 12)[number]).stored
            say(number)


def crowding(directory: Path, ops: CountingOps, say: Say) -> None:
    """Publishes more than there is room for while a rival does as well."""
    with DiskStore.open(directory, CAP, ops=ops, threads=1) as store:
        for number in range(8):
            unit = units(MEDIUM, 36)[4 * number + number % 4]
            store.publish(unit)
            say(number)
            if number == 5:
                store.gc()


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(filling, SMALL, 6, 64 * MIB, keeps=True),
        Scenario(rolling, MEDIUM, 12, 16 * MIB, keeps=True),
        Scenario(evicting, LARGE, 14, CAP),
        Scenario(collecting, MEDIUM, 36, CAP, prepare=wasteful),
        Scenario(clearing, SMALL, 6, 64 * MIB),
        Scenario(competing, SMALL, 12, 64 * MIB, keeps=True, rival=True),
        Scenario(crowding, MEDIUM, 36, CAP, rival=True, prepare=crowded),
    )
}
