"""SIGKILL at every change of files and index, and inside writes, with somebody reading (D3)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.tiers.disk.crashes import (
    CAP,
    LARGE,
    SMALL,
    Say,
    check_after,
    clearing,
    count_steps,
    evicting,
    filling,
    run_child,
    units,
)
from tests.tiers.disk.faults import CountingOps
from tests.tiers.disk.world import MIB, wrong_bytes

from kvloom.tiers.disk import DiskStore

POLL = """
import sys
from tests.tiers.disk.crashes import SMALL, units
from tests.tiers.disk.world import hit
from kvloom.errors import StoreError
from kvloom.tiers.disk import DiskStore

made, polls = units(SMALL, 6), 0
print("ready", flush=True)
for line in sys.stdin:
    try:
        store = DiskStore.open(line.strip(), 64 << 20)
    except StoreError as error:
        print("gone", error, flush=True)
        continue
    while store.lookup(made[0].layout, made[0].digests) is not None and (store._directory.path / "KVLOOM").exists():
        for unit in made:
            whole = hit(store, SMALL, unit)
            assert whole or not store.lookup(unit.layout, unit.digests).boundary[-1] or hit(store, SMALL, unit)
            polls += 1
        if (store._directory.path.parent / "stop").exists():
            break
    store.close()
    print("polled", polls, flush=True)
"""


def sweep(scenario: Callable[[Path, CountingOps, Say], None], path: Path, every: int) -> Iterator[tuple[int, Path]]:
    """A killed store for every ``every``-th change."""
    names = count_steps(scenario, path / "dry")
    assert len(names) > 50
    for at in range(0, len(names), every):
        directory = path / f"at{at}"
        directory.mkdir(mode=0o700)
        yield at, directory
        shutil.rmtree(directory)


def test_d3_killed_while_filling(fast_path: Path) -> None:
    points, found = 0, set()
    for at, directory in sweep(filling, fast_path, 2):
        crash = run_child(filling, directory, at)
        assert crash.killed
        found.add(check_after(directory, SMALL, units(SMALL, 6), crash.done))
        points += 1
    assert points > 80
    assert found == set(range(7))


def test_d3_killed_while_evicting_and_compacting(fast_path: Path) -> None:
    points = 0
    for at, directory in sweep(evicting, fast_path, 17):
        assert run_child(evicting, directory, at).killed
        check_after(directory, LARGE, units(LARGE, 14), [])
        points += 1
    assert points > 30


def test_d3_killed_while_clearing(fast_path: Path) -> None:
    points = 0
    for at, directory in sweep(clearing, fast_path, 4):
        assert run_child(clearing, directory, at).killed
        check_after(directory, SMALL, units(SMALL, 6), [])
        points += 1
    assert points > 30


def test_d3_with_a_reader_polling(fast_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", POLL]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[3],
    ) as poller:
        assert poller.stdin is not None
        assert poller.stdout is not None
        try:
            assert poller.stdout.readline() == "ready\n"
            total = len(count_steps(filling, fast_path / "dry"))
            polls = 0
            for at in range(total // 3, total, 9):
                place = fast_path / f"at{at}"
                place.mkdir()
                DiskStore.open(place / "store", 64 * MIB).close()
                poller.stdin.write(f"{place / 'store'}\n")
                poller.stdin.flush()
                run_child(filling, place / "store", at)
                (place / "stop").touch()
                said = poller.stdout.readline().split()
                assert said[0] == "polled", said
                polls = int(said[1])
            assert polls > 100
        finally:
            poller.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("call", ["fallocate", "pwrite64", "fdatasync", "fsync", "ftruncate", "unlink", "rename"])
def test_d3_killed_inside_system_calls(fast_path: Path, call: str) -> None:
    """The same with the calls that SQLite makes inside a commit or checkpoint."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    code = (
        "import sys; from pathlib import Path; from kvloom.tiers.disk import FileOps\n"
        "from tests.tiers.disk.crashes import evicting\n"
        "evicting(Path(sys.argv[1]), FileOps(), lambda n: None)"
    )
    names = "unlink,unlinkat" if call == "unlink" else "rename,renameat,renameat2" if call == "rename" else call
    killed = 0
    for when in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89):
        directory = fast_path / f"at{when}"
        inject = f"inject={names}:signal=SIGKILL:when={when}"
        command = [strace, "-f", "-qq", "-o", str(fast_path / "log"), "-e", f"trace={names}", "-e", inject]
        command += [sys.executable, "-c", code, str(directory)]
        done = subprocess.run(
            command, env=environment, cwd=Path(__file__).parents[3], capture_output=True, timeout=60, check=False
        )
        if done.returncode == 0:
            break
        assert done.returncode in {-signal.SIGKILL, 128 + signal.SIGKILL}, done.stderr
        killed += 1
        if directory.exists():
            check_after(directory, LARGE, units(LARGE, 14), [])
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
