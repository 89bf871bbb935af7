"""SIGKILL at every change of files and index, and inside writes, with somebody reading (D3)."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiers.disk.conftest import MEMORY
from tests.tiers.disk.crashes import check_after, names_of
from tests.tiers.disk.scenarios import CAP, LARGE, SCENARIOS, units
from tests.tiers.disk.singles import Lanes, Moment, Tally, all_moments, cores, dealt
from tests.tiers.disk.world import wrong_bytes

from kvloom.tiers.disk import DiskStore

ROOT = Path(__file__).parents[3]
SWEEPS = (
    ("filling", 2, False),
    ("rolling", 11, False),
    ("evicting", 17, False),
    ("collecting", 19, False),
    ("clearing", 4, False),
    ("filling", 9, True),
    ("rolling", 29, True),
    ("evicting", 61, True),
    ("collecting", 43, True),
    ("clearing", 17, True),
    ("competing", 13, True),
    ("crowding", 23, True),
)
"""Scenario, every how many steps a process is killed, and whether a reader polls meanwhile."""


@pytest.fixture(scope="module")
def lanes() -> Iterator[Lanes]:
    """As many singles at a time as there are cores."""
    base = Path(tempfile.mkdtemp(prefix="kvloom-test-", dir=MEMORY if MEMORY.is_dir() else None))
    made = Lanes(base, cores())
    yield made
    made.close()
    shutil.rmtree(base)


@pytest.mark.parametrize(("name", "every", "reader"), SWEEPS)
def test_d3_killed_at_every_change(lanes: Lanes, fast_path: Path, name: str, every: int, reader: bool) -> None:
    steps = names_of(SCENARIOS[name], fast_path / "dry")
    moments, tally = [Moment(name, at, reader) for at in range(0, len(steps), every)], Tally()
    lanes.run(moments, tally)
    assert tally.kills > 10
    if reader:
        # With others at the store it has fewer or more steps each time.
        assert tally.early < len(moments) / 2
        assert tally.polls > tally.whole > 0
    else:
        assert tally.kills == len(moments)
        assert tally.hits > tally.kills
    if (name, reader) == ("filling", False):
        assert {there for _name, there in tally.found} == set(range(7))


def test_d3_all_steps_come_before_any_comes_again(fast_path: Path) -> None:
    moments = all_moments(fast_path)
    assert {name for name, _step in moments} == set(SCENARIOS)
    begun = dealt(moments, random.Random(1))
    for _ in range(2):
        assert {(moment.scenario, moment.step) for _, moment in zip(moments, begun, strict=False)} == set(moments)


def test_d3_what_is_wrong_is_found_and_told(fast_path: Path) -> None:
    """The checks themselves: a byte that is flipped, and a unit that was published and is gone."""
    scenario = SCENARIOS["filling"]
    names_of(scenario, fast_path / "s")
    assert check_after(fast_path / "s", scenario, list(range(scenario.count))) == scenario.count
    with DiskStore.open(fast_path / "s") as store:
        assert store.clear(scenario.world.layout, scenario.units[1].root) == scenario.count // 2
    with pytest.raises(AssertionError, match="unit 1 was published and is not there"):
        check_after(fast_path / "s", scenario, [1])
    for extent in (fast_path / "s" / "extents").iterdir():
        data = bytearray(extent.read_bytes())
        data[len(data) // 2] ^= 1
        extent.write_bytes(data)
    with pytest.raises(AssertionError):
        check_after(fast_path / "s", scenario, [])


@pytest.mark.parametrize("call", ["fallocate", "pwrite64", "fdatasync", "fsync", "ftruncate", "unlink", "rename"])
def test_d3_killed_inside_system_calls(fast_path: Path, call: str) -> None:
    """The same with the calls that SQLite makes inside a commit or checkpoint."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    code = (
        "import sys; from pathlib import Path; from kvloom.tiers.disk import FileOps\n"
        "from tests.tiers.disk.scenarios import evicting\n"
        "evicting(Path(sys.argv[1]), FileOps(), lambda n: None)"
    )
    names = "unlink,unlinkat" if call == "unlink" else "rename,renameat,renameat2" if call == "rename" else call
    killed = 0
    for when in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89):
        directory = fast_path / f"at{when}"
        inject = f"inject={names}:signal=SIGKILL:when={when}"
        command = [strace, "-f", "-qq", "-o", str(fast_path / "log"), "-e", f"trace={names}", "-e", inject]
        command += [sys.executable, "-c", code, str(directory)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, timeout=60, check=False)
        if done.returncode == 0:
            break
        assert done.returncode in {-signal.SIGKILL, 128 + signal.SIGKILL}, done.stderr
        killed += 1
        if directory.exists():
            check_after(directory, SCENARIOS["evicting"], [])
    assert killed
    assert CAP


def test_a_reader_that_is_in_the_middle_keeps_what_it_reads(fast_path: Path) -> None:
    """An extent is not removed while somebody reads it."""
    with DiskStore.open(fast_path / "s", CAP) as store, DiskStore.open(fast_path / "s") as other:
        made = units(LARGE, 14)
        assert store.publish(made[0]).stored
        places = store.lookup(made[0].layout, made[0].digests).places
        with other._reader._pins.hold(set(places.entries["extent"].tolist())):
            for unit in made[1:]:
                store.publish(unit)
            assert not store.lookup(made[0].layout, made[0].digests).boundary[-1]
            assert wrong_bytes(other, places) == 0
            assert other.read_each(places, lambda _i, _data: None).ok
        store.gc()
        assert wrong_bytes(other, places) == 0
