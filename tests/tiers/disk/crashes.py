"""A process that is killed at its n-th change of a store, and what has to be true of the store afterwards."""

from __future__ import annotations

import os
import select
import signal
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from tests.tiers.disk.faults import CountingOps, kill_now, statements
from tests.tiers.disk.scenarios import CAP, Run, Scenario
from tests.tiers.disk.world import hit

from kvloom.tiers.disk import DiskStore
from kvloom.tiers.disk.checking import Verified

PATIENCE = 300
"""Seconds that a child may say nothing; counted one by one, as everything may be stopped for longer."""
NAMED = 255


@dataclass
class Crash:
    """How a child ended: the step at which it was killed, if it was, and the units that it ``said`` to be published."""

    step: str | None
    said: list[int] = field(default_factory=list)

    @property
    def killed(self) -> bool:
        """Whether it got to the moment at all."""
        return self.step is not None


def run_child(run: Run, directory: Path, at: int | None) -> Crash:
    """Run a scenario in a child process that is killed at its ``at``-th step; raises when it fails otherwise.

    The calling process has no store open: locks and connections would be the child's as well.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _be_killed(run, directory, at, writer)
    os.close(writer)
    try:
        said = _listen(reader, child, f"the child is stuck at {at}")
    finally:
        os.close(reader)
        _, status = os.waitpid(child, 0)
    told, _, name = said.partition(bytes([NAMED]))
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and bool(name)
    assert killed or (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0), f"the child failed at {at}"
    return Crash(name.decode() if killed else None, list(told))


def _be_killed(run: Run, directory: Path, at: int | None, writer: int) -> None:
    """The child's part; does not come back."""
    code = 1

    def before(number: int, what: str) -> None:
        if number == at:
            os.write(writer, bytes([NAMED]) + what.encode())
            kill_now()

    def say(number: int) -> None:
        if number >= 0:
            os.write(writer, bytes([number]))

    try:
        ops = CountingOps(before)
        with statements(ops.step):
            run(directory, ops, say)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _listen(reader: int, child: int, stuck: str) -> bytes:
    """All that a child says until it ends."""
    said = b""
    for _ in range(PATIENCE):
        while select.select([reader], [], [], 1.0)[0]:
            more = os.read(reader, 4096)
            if not more:
                return said
            said += more
    os.kill(child, signal.SIGKILL)
    raise AssertionError(stuck)


def count_steps(run: Run, directory: Path) -> list[str]:
    """Names of all steps of a scenario."""
    ops = CountingOps()
    with statements(ops.step):
        run(directory, ops, lambda _n: None)
    return ops.names


def names_of(scenario: Scenario, directory: Path) -> list[str]:
    """The same of a scenario with what it begins with, without its rival."""
    if scenario.prepare is not None:
        scenario.prepare(directory)
    return count_steps(scenario.run, directory)


def check_after(directory: Path, scenario: Scenario, said: list[int]) -> int:
    """Open the store and look at everything; returns how many units were there.

    Every unit is whole or absent, those that were ``said`` to be published are whole where the scenario keeps them,
    nothing wrong is ever read, no orphan is left, and the store goes on as usual.
    """
    made, world = scenario.units, scenario.world
    must = said if scenario.keeps else []
    with DiskStore.open(directory, capacity_of_new=CAP) as store:
        checked = store.verify()
        assert checked.ok, checked
        assert isinstance(checked, Verified)
        there = [hit(store, world, unit) for unit in made]
        for unit, whole in zip(made, there, strict=True):
            assert whole == bool(store.lookup(unit.layout, unit.digests).boundary[-1])
        for number in must:
            assert there[number], f"unit {number} was published and is not there"
        store.gc()
        seen = store.contents()
        assert seen.extents == len(store._directory.extent_files())
        assert seen.on_disk <= seen.in_use <= seen.capacity
        assert store.publish(made[-1]).stored
        assert hit(store, world, made[-1])
    return sum(there)
