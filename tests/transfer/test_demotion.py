"""From host memory to disk: what is coldest moves on, with ``reused`` only what was used again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvloom.testing.units import LAYOUT, World, hit, tokens_of
from kvloom.tiers.disk import DiskStore
from kvloom.tiers.host import HostStore
from kvloom.transfer.demotion import Demotion
from kvloom.transfer.lanes import Lane, Urgency
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
