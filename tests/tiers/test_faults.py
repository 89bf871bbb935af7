"""The tier that fails as planned does what it is told, and nothing that the contract forbids."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from kvloom.testing.faults import FaultyTier, Plan
from kvloom.testing.units import LAYOUT, MIB, World, fetch, hit, tokens_of, wrong
from kvloom.tiers.host import HostStore
from kvloom.tiers.values import Outcome, Result

WORLD = World()
UNIT = WORLD.unit(tokens_of(1, 3))


def tier(plan: Plan) -> FaultyTier:
    return FaultyTier(HostStore(8 * MIB), plan)


def test_the_nth_object_fails_as_planned() -> None:
    made = tier(Plan(objects={1: Result.IO_ERROR, 4: Result.INTEGRITY, 9: Result.MISSING}))
    made.publish(UNIT)
    places = made.lookup(LAYOUT, UNIT.digests).places
    assert len(places) == 9
    got, done = fetch(made, places)
    assert wrong(places, got, done.results) == 0
    assert done.results.tolist() == [0, 2, 0, 0, 1, 0, 0, 0, 0]
    assert fetch(made, places)[1].results.tolist() == [3] + [0] * 8
    assert fetch(made, places)[1].ok
    assert made.done == {"io_error": 1, "integrity": 1, "missing": 1}


def test_chances_follow_from_the_seed() -> None:
    def results(seed: int) -> list[int]:
        made = tier(Plan(rates={Result.IO_ERROR: 0.3}, seed=seed))
        made.publish(UNIT)
        places = made.lookup(LAYOUT, UNIT.digests).places
        return [int(code) for _ in range(5) for code in fetch(made, places)[1].results]

    assert results(1) == results(1) != results(2)
    assert 0 < sum(code == Result.IO_ERROR for code in results(1)) < 30


def test_a_read_hangs_until_it_is_released_or_stopped() -> None:
    made = tier(Plan(hang_reads=frozenset({0, 1})))
    made.publish(UNIT)
    places = made.lookup(LAYOUT, UNIT.digests).places
    into, offsets = np.zeros(int(places.nbytes), np.uint8), np.zeros(len(places), np.int64)
    ends = time.monotonic() + 0.05
    assert (made.read(places, into, offsets, lambda: time.monotonic() > ends).results == Result.STOPPED).all()
    hits: list[bool] = []
    thread = threading.Thread(target=lambda: hits.append(hit(made, WORLD, UNIT)))
    thread.start()
    assert made.hanging.wait(10)
    assert not hits
    made.release()
    thread.join(10)
    assert hits == [True]


@pytest.mark.parametrize("plan", [Plan(seconds_per_read=0.2), Plan(seconds_per_byte=0.2 / 44_000)])
def test_reads_are_slow_and_can_be_stopped(plan: Plan) -> None:
    made = tier(plan)
    made.publish(UNIT)
    places = made.lookup(LAYOUT, UNIT.digests).places
    begin = time.monotonic()
    assert fetch(made, places)[1].ok
    assert time.monotonic() - begin >= 0.15
    begin = time.monotonic()
    into, offsets = np.zeros(int(places.nbytes), np.uint8), np.zeros(len(places), np.int64)
    assert (made.read(places, into, offsets, lambda: True).results == Result.STOPPED).all()
    assert time.monotonic() - begin < 0.15


def test_publications_are_lost_refused_and_hidden() -> None:
    made = tier(Plan(lose=frozenset({0}), refuse={1: Outcome.NO_ROOM}, hide=frozenset({2})))
    assert made.publish(UNIT).stored
    assert not hit(made, WORLD, UNIT)
    assert made.publish(UNIT).outcome is Outcome.NO_ROOM
    assert not hit(made, WORLD, UNIT)
    assert made.publish(UNIT).outcome is Outcome.PUBLISHED
    assert not hit(made, WORLD, UNIT)
    assert hit(made, WORLD, UNIT)
    assert made.done == {"lost": 1, "refused": 1, "hidden": 1}


def test_faults_and_units_need_neither_pytest_nor_hypothesis() -> None:
    code = "import sys, kvloom.testing, kvloom.testing.faults, kvloom.testing.units; "
    code += "print(sorted({'pytest', 'hypothesis'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
