"""The long differential run: ``python -m tests.core.long --steps 100000``.

Every world lives many lives of a thousand steps, under every policy or one, each from its own seed; the first
difference between the core and the reference ends the run with the seed and the last operations.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from tests.core.differential import DifferentError, Life
from tests.core.worlds import WORLDS

from kvloom.eviction import POLICIES

STEPS_PER_LIFE = 1000


def main() -> int:
    """0 when no step differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--policy", choices=["all", *POLICIES], default="all", help="all: one life after the other")
    arguments = parser.parse_args()
    policies = POLICIES if arguments.policy == "all" else (arguments.policy,)
    begun = time.monotonic()
    done, hits, errors = 0, 0, 0
    for seed in itertools.count(arguments.seed):
        for world, policy in itertools.product(WORLDS, policies):
            steps = min(STEPS_PER_LIFE, arguments.steps - done)
            if steps == 0:
                print(f"{done} steps, {hits} hits, {errors} refusals, no difference, {time.monotonic() - begun:.0f} s")
                return 0
            life = Life(world, seed, policy)
            try:
                life.run(steps)
            except DifferentError as error:
                print(error)
                return 1
            done, hits, errors = done + steps, hits + sum(life.hits[1:]), errors + life.errors
        print(f"{done} steps, {hits} hits, {errors} refusals, {time.monotonic() - begun:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
