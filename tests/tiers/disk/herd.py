"""Several processes on one directory, killed and started again at random, with the bytes on disk watched."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.tiers.disk.nursery import Nursery
from tests.tiers.disk.worker import INTERRUPTED, PLANS, Plan
from tests.tiers.disk.world import hit

from kvloom.tiers.disk import DiskStore
from kvloom.tiers.disk.checking import disk_usage

LOOK = 0.003
"""Seconds between two looks at the bytes on disk."""
FRESH = 1 / 8
"""Part of the workers that are interpreters of their own."""
AT_ONCE = (0.7, 0.2, 0.1)
"""How often one, two or three are killed together."""
SAID = re.compile(rb"\+(\d+):(\d+):(\d+)\.")
BEGUN = re.compile(rb"@(\d+)\n")
READER = re.compile(rb"reader (\d+) (\d+)\n")


@dataclass
class Herd:
    """What happened: operations of all processes, how they ended, and the most bytes on disk among ``samples``.

    ``most_of_cap``: as part of the cap; ``together``: how many were killed at a time; ``fresh``: workers that were not
    forked; ``kept``: units that were said to be published, and kept; ``hits``: whole units in the end; ``polls`` and
    ``whole``: of readers.
    """

    operations: int = 0
    kills: int = 0
    interrupts: int = 0
    ended: int = 0
    samples: int = 0
    most: int = 0
    most_of_cap: float = 0.0
    fresh: int = 0
    hits: int = 0
    polls: int = 0
    whole: int = 0
    kept: int = 0
    together: Counter[int] = field(default_factory=Counter)

    def add(self, other: Herd) -> None:
        """Add another to it."""
        for name, value in vars(other).items():
            setattr(
                self, name, max(value, getattr(self, name)) if name.startswith("most") else value + getattr(self, name)
            )


@dataclass(frozen=True)
class Pace:
    """Seconds between two kills, from ``shortest`` to ``longest``, as often below a geometric mean as above it.

    ``steps``: operations after which a worker ends by itself.
    """

    shortest: float = 0.05
    longest: float = 1.2
    steps: tuple[int, int] = (400, 400)

    def draw(self, rng: random.Random) -> float:
        """The next pause."""
        return math.exp(rng.uniform(math.log(self.shortest), math.log(self.longest)))


def run(
    directory: Path,
    log: IO[str],
    *,
    kills: int,
    seed: int,
    processes: int = 2,
    pace: Pace = Pace(),
    operations: int = 0,
    interrupts: float = 0.0,
    plan: str = "crowded",
) -> Herd:
    """Until so many were killed and so many operations done; ``interrupts``: part of the kills that are SIGINT.

    A reader polls all along.  Raises AssertionError when a process fails by itself, or when the store is not in order
    afterwards; where the plan keeps what was published, all of that has to be there.
    """
    rng, done = random.Random(seed), Herd()
    planned = PLANS[plan]
    # Opened and closed: whoever is started finds a store with a cap.
    with DiskStore.open(directory, planned.capacity) as store:
        place = store._directory
    nursery = Nursery(log, seed)
    started = 0

    def start() -> int:
        nonlocal started
        started += 1
        fresh = rng.random() < FRESH
        done.fresh += fresh
        return nursery.start(directory, seed + started, rng.randint(*pace.steps), plan, fresh=fresh)

    try:
        reader = nursery.start(directory, seed, 0, plan)
        herd = [start() for _ in range(processes)]
        while done.kills + done.interrupts < kills or done.operations < operations:
            until = time.monotonic() + pace.draw(rng)
            while time.monotonic() < until:
                done.most = max(done.most, disk_usage(place))
                done.samples += 1
                time.sleep(LOOK)
            for number, pid in enumerate(herd):
                code = nursery.ended(pid)
                if code is not None:
                    assert code == 0, "a process failed"
                    done.ended += 1
                    herd[number] = start()
            # Whoever still imports modules is spared: it has nothing to do with the store yet.
            begun = {int(pid) for pid in BEGUN.findall(_read(log))}
            able = [number for number, pid in enumerate(herd) if pid in begun]
            if rng.random() < interrupts:
                victims, number = rng.sample(able, min(1, len(able))), signal.SIGINT
            else:
                count = rng.choices((1, 2, 3), AT_ONCE)[0]
                victims, number = rng.sample(able, min(count, len(able))), signal.SIGKILL
                done.together[len(victims)] += bool(victims)
            for victim in victims:
                nursery.send(herd[victim], number)
            for victim in victims:
                code = nursery.wait(herd[victim])
                if number == signal.SIGINT:
                    assert code in {0, INTERRUPTED, -signal.SIGINT}, "it did not end in good order"
                    done.interrupts += 1
                else:
                    assert code in {0, -signal.SIGKILL}, "a process failed"
                    done.kills, done.ended = done.kills + (code != 0), done.ended + (code == 0)
            done.operations = _read(log).count(b".")
            for victim in victims:
                herd[victim] = start()
        nursery.send(reader, signal.SIGTERM)
        assert nursery.wait(reader) == 0, "the reader failed"
    finally:
        nursery.close()
    said = _read(log)
    for polls, whole in READER.findall(said):
        done.polls, done.whole = done.polls + int(polls), done.whole + int(whole)
    _check(directory, planned, done, {(int(a), int(b), int(c)) for a, b, c in SAID.findall(said)})
    return done


def _read(log: IO[str]) -> bytes:
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0)


def _check(directory: Path, plan: Plan, done: Herd, said: set[tuple[int, int, int]]) -> None:
    """Everything is whole or absent, what was said to be published is there where it is kept, nothing is left over."""
    with DiskStore.open(directory) as store:
        checked = store.verify()
        assert checked.ok, checked
        for key in plan.all():
            unit = plan.unit(*key)
            whole = hit(store, plan.world, unit)
            assert whole == bool(store.lookup(unit.layout, unit.digests).boundary[-1]), f"unit {key} is in pieces"
            assert whole or not plan.keeps or key not in said, f"unit {key} was published and is not there"
            done.hits += whole
        if plan.keeps:
            done.kept = len(said)
        store.gc()
        contents = store.contents()
        assert contents.on_disk <= contents.in_use <= plan.capacity
        assert contents.extents == len(store._directory.extent_files()), "orphans are left"
    assert done.hits, "nothing is there"
    done.most_of_cap = done.most / plan.capacity
    assert done.most <= plan.capacity, f"{done.most} bytes were on disk, the cap is {plan.capacity}"
