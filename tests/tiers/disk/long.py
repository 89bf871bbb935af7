"""The long runs of the disk store: ``python -m tests.tiers.disk.long --kills 10000``.

Half of the kills go to single processes (``singles``), each at a step of its own: every step of every scenario once, in
a random order, then again.  Half go to a herd of processes (``herd``) at any time, in a store from which units have to
go and, at every second time, in one that keeps them all.  A reader polls the stores of all herds and of half the
singles.

With ``--operations 10000 --processes 2`` there is only a herd, until it has done that much; a third of those that end
before their time are interrupted (SIGINT), the others killed.  With ``--scenario NAME --step N`` there is one single.

Whatever is wrong ends the run: it tells what, where the store is, and how to do it once more.
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
from collections import Counter
from pathlib import Path

from tests.tiers.disk import herd
from tests.tiers.disk.scenarios import SCENARIOS
from tests.tiers.disk.singles import Lanes, Moment, SingleError, Tally, all_moments, cores, dealt

AT_ONCE = 50
PACE = herd.Pace(0.01, 0.4, (3, 120))
PROCESSES = 3


def main() -> int:
    """0 when the store was in order after every kill, 1 when it was not, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=None, help="where the stores lie (default: a temporary one)")
    parser.add_argument("--lanes", type=int, default=cores(), help="singles at a time (default: as many as cores)")
    parser.add_argument("--operations", type=int, default=0, help="only a herd, for so many operations")
    parser.add_argument("--processes", type=int, default=2, help="of that herd")
    parser.add_argument("--scenario", choices=list(SCENARIOS), help="only one single of this scenario ...")
    parser.add_argument("--step", type=int, help="... killed at this step")
    parser.add_argument("--no-reader", action="store_true", help="nobody reads meanwhile")
    parser.add_argument("--plan", choices=list(herd.PLANS), help="only a herd of so many kills in a new store")
    arguments = parser.parse_args()
    if arguments.kills < 1 or arguments.lanes < 1 or arguments.processes < 1 or arguments.operations < 0:
        parser.error("--kills, --lanes and --processes are at least 1, --operations at least 0")
    logging.disable(logging.WARNING)
    base = Path(tempfile.mkdtemp(prefix="kvloom-long-", dir=arguments.directory))
    try:
        if arguments.operations:
            only_herd(base, arguments.operations, arguments.processes, arguments.seed)
        elif arguments.scenario:
            one(base, Moment(arguments.scenario, arguments.step, not arguments.no_reader))
        elif arguments.plan:
            print(said_of(drive(base, arguments.kills, arguments.seed, arguments.plan)))
        else:
            run(base, arguments.kills, arguments.seed, arguments.lanes)
    except AssertionError as error:
        print(f"{error}\nwhat it left is in {base}", file=sys.stderr)
        if not isinstance(error, SingleError):
            raise
        return 1
    except KeyboardInterrupt:
        shutil.rmtree(base, ignore_errors=True)
        return herd.INTERRUPTED
    shutil.rmtree(base)
    return 0


def run(base: Path, kills: int, seed: int, count: int) -> None:
    """Singles and herds in turn.  Raises AssertionError."""
    rng, begun = random.Random(seed), time.monotonic()
    (base / "steps").mkdir()
    moments = all_moments(base / "steps")
    shutil.rmtree(base / "steps")
    tally, all_herds, waiting = Tally(), herd.Herd(), dealt(moments, rng)
    lanes = Lanes(base, count, seed)
    try:
        for turn in itertools.count():
            lanes.run(waiting, tally, min(tally.kills + AT_ONCE, kills - all_herds.kills))
            more = min(AT_ONCE, kills - tally.kills - all_herds.kills)
            if more > 0:
                plan = list(herd.PLANS)[turn % len(herd.PLANS)]
                all_herds.add(drive(base, more, seed + 1000 * turn, plan))
            done, seconds = tally.kills + all_herds.kills, time.monotonic() - begun
            print(
                f"{done} kills, {all_herds.operations} operations of the herd, {len(tally.moments)} of {len(moments)} "
                f"steps, {seconds:.0f} s, seed {seed}",
                flush=True,
            )
            if done >= kills:
                break
    finally:
        lanes.close()
    print(summary(tally, all_herds, len(moments), seed, time.monotonic() - begun))


def drive(base: Path, kills: int, seed: int, plan: str) -> herd.Herd:
    """A herd in the store of its plan; a new one where nothing goes."""
    place = base / plan
    if herd.PLANS[plan].keeps and place.exists():
        shutil.rmtree(place)
    with (base / "log").open("w+") as log:
        try:
            return herd.run(place, log, kills=kills, seed=seed, processes=PROCESSES, pace=PACE, plan=plan)
        except AssertionError as error:
            again = f"python -m tests.tiers.disk.long --plan {plan} --seed {seed} --kills {kills}"
            raise AssertionError(f"{error}\nwhat they said is in {base / 'log'}\nonce more: {again}") from error


def summary(tally: Tally, herds: herd.Herd, steps: int, seed: int, seconds: float) -> str:
    """What was done and found, line by line; whatever was wrong has ended the run before."""
    least = min(tally.moments.values(), default=0)
    each = f", each {least} times or more" if len(tally.moments) == steps else ""
    rivals = sum(tally.scenarios[name] for name, scenario in SCENARIOS.items() if scenario.rival)
    return (
        f"{tally.kills + herds.kills} kills in one run of {seconds:.0f} s, seed {seed}: wrong bytes 0, published units "
        f"lost 0, {tally.hits + herds.hits} whole units read after kills\n"
        f"  singles: {tally.kills} kills at {len(tally.moments)} of {steps} steps{each}; "
        f"{tally.with_reader} with a reader, {rivals} with a rival; {tally.early} more ended before their step\n"
        f"    by scenario: {_counts(tally.scenarios)}\n"
        f"    by step: {_counts(tally.steps)}\n"
        f"  herds of {PROCESSES}: {said_of(herds)}\n"
        f"  readers: {tally.polls + herds.polls} units polled, {tally.whole + herds.whole} of them whole, every byte "
        "compared"
    )


def said_of(done: herd.Herd) -> str:
    """Of herds."""
    together = ", ".join(f"{done.together[n]} times {n} at once" for n in sorted(done.together))
    return (
        f"{done.kills} kills ({together}), {done.operations} operations, {done.ended} ended by themselves, "
        f"{done.fresh} were fresh interpreters, {done.kept} published units were to be there and were, at most "
        f"{done.most_of_cap:.3f} of the cap on disk in {done.samples} samples"
    )


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def one(base: Path, moment: Moment) -> None:
    """Kill one process.  Raises SingleError."""
    tally, lanes = Tally(), Lanes(base, 1)
    try:
        lanes.run([moment], tally, 1)
    finally:
        lanes.close()
    end = f"was killed at {next(iter(tally.steps))!r}" if tally.kills else "ended before that step"
    print(f"{moment.scenario} {end}; the store is in order, {tally.hits} units are there")


def only_herd(base: Path, operations: int, processes: int, seed: int) -> None:
    """Until so many operations are done.  Raises AssertionError."""
    begun = time.monotonic()
    with (base / "log").open("w+") as log:
        done = herd.run(
            base / "herd", log, kills=2, seed=seed, processes=processes, operations=operations, interrupts=1 / 3
        )
    print(
        f"{done.operations} operations of {processes} processes, {done.kills} killed, {done.interrupts} interrupted, "
        f"{done.ended} ended; {done.polls} polls of a reader; at most {done.most_of_cap:.3f} of the cap on disk in "
        f"{done.samples} samples, verified clean, {time.monotonic() - begun:.0f} s, seed {seed}"
    )


if __name__ == "__main__":
    sys.exit(main())
