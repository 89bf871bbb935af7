"""Values that a tier is given: what cannot be right is refused before a tier sees it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvloom.errors import InputError
from kvloom.testing.units import MIB, World, hit, tokens_of
from kvloom.tiers.disk import DiskStore


@pytest.mark.parametrize("places", [(0, 1), (0, 2), (1, 2)])
def test_a_chain_has_no_digest_twice(tmp_path: Path, places: tuple[int, int]) -> None:
    """An index cannot hold it: the disk store took its own for damaged and made a new one, four times."""
    world = World()
    with DiskStore.open(tmp_path, 64 * MIB) as store:
        good, unit = world.unit(tokens_of(1, 3)), world.unit(tokens_of(2, 3))
        assert store.publish(good).stored
        digests = unit.digests.copy()
        digests[places[1]] = digests[places[0]]
        with pytest.raises(InputError, match="twice"):
            store.publish(replace(unit, digests=digests))
        assert store.activity().rebuilds == 0
        assert hit(store, world, good)
