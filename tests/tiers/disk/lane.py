"""Kills one process after the other: ``python -m tests.tiers.disk.lane DIRECTORY``.

Reads lines of JSON that name a scenario, the step at which its process is killed, and whether a reader polls meanwhile;
answers each with what came of it (``Answer``).  It has one thread whenever it forks.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.tiers.disk.companions import Companion, compete, read
from tests.tiers.disk.crashes import check_after, run_child
from tests.tiers.disk.scenarios import SCENARIOS, Scenario


@dataclass(frozen=True)
class Answer:
    """What came of one single: the name of the ``step`` at which it was killed; None when it did not get there.

    ``there``: whole units that were left; ``hits``: those, and one that was published afterwards; ``polls`` and
    ``whole``: of the reader; ``published``: of the rival; ``failed``: what was wrong, if anything.
    """

    step: str | None
    there: int = 0
    hits: int = 0
    polls: int = 0
    whole: int = 0
    published: int = 0
    failed: str = ""


class Lane:
    """Makes stores below ``base``, one at a time."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._reader, self._rival = Companion(read), Companion(compete)

    def single(self, scenario: Scenario, at: int | None, *, reader: bool) -> Answer:
        """Kill one process and look at what is left.  Raises AssertionError, and leaves the store where it is."""
        place = self._base / "store"
        self._begin(scenario, place)
        assert threading.active_count() == 1
        # In this order: the reader looks once more when nobody writes.
        companions = [self._rival] * scenario.rival + [self._reader] * reader
        for companion in companions:
            companion.begin(place, scenario)
        told: dict[str, Any] = {}
        try:
            crash = run_child(scenario.run, place, at)
        finally:
            for companion in companions:
                told |= companion.end()
        there = check_after(place, scenario, [*crash.said, *told.pop("said", [])])
        shutil.rmtree(place)
        return Answer(crash.step, there, there + 1, **told)

    def _begin(self, scenario: Scenario, place: Path) -> None:
        if scenario.prepare is None:
            place.mkdir(mode=0o700)
            return
        ready = self._base / f"begin-{scenario.name}"
        if not ready.exists():
            scenario.prepare(ready)
        shutil.copytree(ready, place)

    def close(self) -> None:
        """End the companions; the later one first, as it has the pipes of the earlier one as well."""
        self._rival.close()
        self._reader.close()


def main(base: Path) -> int:
    """0 when all was in order."""
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks is interrupted, and then nobody asks any more
    base.mkdir(mode=0o700)
    lane, failed = Lane(base), False
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = lane.single(SCENARIOS[asked["scenario"]], asked["step"], reader=asked["reader"])
        except Exception:  # told to whoever asked, who ends the run
            answer, failed = Answer(None, failed=traceback.format_exc()), True
        print(json.dumps(asdict(answer)), flush=True)
        if failed:
            break
    lane.close()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(os.path.abspath(sys.argv[1]))))  # noqa: PTH100
