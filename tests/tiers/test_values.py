"""What tiers are given: what cannot be right is refused before it does harm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvloom.errors import ConfigError, InputError, StoreError
from kvloom.testing.units import MIB, World, hit, tokens_of
from kvloom.tiers.disk import DiskStore
from kvloom.tiers.host import HostStore
from kvloom.tiers.values import Outcome
from kvloom.transfer.options import TransferOptions


@pytest.mark.parametrize("places", [(0, 1), (0, 2), (1, 2)])
def test_a_chain_has_no_digest_twice(tmp_path: Path, places: tuple[int, int]) -> None:
    """An index cannot hold it: the disk store took its own for damaged and made a new one, four times."""
    world = World()
    with DiskStore.open(tmp_path, 64 * MIB) as store:
        good, unit = world.unit(tokens_of(1, 3)), world.unit(tokens_of(2, 3))
        assert store.publish(good).stored
        digests = unit.digests.copy()
        digests[places[1]] = digests[places[0]]
        assert store.publish(replace(unit, digests=digests)).outcome is Outcome.INCOMPLETE
        assert store.activity().rebuilds == 0
        assert hit(store, world, good)


@pytest.mark.parametrize("cap", [10**18, 1 << 62, 1 << 70, 10**400, 1.5e9, float("nan"), "16GiB", b"1", True, [1]])
def test_a_cap_is_a_number_of_bytes(tmp_path: Path, cap: Any) -> None:
    """One that the marker cannot hold made a store that nobody could open."""
    for options in ({"capacity_bytes": cap}, {"capacity_of_new": cap}):
        with pytest.raises(InputError, match="bytes"):
            DiskStore.open(tmp_path / "store", **options)
    with pytest.raises(InputError, match="bytes"):
        HostStore(cap)
    assert not list(tmp_path.iterdir())


def test_odd_ways_to_open_a_store(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too few"):
        DiskStore.open(tmp_path / "store", capacity_of_new=5)
    for threads in (0, -1, 1.5, None, "2"):
        with pytest.raises(InputError, match="threads"):
            DiskStore.open(tmp_path / "store", 64 * MIB, threads=threads)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="no path"):
        DiskStore.open("a\0b", 64 * MIB)
    for path in (b"bytes", 5, None):
        with pytest.raises(InputError, match="by the path of its directory"):
            DiskStore.open(path, 64 * MIB)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_numbers_that_no_float_holds() -> None:
    for name in ("load_deadline_s", "cold_below", "gpu_watermark"):
        with pytest.raises(ConfigError, match=name):
            TransferOptions(**{name: 10**5000})
