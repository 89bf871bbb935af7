"""A process that uses a store at random: ``python -m tests.tiers.disk.worker DIRECTORY SEED STEPS [PLAN]``.

It asserts all along that nothing wrong is read, tells that it begins and of every operation when it is done, and prints
what it did at the end.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tests.tiers.disk.world import MIB, SEGMENT, World, hit, tokens_of

from kvloom.tiers.disk import DiskStore, Outcome, Unit

MOST_REFUSED = 0.05
"""Part of the units for which there may be no room, while others read what would have to go."""
PAUSE = 0.002
"""Seconds between two polls of a reader."""
INTERRUPTED = 130
"""Exit code of a worker that SIGINT ended."""


@dataclass(frozen=True)
class Plan:
    """What there is to store, below which cap, and whether what was published is there for good."""

    world: World
    prompts: int
    capacity: int
    keeps: bool

    def unit(self, prompt: int, segments: int, root: int) -> Unit:
        """One of its units."""
        tokens = tokens_of(prompt, 8)[: SEGMENT * segments]
        return self.world.unit(tokens, root=bytes([root]) * 32)

    def draw(self, rng: random.Random) -> tuple[int, int, int]:
        """Which unit is next."""
        return rng.randrange(self.prompts), rng.randint(1, 8), rng.randrange(2)

    def all(self) -> Iterator[tuple[int, int, int]]:
        """Every unit."""
        for prompt in range(self.prompts):
            for segments in range(1, 9):
                for root in range(2):
                    yield prompt, segments, root


PLANS = {
    "crowded": Plan(World((30_000, 50_000, 2000)), 12, 12 * MIB, keeps=False),
    "roomy": Plan(World((8000, 20_000, 1000)), 60, 128 * MIB, keeps=True),
}


def main(directory: str, seed: int, steps: int, plan: Plan) -> int:
    """0 when all was as it should be."""
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng, done = random.Random(seed), Counter[str]()
    print(f"@{os.getpid()}", flush=True)
    with DiskStore.open(directory) as store:
        for _ in range(steps):
            chance = rng.random()
            key = plan.draw(rng)
            unit = plan.unit(*key)
            told = "."
            if chance < 0.45:
                outcome = store.publish(unit).outcome
                assert outcome in {Outcome.PUBLISHED, Outcome.KNOWN, Outcome.NO_ROOM}, (outcome, store.activity())
                assert outcome is not Outcome.NO_ROOM or not plan.keeps
                done[outcome.value] += 1
                if outcome is not Outcome.NO_ROOM:
                    told = "+{}:{}:{}.".format(*key)
            elif chance < 0.98 or (plan.keeps and chance >= 0.99):
                whole = hit(store, plan.world, unit)
                done["hits" if whole else "misses"] += 1
                if whole:
                    store.touch(unit.layout, unit.digests[-1].tobytes())
            elif chance < 0.99:
                store.gc()
                done["gc"] += 1
            else:
                store.clear(unit.layout, unit.root)
                done["clear"] += 1
            print(told, end="", flush=True)
        activity = store.activity()
        units = sum(done[outcome.value] for outcome in Outcome)
        assert done[Outcome.NO_ROOM.value] <= 1 + MOST_REFUSED * units, (done, activity)
        assert activity.integrity == activity.io_errors == activity.quarantined == 0, activity
        assert activity.rebuilds == activity.failures == 0, activity
    print(f"\n{dict(done)}")
    return 0


def watch(directory: str, seed: int, plan: Plan) -> int:
    """Poll the store until SIGTERM, and compare every byte; 0 when all was as it should be."""
    logging.disable(logging.WARNING)
    stopped = list[int]()
    signal.signal(signal.SIGTERM, lambda number, _frame: stopped.append(number))
    rng, seen = random.Random(seed), set[tuple[int, int, int]]()
    polls = whole = 0
    with DiskStore.open(directory) as store:
        while not stopped:
            key = rng.choice(sorted(seen)) if plan.keeps and seen and rng.random() < 0.5 else plan.draw(rng)
            there = hit(store, plan.world, plan.unit(*key))
            assert there or key not in seen or not plan.keeps, f"unit {key} was there and is not any more"
            if there:
                seen.add(key)
            polls, whole = polls + 1, whole + there
            time.sleep(PAUSE)
        activity = store.activity()
        assert activity.integrity == activity.io_errors == activity.quarantined == 0, activity
        assert activity.rebuilds == activity.failures == 0, activity
    print(f"\nreader {polls} {whole}")
    return 0


def ends(directory: str, seed: int, steps: int, plan: str) -> int:
    """The exit code of a worker, or of a reader where there are no steps to do."""
    try:
        return main(directory, seed, steps, PLANS[plan]) if steps else watch(directory, seed, PLANS[plan])
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(ends(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
