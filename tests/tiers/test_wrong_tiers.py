"""The suite says of a wrong tier which promise it breaks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BROKEN = {
    "ForgetsStop": "read: stop is asked now and then, and before the first object",
    "LeavesBytes": "read: the region of an object that is MISSING is as it was, or zero",
    "EvictsObjects": r"what goes goes by units: \d+ objects are gone that units need which are still found",
    "IgnoresLayout": "lookup: what was published under another layout is never found",
    "RaisesWhenFull": r"publish raised OSError: \[Errno 28\] No space left on device\.  A tier never raises for what",
    "ChecksNothing": "read: a checksum covers every byte of every payload",
    "SaysItIsThere": "publish: INCOMPLETE when something that needs asks for was neither brought nor is there",
}


def test_each_promise_that_is_broken_is_named() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/tiers/wrong_tiers.py"]
    command += ["-k", "not at_random", "--tb=short"]
    wide = {**os.environ, "COLUMNS": "160"}  # every header in a line of its own
    found = subprocess.run(command, cwd=ROOT, env=wide, capture_output=True, text=True, timeout=300, check=False)
    failed = dict[str, str]()
    for name, text in re.findall(r"\n_+ Test(\w+)\.\w+ _+\n(.*?)(?=\n_{3,} |\n={3,} )", found.stdout, re.DOTALL):
        failed[name] = failed.get(name, "") + text
    assert failed.keys() == BROKEN.keys(), found.stdout[-3000:]
    for name, promise in BROKEN.items():
        assert re.search(promise, failed[name]), f"{name}: {failed[name]}"
