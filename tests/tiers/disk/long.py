"""The long runs of the disk store: ``python -m tests.tiers.disk.long --kills 10000``.

Half of the kills go to single processes at a chosen change of files or index, half to a herd of processes at any time.
With ``--operations 10000 --processes 2`` there is only a herd, until it has done that much; a third of those that end
before their time are interrupted (SIGINT), the others killed.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.tiers.disk import herd
from tests.tiers.disk.crashes import (
    LARGE,
    SMALL,
    check_after,
    clearing,
    count_steps,
    evicting,
    filling,
    run_child,
    units,
)

SCENARIOS = ((filling, SMALL, 6), (evicting, LARGE, 14), (clearing, SMALL, 6))
AT_ONCE = 50


def main() -> int:
    """0 when the store was in order after every kill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=None, help="where the stores lie (default: a temporary one)")
    parser.add_argument("--operations", type=int, default=0, help="only a herd, for so many operations")
    parser.add_argument("--processes", type=int, default=2, help="of that herd")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    base = Path(tempfile.mkdtemp(prefix="kvloom-long-", dir=arguments.directory))
    if arguments.operations:
        return only_herd(base, arguments.operations, arguments.processes, arguments.seed)
    rng, begun, kills, operations, most = random.Random(arguments.seed), time.monotonic(), 0, 0, 0
    steps = [len(count_steps(scenario, base / f"dry{i}")) for i, (scenario, _, _) in enumerate(SCENARIOS)]
    for turn in itertools.count():
        for _ in range(min(AT_ONCE, arguments.kills - kills)):
            which = rng.randrange(len(SCENARIOS))
            scenario, world, count = SCENARIOS[which]
            place = base / "single"
            place.mkdir(mode=0o700)
            crash = run_child(scenario, place, rng.randrange(steps[which]))
            check_after(place, world, units(world, count), crash.done if scenario is filling else [])
            kills += crash.killed
            shutil.rmtree(place)
        log = base / "log"
        with log.open("w+") as file:
            more = min(AT_ONCE, arguments.kills - kills)
            done = herd.run(base / "herd", file, kills=more, seed=arguments.seed + 1000 * turn, processes=3)
            file.seek(0)
            operations += file.read().count(".")
        kills, most = kills + done.kills, max(most, done.most)
        seconds = time.monotonic() - begun
        print(
            f"{kills} kills, {operations} operations of the herd, at most {most / herd.CAP:.3f} of the cap on disk, "
            f"{seconds:.0f} s, seed {arguments.seed}",
            flush=True,
        )
        if kills >= arguments.kills:
            break
    shutil.rmtree(base)
    return 0


def only_herd(base: Path, operations: int, processes: int, seed: int) -> int:
    """0 when the store was in order all along."""
    begun = time.monotonic()
    with (base / "log").open("w+") as log:
        done = herd.run(
            base / "herd", log, kills=2, seed=seed, processes=processes, operations=operations, interrupts=1 / 3
        )
    print(
        f"{done.operations} operations of {processes} processes, {done.kills} killed, {done.interrupts} interrupted, "
        f"{done.ended} ended; at most {done.most / herd.CAP:.3f} of the cap on disk in {done.samples} samples, "
        f"verified clean, {time.monotonic() - begun:.0f} s, seed {seed}"
    )
    shutil.rmtree(base)
    return 0


if __name__ == "__main__":
    sys.exit(main())
