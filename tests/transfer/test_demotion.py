"""From host memory to disk: what is coldest moves on, with ``reused`` only what was used again."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvloom.testing.faults import FaultyTier, Plan
from kvloom.testing.units import LAYOUT, World, hit, tokens_of
from kvloom.tiers.disk import DiskStore
from kvloom.tiers.host import HostStore
from kvloom.tiers.values import Outcome
from kvloom.transfer.demotion import Demotion
from kvloom.transfer.jobs import Job, Urgency
from kvloom.transfer.lanes import Lane
from kvloom.transfer.options import Admission, TransferOptions
from kvloom.transfer.stats import TierStats

WORLD = World((20_000, 5_000, 3_000))


@pytest.mark.parametrize("admission", list(Admission))
def test_the_coldest_move_on_once_the_host_is_full(tmp_path: Path, admission: Admission) -> None:
    units = [WORLD.unit(tokens_of(i, 3)) for i in range(24)]
    with HostStore(4 << 20) as host, DiskStore.open(tmp_path, 64 << 20) as disk:
        lane = Lane("kvloom-test", {Urgency.DEMOTE: 64})
        link: Any = SimpleNamespace(tier=disk, writing=lane, stats=TierStats())
        demotion = Demotion(host, link, TransferOptions(admission=admission, host_mark=0.25))
        for number, unit in enumerate(units):
            assert host.publish(unit).stored
            if number % 2:
                host.touch(LAYOUT, unit.digests[-1].tobytes())
            demotion.run()
        assert lane.close(60)
        on_disk = [hit(disk, WORLD, unit) for unit in units]
        assert link.stats.demoted == sum(on_disk) > 0
        if admission is Admission.REUSED:
            assert not any(on_disk[::2]), "what was used once"
        else:
            assert any(on_disk[::2])
        host.check_integrity()


def test_closing_moves_everything_on(tmp_path: Path) -> None:
    units = [WORLD.unit(tokens_of(i, 2)) for i in range(6)]
    with HostStore(8 << 20) as host, DiskStore.open(tmp_path, 64 << 20) as disk:
        link: Any = SimpleNamespace(tier=disk, writing=Lane("kvloom-test", {Urgency.DEMOTE: 64}), stats=TierStats())
        for unit in units:
            host.publish(unit)
        disk.publish(units[0])
        assert Demotion(host, link, TransferOptions(admission=Admission.REUSED)).run_all(60)
        assert link.writing.close(60)
        assert all(hit(disk, WORLD, unit) for unit in units)
        assert link.stats.demoted == len(units) - 1, "the disk had one"


def test_d7_what_a_disk_did_not_take_is_moved_on_once_it_does(tmp_path: Path) -> None:
    refused = dict.fromkeys(range(1000), Outcome.UNAVAILABLE)
    with HostStore(8 << 20) as host, DiskStore.open(tmp_path, 64 << 20) as disk:
        lane, tier = Lane("kvloom-test", {Urgency.DEMOTE: 64}), FaultyTier(disk, Plan(refuse=refused))
        link: Any = SimpleNamespace(tier=tier, writing=lane, stats=TierStats())
        for i in range(6):
            host.publish(WORLD.unit(tokens_of(i, 2)))
        demotion = Demotion(host, link, TransferOptions(host_mark=0.001))

        def run() -> None:
            demotion.run()
            last = lane.submit(Urgency.DEMOTE, _nothing)
            assert last is not None
            assert last.wait(60)

        run()
        run()
        tried = link.stats.not_stored["unavailable"]
        assert tried > 6, "some were tried again"
        refused.clear()
        run()
        assert link.stats.demoted == 6
        run()
        assert (link.stats.demoted, link.stats.not_stored["unavailable"]) == (6, tried), "once is enough"
        assert lane.close(60)


def _nothing(_job: Job[None]) -> Generator[None, None, None]:
    yield from ()
