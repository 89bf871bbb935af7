"""Processes beside the one that is killed: a reader that polls the store all along, and a rival that writes to it.

A companion is forked once, before its parent opens any store, and does one job after the other.
"""

from __future__ import annotations

import json
import os
import select
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tiers.disk.scenarios import SCENARIOS, Scenario
from tests.tiers.disk.world import hit

from kvloom.errors import InputError, StoreError
from kvloom.tiers.disk import DiskStore, Outcome

PAUSE = 0.001
"""Seconds between two polls: the processors are for those that write."""
AFTERWARDS = 2
"""Units that a rival publishes after the other one was killed."""

Stop = Callable[[], bool]
Told = dict[str, Any]
Job = Callable[[Path, Scenario, Stop], Told]


class CompanionError(AssertionError):
    """A companion found that something was wrong."""


class Companion:
    """A process that does ``job`` whenever it is told to, until it is told to stop."""

    def __init__(self, job: Job) -> None:
        (theirs, self._requests), (self._answers, answers) = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._requests)
            os.close(self._answers)
            _work(job, theirs, answers)
        os.close(theirs)
        os.close(answers)
        self._reading = os.fdopen(self._answers, "rb")

    def begin(self, directory: Path, scenario: Scenario) -> None:
        """Begin the job."""
        os.write(self._requests, f"{directory}\0{scenario.name}\n".encode())

    def end(self) -> Told:
        """Stop it; what it tells.  Raises CompanionError."""
        os.write(self._requests, b"s")
        line = self._reading.readline()
        told: Told = json.loads(line) if line else {"failed": "it ended"}
        if "failed" in told:
            raise CompanionError(told["failed"])
        return told

    def close(self) -> None:
        """End the process."""
        os.close(self._requests)
        self._reading.close()
        os.waitpid(self._pid, 0)


def _work(job: Job, requests: int, answers: int) -> None:
    """The companion's part; does not come back."""
    code = 1
    try:
        asked = os.fdopen(requests, "rb", buffering=0)
        while line := asked.readline():
            directory, _, name = line.decode().strip().partition("\0")

            def stop() -> bool:
                return bool(select.select([requests], [], [], 0)[0])

            try:
                told = job(Path(directory), SCENARIOS[name], stop)
            except Exception:  # whatever it is, the one who waits has to hear of it
                told = {"failed": traceback.format_exc()}
            while not stop():
                time.sleep(PAUSE)
            asked.read(1)
            os.write(answers, json.dumps(told).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)


def read(directory: Path, scenario: Scenario, stop: Stop) -> Told:
    """Poll every unit in turn and compare all bytes; what is there for good is never gone again.

    Once more after the stop, when whoever wrote is dead: every unit is whole or absent.
    """
    polls = whole = 0
    store = None
    while store is None and not stop():
        try:
            store = DiskStore.open(directory, create=False)
        except (InputError, StoreError):  # there is none yet, or it has no cap yet
            time.sleep(PAUSE)
    if store is None:
        return {"polls": 0, "whole": 0}
    seen = set[int]()
    with store:
        while not stop():
            number = polls % scenario.count
            there = hit(store, scenario.world, scenario.units[number])
            assert there or number not in seen or not scenario.keeps, f"unit {number} was there and is not any more"
            if there:
                seen.add(number)
            polls, whole = polls + 1, whole + there
            time.sleep(PAUSE)
        for number, unit in enumerate(scenario.units):
            there = hit(store, scenario.world, unit)
            assert there == bool(store.lookup(unit.layout, unit.digests).boundary[-1]), f"unit {number} is in pieces"
            assert there or number not in seen or not scenario.keeps, f"unit {number} was there and is not any more"
            polls, whole = polls + 1, whole + there
        _in_order(store)
    return {"polls": polls, "whole": whole}


def compete(directory: Path, scenario: Scenario, stop: Stop) -> Told:
    """Publish units from the other end, again and again, and go on when the other one was killed.

    The first ones are left to the other one, so that it has something to do even when it is late.
    """
    done = afterwards = 0
    numbers = range(scenario.count - 1, scenario.count // 4 - 1, -1)
    said = set[int]()
    with DiskStore.open(directory, scenario.capacity) as store:
        while afterwards < AFTERWARDS:
            afterwards += stop()
            number = numbers[done % len(numbers)]
            unit = scenario.units[number]
            outcome = store.publish(unit).outcome
            assert outcome in {Outcome.PUBLISHED, Outcome.KNOWN, Outcome.NO_ROOM}, (outcome, store.activity())
            assert outcome is not Outcome.NO_ROOM or not scenario.keeps
            if outcome is not Outcome.NO_ROOM:
                said.add(number)
            done += 1
            time.sleep(PAUSE)
        _in_order(store)
    return {"published": done, "said": sorted(said)}


def _in_order(store: DiskStore) -> None:
    activity = store.activity()
    assert activity.integrity == activity.io_errors == activity.quarantined == 0, activity
