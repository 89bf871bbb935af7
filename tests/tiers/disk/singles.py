"""Many processes, each killed at a step of its own, several of them at a time."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from tests.tiers.disk.crashes import names_of
from tests.tiers.disk.lane import Answer
from tests.tiers.disk.scenarios import SCENARIOS

ROOT = Path(__file__).parents[3]


def cores() -> int:
    """Of those that this process may use."""
    return len(os.sched_getaffinity(0))


def environment(seed: int) -> dict[str, str]:
    """For a process of ours: it has one thread where it does not ask for more, and a hash seed of its own."""
    paths = os.pathsep.join(path for path in sys.path if path)
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**os.environ, **one, "PYTHONPATH": paths, "PYTHONHASHSEED": str(seed % 1000)}


@dataclass(frozen=True)
class Moment:
    """Where a process is killed."""

    scenario: str
    step: int | None
    reader: bool

    @property
    def again(self) -> str:
        """The command that kills it there once more."""
        reader = "" if self.reader else " --no-reader"
        return f"python -m tests.tiers.disk.long --scenario {self.scenario} --step {self.step}{reader}"


class SingleError(AssertionError):
    """A store was not in order after a process was killed."""


@dataclass
class Tally:
    """What came of all of them; ``early``: those that ended before they got to their moment.

    ``hits``: whole units afterwards; ``found``: how often how many of them were there before more was published.
    """

    early: int = 0
    hits: int = 0
    polls: int = 0
    whole: int = 0
    with_reader: int = 0
    published: int = 0
    scenarios: Counter[str] = field(default_factory=Counter)
    found: Counter[tuple[str, int]] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    moments: Counter[tuple[str, int | None]] = field(default_factory=Counter)

    @property
    def kills(self) -> int:
        """How many were killed."""
        return self.scenarios.total()

    def add(self, moment: Moment, answer: Answer) -> None:
        """Count one."""
        self.polls, self.whole = self.polls + answer.polls, self.whole + answer.whole
        self.published += answer.published
        if answer.step is None:
            self.early += 1
            return
        self.hits += answer.hits
        self.found[moment.scenario, answer.there] += 1
        self.with_reader += moment.reader
        self.scenarios[moment.scenario] += 1
        self.steps[answer.step.removeprefix("after ")] += 1
        self.moments[moment.scenario, moment.step] += 1


def all_moments(base: Path) -> list[tuple[str, int]]:
    """Every step of every scenario; makes their stores below ``base``."""
    return [
        (name, step) for name, scenario in SCENARIOS.items() for step in range(len(names_of(scenario, base / name)))
    ]


def dealt(moments: list[tuple[str, int]], rng: random.Random) -> Iterator[Moment]:
    """All of them in a random order, then in another, and so on; a reader looks on at every second time, roughly."""
    while True:
        for name, step in rng.sample(moments, len(moments)):
            yield Moment(name, step, rng.random() < 0.5)


class Lanes:
    """Processes that kill processes (``lane``)."""

    def __init__(self, base: Path, count: int, seed: int = 0) -> None:
        def start(number: int) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "tests.tiers.disk.lane", str(base / f"lane{number}")]
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment(seed + number),
                cwd=ROOT,
            )

        self._lanes = [start(number) for number in range(count)]
        self._base, self._running = base, 0

    def run(self, moments: Iterable[Moment], tally: Tally, kills: int | None = None) -> None:
        """Until ``tally`` has so many kills, or there are no more moments.  Raises SingleError."""
        lock, waiting, ended = threading.Lock(), iter(moments), threading.Event()

        def drive(lane: subprocess.Popen[str]) -> None:
            while True:
                with lock:
                    # Those that are on their way count as well.
                    enough = ended.is_set() or (kills is not None and tally.kills + self._running >= kills)
                    moment = None if enough else next(waiting, None)
                    if moment is None:
                        return
                    self._running += 1
                answer = None
                try:
                    answer = self._ask(lane, moment)
                finally:
                    with lock:
                        self._running -= 1
                        if answer is not None:
                            tally.add(moment, answer)

        with ThreadPoolExecutor(len(self._lanes)) as pool:
            try:
                for done in as_completed([pool.submit(drive, lane) for lane in self._lanes]):
                    done.result()
            finally:
                ended.set()

    def _ask(self, lane: subprocess.Popen[str], moment: Moment) -> Answer:
        assert lane.stdin is not None
        assert lane.stdout is not None
        lane.stdin.write(json.dumps(vars(moment)) + "\n")
        lane.stdin.flush()
        line = lane.stdout.readline()
        answer = Answer(**json.loads(line)) if line else Answer(None, failed="the lane ended")
        if answer.failed:
            raise SingleError(f"{answer.failed}\nits store is below {self._base}\nonce more: {moment.again}")
        return answer

    def close(self) -> None:
        """End them."""
        for lane in self._lanes:
            assert lane.stdin is not None
            lane.stdin.close()
        for lane in self._lanes:
            lane.wait()
            assert lane.stdout is not None
            lane.stdout.close()
