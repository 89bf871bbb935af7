"""A publication that SQLite's log has and that nobody sees, until the log is read anew (D3).

A process that is killed after its commit is in the log, and before it is told to others in the memory that they share,
leaves one.  Who takes its extent over meanwhile must not cut away what comes to light later.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.tiers.disk.scenarios import SMALL, units
from tests.tiers.disk.world import hit

from kvloom.tiers.disk import DiskStore

ROOT = Path(__file__).parents[3]
BEGIN = """
import os, signal, sys
from pathlib import Path
from tests.tiers.disk.scenarios import SMALL, units
from kvloom.tiers.disk import DiskStore, FileOps

def say(what):
    print(what, flush=True)
    sys.stdin.readline()

class Ends(FileOps):
    def truncate(self, fd, size):
        super().truncate(fd, size)
        os.kill(os.getpid(), signal.SIGKILL)

store = DiskStore.open(sys.argv[1], ops=Ends() if sys.argv[2:] else None)
"""
HOLDS = 'store.contents(); say("open")'
PUBLISHES = """
for unit in units(SMALL, 2):
    assert store.publish(unit).stored
    say("published")
"""


@contextmanager
def running(code: str, store: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs it and has said its first word; it is killed in the end."""
    command = [sys.executable, "-c", BEGIN + code, str(store)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            heard(process)
            yield process
        finally:
            process.kill()


def heard(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline(), "it ended"


def told(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_d3_what_comes_to_light_later_was_not_cut_away(fast_path: Path) -> None:
    place, made = fast_path / "s", units(SMALL, 2)
    DiskStore.open(place, 64 << 20).close()
    with running(HOLDS, place):
        shared = next(place.glob("index-*.sqlite-shm"))
        with running(PUBLISHES, place) as writer:
            before = shared.read_bytes()
            told(writer)
            heard(writer)
            writer.kill()
            writer.wait()
        with shared.open("r+b") as file:
            file.write(before)
        command = [sys.executable, "-c", BEGIN, str(place), "ends"]
        opened = subprocess.run(command, cwd=ROOT, timeout=60, check=False)
        assert opened.returncode == -signal.SIGKILL, "it took the extent over and cut it"
    with DiskStore.open(place) as store:
        assert hit(store, SMALL, made[0])
        found = store.lookup(made[1].layout, made[1].digests)
        assert hit(store, SMALL, made[1]) == bool(found.boundary[-1])
        assert store.verify().ok
        assert store.publish(made[1]).stored
        assert hit(store, SMALL, made[1])
