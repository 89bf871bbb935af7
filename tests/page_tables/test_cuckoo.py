"""The cuckoo table beside a dict, near its highest load, and with keys that somebody chose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvloom.core.digests import PrefixKeys, prefix_digests
from kvloom.errors import InputError, TableFullError
from kvloom.page_tables import cuckoo
from kvloom.page_tables.cuckoo import CuckooTable


def _random(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)


def _rows(keys: list[bytes]) -> Any:
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 16)


# Few keys, so that they meet again; among them those that differ in one half only.
KEYS = st.builds(
    lambda high, low: high.to_bytes(8, "little") + low.to_bytes(8, "little"),
    st.sampled_from([0, 1, 2, 2**32, 2**64 - 1]),
    st.integers(0, 30) | st.sampled_from([2**32, 2**64 - 1]),
)


class BesideDict(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 40), limit=st.none() | st.integers(1, 60), seed=st.integers(0, 2**64 - 1))
    def begin(self, capacity: int, limit: int | None, seed: int) -> None:
        self.table, self.limit = CuckooTable(capacity, limit=limit, seed=seed), limit
        self.model: dict[bytes, int] = {}
        self.next = 0

    @rule(keys=st.lists(KEYS, max_size=30))
    def put(self, keys: list[bytes]) -> None:
        places = np.arange(self.next, self.next + len(keys), dtype=np.int64)
        self.next += len(keys)
        if self.limit is not None and len({*self.model, *keys}) > self.limit:
            with pytest.raises(TableFullError, match=f"{self.limit} entries, its limit"):
                self.table.put(_rows(keys), places)
            return
        old = self.table.put(_rows(keys), places)
        expected = []
        for key, place in zip(keys, places.tolist(), strict=True):
            expected.append(self.model.get(key, -1))
            self.model[key] = place
        assert old.tolist() == expected

    @rule(keys=st.lists(KEYS, max_size=30))
    def remove(self, keys: list[bytes]) -> None:
        assert self.table.remove(_rows(keys)).tolist() == [self.model.pop(key, -1) for key in keys]

    @rule(keys=st.lists(KEYS, max_size=30))
    def find(self, keys: list[bytes]) -> None:
        before = self.table.stats()
        assert self.table.find(_rows(keys)).tolist() == [self.model.get(key, -1) for key in keys]
        after = self.table.stats()
        assert after.read_one + after.read_two - before.read_one - before.read_two == len(keys)

    @invariant()
    def the_same(self) -> None:
        self.table.check_integrity()
        assert len(self.table) == len(self.model)
        digests, places = self.table.items()
        assert dict(zip(map(bytes, digests), places.tolist(), strict=True)) == self.model


BesideDict.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_beside_dict = BesideDict.TestCase


@pytest.mark.parametrize("count", [1_000, 10_000, 300_000])
def test_ninety_five_per_cent_full_and_two_reads_at_most(count: int) -> None:
    table, digests = CuckooTable(count), _random(count)
    assert (table.put(digests, np.arange(count)) == -1).all()
    assert np.array_equal(table.find(digests), np.arange(count))
    assert (table.find(_random(1000, seed=1)) == -1).all()
    table.check_integrity()
    stats = table.stats()
    assert stats.rebuilds == 0
    assert stats.load > 0.94
    assert stats.read_one + stats.read_two == count + 1000
    assert stats.read_one > 0.6 * count
    if count > 1_000:
        assert stats.bytes_per_entry < 27


def test_growing_keeps_everything_and_is_amortised() -> None:
    table, digests = CuckooTable(8), _random(50_000)
    for start in range(0, 50_000, 1000):
        table.put(digests[start : start + 1000], np.arange(start, start + 1000))
    assert np.array_equal(table.find(digests), np.arange(50_000))
    assert table.stats().rebuilt < 2 * 50_000
    table.check_integrity()


def test_years_of_turnover_leave_no_tombstones() -> None:
    """Nine of ten slots in use, every entry replaced twenty times: as compact and as quick as new."""
    count = 4_000
    table, live = CuckooTable(count), _random(count)
    table.put(live, np.arange(count))
    size = table.stats().bytes
    for year in range(20):
        fresh = _random(count, seed=year + 1)
        for start in range(0, count, 500):
            part = slice(start, start + 500)
            assert (table.remove(live[part]) >= 0).all()
            table.put(fresh[part], np.arange(start, start + 500))
        live = fresh
    assert np.array_equal(table.find(live), np.arange(count))
    stats = table.stats()
    assert stats.bytes == size
    assert stats.rebuilds == 0
    table.check_integrity()


def _homes(words: Any, seed: int, buckets: int) -> Any:
    """The two buckets of many keys, as the compiled table has them."""
    h = (words[:, 0] ^ np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    h = h ^ (h >> np.uint64(32)) ^ words[:, 1]
    h = (h ^ (h >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    h = h ^ (h >> np.uint64(29))
    first = (h & np.uint64(0xFFFFFFFF)) * np.uint64(buckets) >> np.uint64(32)
    second = (h >> np.uint64(32)) * np.uint64(buckets) >> np.uint64(32)
    second = np.where(second == first, (first + np.uint64(1)) % np.uint64(buckets), second)
    return np.sort(np.stack([first, second], axis=1).astype(np.int64), axis=1)


def _that_meet(count: int, *worlds: tuple[int, int]) -> Any:
    """Keys that all share both buckets, at each of these (seed, buckets)."""
    words = np.random.default_rng(7).integers(0, 2**64, (600_000, 2), dtype=np.uint64)
    for seed, buckets in worlds:
        homes = _homes(words, seed, buckets)
        pair = homes[:, 0] * buckets + homes[:, 1]
        words = words[pair == np.bincount(pair).argmax()]
    assert len(words) >= count
    return words[:count].astype("<u8").view(np.uint8)


def test_keys_chosen_to_meet_in_two_buckets_get_another_seed() -> None:
    table = CuckooTable(100)
    buckets = table.stats().slots // 4
    keys = _that_meet(40, (0, buckets))
    table.put(keys, np.arange(40))
    assert np.array_equal(table.find(keys), np.arange(40))
    assert table.stats().slots == 4 * buckets  # another seed, not a larger table
    assert table.stats().rebuilds == 1
    table.check_integrity()


def test_when_no_seed_helps_it_says_so_and_keeps_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuckoo, "RESEEDS", 1)  # fewer seeds, so that keys that fail under all of them can be found
    table = CuckooTable(11)  # three buckets; then six, then twelve under another seed
    assert table.stats().slots == 12
    keys = _that_meet(9, (0, 3), (0, 6), (2, 12))
    table.put(keys[:4], np.arange(4))
    before = table.items()
    with pytest.raises(TableFullError, match="no room for another entry beside 8"):
        table.put(keys, np.arange(9) + 100)
    table.check_integrity()
    after = table.items()
    assert dict(zip(map(bytes, after[0]), after[1], strict=True)) == dict(
        zip(map(bytes, before[0]), before[1], strict=True)
    )


def test_places_of_a_prompt() -> None:
    keys = PrefixKeys.of(b"namespace")
    digests = prefix_digests(keys, np.arange(4096, dtype=np.int32), 16)
    table = CuckooTable(300)
    table.put(digests, np.arange(256) * 4096)
    assert np.array_equal(table.find(digests[:, :16]), np.arange(256) * 4096)  # the first 128 bits are what counts
    assert table.remove(digests[200:201]).tolist() == [200 * 4096]
    assert (table.find(digests) >= 0).sum() == 255


@pytest.mark.parametrize(
    ("digests", "places", "words"),
    [
        (np.zeros((2, 8), dtype=np.uint8), np.zeros(2, dtype=np.int64), "16 or 32"),
        (np.zeros(16, dtype=np.uint8), np.zeros(1, dtype=np.int64), "16 or 32"),
        (np.zeros((2, 16), dtype=np.int8), np.zeros(2, dtype=np.int64), "int8"),
        (np.zeros((2, 16), dtype=np.uint8), np.zeros(3, dtype=np.int64), "2 digests need"),
        (np.zeros((2, 16), dtype=np.uint8), np.zeros(2, dtype=np.int32), "int32"),
        (np.zeros((2, 16), dtype=np.uint8), np.array([3, -1]), "place -1 is negative"),
    ],
)
def test_unusable_input(digests: Any, places: Any, words: str) -> None:
    table = CuckooTable(10)
    with pytest.raises(InputError, match=words):
        table.put(digests, places)
    assert len(table) == 0
    for what in ({"capacity": 0}, {"limit": 0}):
        with pytest.raises(InputError, match="at least 1"):
            CuckooTable(**what)
