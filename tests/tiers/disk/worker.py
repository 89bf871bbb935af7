"""A process that uses a store at random: ``python -m tests.tiers.disk.worker DIRECTORY SEED STEPS``.

It asserts all along that nothing wrong is read, and prints what it did at the end.
"""

from __future__ import annotations

import logging
import random
import signal
import sys
from collections import Counter

from tests.tiers.disk.world import SEGMENT, World, hit, tokens_of

from kvloom.tiers.disk import DiskStore, Outcome

WORLD = World((30_000, 50_000, 2000))
PROMPTS = 12
MOST_REFUSED = 0.05
"""Part of the units for which there may be no room, while others read what would have to go."""


def main(directory: str, seed: int, steps: int) -> int:
    """0 when all was as it should be."""
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng, done = random.Random(seed), Counter[str]()
    with DiskStore.open(directory) as store:
        for _ in range(steps):
            chance = rng.random()
            tokens = tokens_of(rng.randrange(PROMPTS), 8)[: SEGMENT * rng.randint(1, 8)]
            unit = WORLD.unit(tokens, root=bytes([rng.randrange(2)]) * 32)
            if chance < 0.45:
                outcome = store.publish(unit).outcome
                assert outcome in {Outcome.PUBLISHED, Outcome.KNOWN, Outcome.NO_ROOM}, (outcome, store.activity())
                done[outcome.value] += 1
            elif chance < 0.98:
                whole = hit(store, WORLD, unit)
                done["hits" if whole else "misses"] += 1
                if whole:
                    store.touch(unit.layout, unit.digests[-1].tobytes())
            elif chance < 0.99:
                store.gc()
                done["gc"] += 1
            else:
                store.clear(unit.layout, unit.root)
                done["clear"] += 1
            print(".", end="", flush=True)
        activity = store.activity()
        units = sum(done[outcome.value] for outcome in Outcome)
        assert done[Outcome.NO_ROOM.value] <= 1 + MOST_REFUSED * units, (done, activity)
        assert activity.integrity == activity.io_errors == activity.quarantined == 0, activity
        assert activity.rebuilds == activity.failures == 0, activity
    print(f"\n{dict(done)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    except KeyboardInterrupt:
        sys.exit(130)
