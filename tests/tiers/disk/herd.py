"""Several processes on one directory, killed and started again at random, with the bytes on disk watched."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.tiers.disk.world import MIB

from kvloom.tiers.disk import DiskStore
from kvloom.tiers.disk.checking import disk_usage

CAP = 12 * MIB
INTERRUPTED = 130
"""Exit code of a worker that SIGINT ended."""


@dataclass
class Herd:
    """What happened: operations of all processes, kills, interrupts, and the most bytes on disk among ``samples``."""

    operations: int = 0
    kills: int = 0
    interrupts: int = 0
    ended: int = 0
    samples: int = 0
    most: int = 0


def run(
    directory: Path,
    log: IO[str],
    *,
    kills: int,
    seed: int,
    processes: int = 2,
    steps: int = 400,
    operations: int = 0,
    interrupts: float = 0.0,
) -> Herd:
    """Until so many were killed and so many operations done; ``interrupts``: part of the kills that are SIGINT.

    Raises AssertionError when a process fails by itself, or when the store is not in order afterwards.
    """
    rng, done = random.Random(seed), Herd()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with DiskStore.open(directory, CAP) as store:
        place = store._directory

        def start(number: int) -> subprocess.Popen[str]:
            """Deaf to interrupts until it has imported its modules."""
            command = [sys.executable, "-m", "tests.tiers.disk.worker", str(directory), str(number), str(steps)]
            # Another hash seed for everyone: nothing may depend on it (D12).
            mine = {**environment, "PYTHONHASHSEED": str(number % 1000)}
            root = Path(__file__).parents[3]
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, env=mine, cwd=root)
            finally:
                signal.signal(signal.SIGINT, before)

        herd = [start(seed + i) for i in range(processes)]
        started = processes
        try:
            while done.kills + done.interrupts < kills or done.operations < operations:
                until = time.monotonic() + rng.uniform(0.05, 1.2)
                while time.monotonic() < until:
                    done.most = max(done.most, disk_usage(place))
                    done.samples += 1
                victim = rng.randrange(processes)
                if herd[victim].poll() is not None:
                    assert herd[victim].returncode == 0, "a process failed"
                    done.ended += 1
                elif rng.random() < interrupts:
                    herd[victim].send_signal(signal.SIGINT)
                    assert herd[victim].wait(60) in {0, INTERRUPTED, -signal.SIGINT}, "it did not end in good order"
                    done.interrupts += 1
                else:
                    herd[victim].send_signal(signal.SIGKILL)
                    herd[victim].wait()
                    done.kills += 1
                done.operations = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).count(b".")
                herd[victim] = start(seed + started)
                started += 1
        finally:
            for process in herd:
                process.kill()
                process.wait()
    with DiskStore.open(directory) as store:
        checked = store.verify()
        assert checked.ok, checked
        store.gc()
        contents = store.contents()
        assert contents.on_disk <= contents.in_use <= CAP
        assert contents.extents == len(store._directory.extent_files()), "orphans are left"
    assert done.most <= CAP, f"{done.most} bytes were on disk, the cap is {CAP}"
    return done
