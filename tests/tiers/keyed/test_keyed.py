"""What byte stores do to a keyed tier (D1 to D5, D7, D8, D10, D11, C1): never a wrong byte, nothing raised."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.tiers.keyed.stores import Dict, Faulty, Killed

from kvloom.errors import FormatError, InputError, StoreError
from kvloom.testing.units import LAYOUT, SEGMENT, World, digest_chain, fetch, hit, tokens_of, wrong_bytes
from kvloom.tiers.host import HostStore
from kvloom.tiers.keyed import KeyedTier
from kvloom.tiers.keyed.records import _HEAD, _checksum, record_bytes
from kvloom.tiers.keyed.sealed import HEADER
from kvloom.tiers.values import NewObject, Outcome, Result, Unit
from kvloom.types import Grade

WORLD = World((300, 900, 50))
CAPACITY = 1 << 20
ROOT = b"r" * 32


def open_(store: Dict, capacity: int = CAPACITY, **options: Any) -> KeyedTier:
    return KeyedTier(store, capacity, name="keyed", durable=True, **options)


def nth(what: str, numbers: int | range, fault: str) -> Callable[[str, int], str | None]:
    chosen = range(numbers, numbers + 1) if isinstance(numbers, int) else numbers
    return lambda called, number: fault if called == what and number in chosen else None


def always(what: str, fault: str) -> Callable[[str, int], str | None]:
    return nth(what, range(10**9), fault)


def counted(tier: KeyedTier, store: Dict) -> None:
    """The books are right, and never say less than what lies there."""
    tier.check_integrity()
    usage = tier.usage()
    assert store.bytes <= usage.bytes <= usage.capacity


def restarted(store: Dict, units: list[Unit], world: World = WORLD) -> list[bool]:
    """Which units another process hits; nothing else lies there then."""
    if isinstance(store, Faulty):
        store.fault, store.dead = (lambda _what, _number: None), False
    tier = open_(store)
    hits = [hit(tier, world, unit) for unit in units]
    counted(tier, store)
    assert tier.usage().bytes == store.bytes
    tier.close()
    return hits


# ---------------------------------------------------------------- publishing


@pytest.mark.parametrize("fault", ["raise", "half", "late"])
@pytest.mark.parametrize("at_once", [1, 4])
def test_d1_each_put_that_fails_leaves_nothing_of_the_unit(fault: str, at_once: int) -> None:
    before, unit = WORLD.unit(tokens_of(1, 2)), WORLD.unit(tokens_of(1, 4), have=2)
    for number in range(len(unit.objects) + 1):
        store = Faulty()
        tier = open_(store, at_once=at_once)
        assert tier.publish(before).stored
        there = dict(store.kept)
        store.fault = nth("put", store.calls["put"] + number, fault)
        done = tier.publish(unit)
        assert (done.outcome, done.objects) == (Outcome.UNAVAILABLE, 0)
        assert "could not write: MediumError: " in done.reason
        assert tier.lookup(LAYOUT, unit.digests).known.tolist() == [True, True, False, False]
        assert store.kept == there, "what was begun is deleted at once"
        counted(tier, store)
        assert hit(tier, WORLD, before)
        assert tier.publish(unit).stored
        assert hit(tier, WORLD, unit)
        assert restarted(store, [before, unit]) == [True, True]


def test_d3_a_process_that_ends_anywhere_leaves_units_whole_or_absent() -> None:
    """Killed at every call of put and delete: what was published before is hit afterwards, the rest is deleted."""
    poor = WORLD.unit(tokens_of(1, 3), grade=Grade.FAITHFUL)
    other, better = WORLD.unit(tokens_of(2, 3)), WORLD.unit(tokens_of(1, 3))
    kept = 0
    for what, steps in (("put", range(30)), ("delete", range(20))):
        for number in steps:
            store = Faulty(nth(what, number, "kill"))
            tier, done = open_(store), list[bool]()

            def work(tier: KeyedTier = tier, done: list[bool] = done) -> None:
                done += (tier.publish(unit).stored for unit in (poor, other, better))
                tier.clear(LAYOUT, ROOT)

            with pytest.raises(Killed):
                work()
            assert all(done)
            hits = restarted(store, [better, other])
            if len(done) < 3:  # not yet clearing
                assert hits[0] or len(done) < 1
                assert hits[1] or len(done) < 2
            kept += sum(hits)
    assert kept > 40


def test_d1_puts_that_are_cut_or_lost_in_silence_are_noticed_when_they_are_read() -> None:
    unit, other = WORLD.unit(tokens_of(1, 3)), WORLD.unit(tokens_of(2, 3))
    for fault in ("cut", "lost"):
        for number in range(len(unit.objects)):
            store = Faulty(nth("put", number, fault))
            tier = open_(store)
            assert tier.publish(unit).stored
            assert tier.publish(other).stored
            places = tier.lookup(LAYOUT, unit.digests).places
            got, done = fetch(tier, places)
            assert got.count(None) == 1
            assert set(done.results.tolist()) == {Result.OK, Result.INTEGRITY if fault == "cut" else Result.MISSING}
            found = tier.lookup(LAYOUT, unit.digests)
            assert not found.boundary.any(), "the unit is gone with the object"
            assert hit(tier, WORLD, other)
            assert tier.publish(unit).stored
            assert hit(tier, WORLD, unit)
            counted(tier, store)


def test_a_record_that_is_cut_in_silence_costs_the_unit_at_the_restart() -> None:
    unit, other = WORLD.unit(tokens_of(1, 3)), WORLD.unit(tokens_of(2, 3))
    store = Faulty(nth("put", len(unit.objects), "cut"))
    tier = open_(store)
    assert tier.publish(unit).stored
    assert tier.publish(other).stored
    assert hit(tier, WORLD, unit)
    tier.close()
    assert restarted(store, [unit, other]) == [False, True]


def test_what_is_interrupted_leaves_nothing() -> None:
    unit = WORLD.unit(tokens_of(1, 2))
    for error in (KeyboardInterrupt, MemoryError):
        store = Dict()
        tier, put = open_(store), store.put

        def puts(key: str, data: memoryview, error: Any = error, store: Any = store, put: Any = put) -> None:
            put(key, data)
            if len(store.kept) > len(unit.objects) // 2:
                raise error

        store.put = puts  # type: ignore[method-assign]
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                tier.publish(unit)
        else:
            assert tier.publish(unit).outcome is Outcome.UNAVAILABLE
        counted(tier, store)
        assert (tier.usage().bytes, store.bytes) == (0, 0)
        store.put = put  # type: ignore[method-assign]
        assert tier.publish(unit).stored


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("fault", ["other", "flip", "cut", "lost"])
def test_d2_d5_other_bytes_are_noticed_and_the_units_that_need_them_go(fault: str) -> None:
    head = tokens_of(1, 2)
    units = [WORLD.unit(np.concatenate([head, tokens_of(10 + i, 1)])) for i in range(3)]
    alone = WORLD.unit(tokens_of(9, 2))
    for number in range(12):
        store = Faulty()
        tier = open_(store)
        assert all(tier.publish(unit).stored for unit in (*units, alone))
        places = tier.lookup(LAYOUT, units[0].digests).places
        store.fault = nth("get", store.calls["get"] + number, fault)
        shared = number < len(places) and places.rows[number] < 2
        assert wrong_bytes(tier, places) == 0
        assert not hit(tier, WORLD, units[0]) or number >= len(places)
        if number < len(places):
            assert [hit(tier, WORLD, unit) for unit in units[1:]] == [not shared] * 2
        assert hit(tier, WORLD, alone)
        counted(tier, store)
        assert restarted(store, [alone]) == [True]


def test_d5_any_byte_of_anything_that_is_stored() -> None:
    """Every seventh byte of all objects and records: hits or misses, never a wrong byte; the other unit is hit."""
    small = World((20, 30, 9), columns=1)
    unit, other = small.unit(tokens_of(1, 2)), small.unit(tokens_of(2, 2))
    store = Dict()
    tier = open_(store)
    assert tier.publish(other).stored
    keys = set(store.kept)
    assert tier.publish(unit).stored
    tier.close()
    lost = 0
    for key in sorted(store.kept.keys() - keys):
        for at in range(0, len(store.kept[key]), 7):
            bad = Dict()
            raw = store.kept[key]
            bad.kept = {**store.kept, key: raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]}
            tier = open_(bad)
            assert not hit(tier, small, unit), "every byte counts"
            assert hit(tier, small, other)
            counted(tier, bad)
            tier.close()
            lost += 1
    assert lost > 100


def test_d2_two_objects_that_were_swapped_on_the_medium() -> None:
    unit, store = WORLD.unit(tokens_of(1, 3)), Dict()
    tier = open_(store)
    tier.publish(unit)
    one, two = [key for key, raw in store.kept.items() if len(raw) == 300 + HEADER][:2]
    store.kept[one], store.kept[two] = store.kept[two], store.kept[one]
    got, done = fetch(tier, tier.lookup(LAYOUT, unit.digests).places)
    assert sorted(done.results.tolist())[-2:] == [Result.INTEGRITY, Result.MISSING], "the second went with the first"
    assert got.count(None) >= 2
    assert not hit(tier, WORLD, unit)


def test_a_get_that_raises_is_an_io_error_and_the_unit_stays() -> None:
    store, unit = Faulty(), WORLD.unit(tokens_of(1, 3))
    tier = open_(store, at_once=3)
    tier.publish(unit)
    store.fault = nth("get", range(2, 4), "raise")
    _, done = fetch(tier, tier.lookup(LAYOUT, unit.digests).places)
    assert done.results.tolist().count(Result.IO_ERROR) == 2
    assert done.reason.startswith("could not read: MediumError: get ")
    assert hit(tier, WORLD, unit)


def test_d10_a_get_that_hangs_holds_up_nothing_else() -> None:
    store, unit, other = Faulty(nth("get", 1, "hang")), WORLD.unit(tokens_of(1, 3)), WORLD.unit(tokens_of(2, 3))
    tier = open_(store)
    tier.publish(unit)
    tier.publish(other)
    into = np.zeros(1 << 16, np.uint8)
    places = tier.lookup(LAYOUT, unit.digests).places
    lengths = places.entries["length"].astype(np.int64)
    found: list[Any] = []
    hung = threading.Thread(target=lambda: found.append(tier.read(places, into, np.cumsum(lengths) - lengths)))
    hung.start()
    assert store.hanging.wait(30)
    assert hit(tier, WORLD, other)
    assert tier.publish(WORLD.unit(tokens_of(3, 3))).stored
    assert tier.usage().units == 3
    assert tier.clear(LAYOUT, ROOT) == 3
    store.released.set()
    hung.join(30)
    assert not hung.is_alive()
    assert set(found[0].results.tolist()) == {Result.OK, Result.MISSING}, "cleared while it was read"
    counted(tier, store)


def test_d10_a_put_that_hangs_holds_up_only_publications() -> None:
    unit, other = WORLD.unit(tokens_of(1, 3)), WORLD.unit(tokens_of(2, 3))
    store = Faulty()
    tier = open_(store)
    tier.publish(other)
    store.fault = nth("put", store.calls["put"] + 3, "hang")
    found: list[Any] = []
    hung = threading.Thread(target=lambda: found.append(tier.publish(unit)))
    hung.start()
    assert store.hanging.wait(30)
    assert hit(tier, WORLD, other)
    assert not tier.lookup(LAYOUT, unit.digests).known.any()
    usage = tier.usage()
    assert store.bytes <= usage.bytes <= usage.capacity
    assert tier.clear(LAYOUT, ROOT) == 1
    store.released.set()
    hung.join(30)
    assert found[0].outcome is Outcome.UNAVAILABLE
    assert "cleared" in found[0].reason
    counted(tier, store)
    assert store.bytes == 0


def test_what_a_unit_builds_on_is_damaged_while_it_is_written() -> None:
    before, unit = WORLD.unit(tokens_of(1, 2)), WORLD.unit(tokens_of(1, 4), have=2)
    store = Faulty()
    tier = open_(store)
    tier.publish(before)
    places = tier.lookup(LAYOUT, before.digests).places
    store.fault = nth("put", store.calls["put"] + 2, "hang")
    found: list[Any] = []
    hung = threading.Thread(target=lambda: found.append(tier.publish(unit)))
    hung.start()
    assert store.hanging.wait(30)
    store.fault = always("get", "flip")
    _, done = fetch(tier, places)
    assert Result.OK not in done.results.tolist()
    assert not tier.lookup(LAYOUT, before.digests).boundary.any()
    store.fault = lambda _what, _number: None
    store.released.set()
    hung.join(30)
    assert found[0].outcome is Outcome.INCOMPLETE
    counted(tier, store)
    assert tier.usage().bytes == store.bytes == 0


# ---------------------------------------------------------------- deleting and room


def test_d8_what_cannot_be_deleted_counts_and_nothing_more_goes_for_it() -> None:
    store = Faulty()
    tier = open_(store, 40_000)
    units = [WORLD.unit(tokens_of(i, 3)) for i in range(30)]
    number = 0
    while tier.publish(units[number]).stored and tier.usage().bytes < 34_000:
        number += 1
    store.fault = always("delete", "raise")
    before = tier.usage().units
    for unit in units[20:]:
        done = tier.publish(unit)
        assert done.outcome is Outcome.UNAVAILABLE
        assert "could not delete: MediumError" in done.reason
        counted(tier, store)
    assert tier.usage().units >= before - 2, "it does not drain because deleting fails"
    store.fault = lambda _what, _number: None
    for unit in units[20:]:
        assert tier.publish(unit).stored, "it comes back by itself"
        counted(tier, store)
    assert hit(tier, WORLD, units[29])


def test_one_key_that_can_never_be_deleted_does_not_stop_the_tier() -> None:
    store = Faulty()
    tier = open_(store, 40_000)
    stuck: list[str] = []
    delete = store.delete

    def refuses(key: str) -> None:
        if not stuck or key in stuck:
            stuck.append(key)
            raise OSError("read-only")
        delete(key)

    store.delete = refuses  # type: ignore[method-assign]
    done = [tier.publish(WORLD.unit(tokens_of(i, 3))).stored for i in range(40)]
    assert len(stuck) > 5
    assert len(set(stuck)) == 1
    assert done[-20:] == [True] * 20
    counted(tier, store)


def test_deletions_that_only_seem_to_happen_are_made_up_for_at_the_restart() -> None:
    store, units = Faulty(always("delete", "lost")), [WORLD.unit(tokens_of(i, 3)) for i in range(4)]
    tier = open_(store)
    for unit in units:
        tier.publish(unit)
    tier.clear()
    assert tier.publish(units[0]).stored
    tier.close()
    hits = restarted(store, units)
    assert hits[0]
    assert store.bytes > 0


def test_a_store_that_lists_or_reads_nothing_when_it_is_opened_is_left_as_it_is() -> None:
    store, unit = Faulty(), WORLD.unit(tokens_of(1, 2))
    open_(store).publish(unit)
    before = dict(store.kept)
    for what in ("keys", "get"):
        store.fault = always(what, "raise")
        with pytest.raises(StoreError, match="nothing was changed"):
            open_(store)
        assert store.kept == before
    assert restarted(store, [unit]) == [True]


# ---------------------------------------------------------------- restarts


def test_d11_the_same_work_after_a_restart_writes_nothing() -> None:
    store, units = Dict(), [WORLD.unit(tokens_of(i, 3, ragged=i)) for i in range(4)]
    tier = open_(store)
    for unit in units:
        tier.publish(unit)
    tier.close()
    before = dict(store.kept)
    tier = open_(store)
    assert [tier.publish(unit).outcome for unit in units] == [Outcome.KNOWN] * 4
    assert store.kept == before
    found = tier.lookup(LAYOUT, digest_chain(ROOT, tokens_of(3, 3)), root=ROOT)
    assert [2, 3] in found.tails.tolist()


def test_better_objects_in_the_place_of_others_outlive_the_unit_that_brought_them() -> None:
    """Units share objects by what they are: no record is written again when a payload is replaced."""
    tokens, store = tokens_of(1, 4), Dict()
    tier = open_(store)
    long = WORLD.unit(tokens, grade=Grade.FAITHFUL)
    assert tier.publish(long).stored
    assert tier.publish(WORLD.unit(tokens[: 3 * SEGMENT])).stored
    tier.touch(LAYOUT, long.digests[-1].tobytes())
    ((_, end),) = tier.coldest(1)
    assert end == long.digests[2].tobytes()
    tier.close()
    tier = open_(store)
    assert hit(tier, WORLD, long)
    grades = tier.lookup(LAYOUT, long.digests).places
    full = grades.entries["grade"][grades.entries["group"] == 0]
    assert sorted(full.tolist()) == [Grade.FAITHFUL] * 2 + [Grade.CANONICAL] * 6


def test_a_smaller_capacity_at_the_next_start() -> None:
    store, units = Dict(), [WORLD.unit(tokens_of(i, 3)) for i in range(10)]
    tier = open_(store)
    for unit in units:
        tier.publish(unit)
    half = tier.usage().bytes // 2
    tier.close()
    tier = open_(store, half)
    assert [hit(tier, WORLD, unit) for unit in units] == [False] * 5 + [True] * 5, "the last ones stay"
    counted(tier, store)


def test_keys_of_others_are_left_alone() -> None:
    store = Dict()
    mine = {"README": b"x", "o12": b"y", "u" + "z" * 48: b"", "o" + "f" * 60: b"no such form"}
    store.kept = dict(mine)
    tier = open_(store)
    tier.publish(WORLD.unit(tokens_of(1, 2)))
    tier.clear()
    tier.close()
    open_(store).close()
    assert store.kept == mine


def test_a_record_of_a_newer_version_is_refused() -> None:
    store, unit = Dict(), WORLD.unit(tokens_of(1, 2))
    open_(store).publish(unit)
    (key,) = [key for key in store.kept if key.startswith("u")]
    body = bytearray(store.kept[key][:-16])
    body[4] = 2
    store.kept[key] = bytes(body) + _checksum(key, bytes(body))
    before = dict(store.kept)
    with pytest.raises(FormatError, match="format 2"):
        open_(store)
    assert store.kept == before


def test_hostile_records_are_damage() -> None:
    """Records that have a right checksum and say what cannot be."""
    unit, kept = WORLD.unit(tokens_of(1, 2)), Dict()
    open_(kept).publish(unit)
    (key,) = [key for key in kept.kept if key.startswith("u")]
    body = kept.kept[key][:-16]
    draw = np.random.default_rng(0)
    heads = [(2**32 - 1, 16, 8, 3, 9), (2, 2**32 - 1, 8, 3, 9), (2, 16, 0, 3, 9), (0, 0, 8, 3, 9), (2, 16, 8, 0, 0)]
    bad = [_HEAD.pack(b"kvlu", 1, *head, LAYOUT, ROOT) + body[_HEAD.size :] for head in heads]
    bad += [_HEAD.pack(b"kvlu", 1, *head, LAYOUT, ROOT)[: _HEAD.size] for head in heads]
    bad += [draw.bytes(int(draw.integers(0, 400))) for _ in range(50)]
    for _ in range(200):
        at = _HEAD.size + int(draw.integers(len(body) - _HEAD.size))
        bad.append(body[:at] + draw.bytes(4) + body[at + 4 :])
    for each in bad:
        store = Dict()
        store.kept = {**kept.kept, key: each + _checksum(key, each)}
        tier = open_(store)
        assert wrong_bytes(tier, tier.lookup(LAYOUT, unit.digests).places) == 0
        counted(tier, store)
        tier.close()
    assert len(body) + 16 == record_bytes(2, 16, 3, 7)


# ---------------------------------------------------------------- the rest


def test_units_go_on_to_the_next_tier_and_what_is_damaged_does_not() -> None:
    store = Faulty()
    tier, to = open_(store), HostStore(8 << 20)
    units = [WORLD.unit(np.concatenate([tokens_of(9, 2), tokens_of(i, 2, ragged=i)])) for i in range(4)]
    for unit in units:
        tier.publish(unit)
    tier.touch(LAYOUT, units[0].digests[-1].tobytes())
    names = tier.coldest(1 << 30)
    assert [name for _, name in names] == [units[i].digests[-1].tobytes() for i in (1, 2, 3, 0)]
    assert [tier.hits(*name) > 0 for name in names] == [False, False, False, True]
    for name in names[:3]:
        moved = tier.unit(*name)
        assert moved is not None
        assert to.publish(moved).stored
    assert all(hit(to, WORLD, unit) for unit in units[1:])
    last = tier.unit(*names[3])
    assert last is not None
    store.fault = always("get", "flip")
    with pytest.raises(StoreError, match="not found again"):
        to.publish(last)
    store.fault = lambda _what, _number: None
    assert tier.unit(*names[3]) is None
    assert not hit(to, WORLD, units[0])
    counted(tier, store)
    to.close()


def test_a_tier_that_is_not_durable_leaves_nothing_behind() -> None:
    store = Dict()
    tier = KeyedTier(store, CAPACITY, name="cache")
    tier.publish(WORLD.unit(tokens_of(1, 3)))
    assert len(store.kept) == 3 * 2 + 2 + 1, "no record"
    assert not tier.durable
    tier.close()
    assert store.kept == {}


def test_a_store_is_closed_with_its_tier_and_close_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.tiers.keyed.tier.PATIENCE_S", 0.05)
    store, closed = Faulty(), []
    store.close = lambda: closed.append(1)  # type: ignore[attr-defined]
    open_(store).close()
    assert closed == [1]
    store.fault = nth("put", 0, "hang")
    tier = open_(store)
    found: list[Any] = []
    hung = threading.Thread(target=lambda: found.append(tier.publish(WORLD.unit(tokens_of(1, 2)))))
    hung.start()
    assert store.hanging.wait(30)
    began = time.monotonic()
    tier.close()
    assert time.monotonic() - began < 5
    store.released.set()
    hung.join(30)
    assert found[0].reason == "the tier is closed"
    assert store.kept == {}


def test_arguments() -> None:
    class Cannot:
        def put(self, key: str, data: memoryview) -> None: ...

        def get(self, key: str) -> None: ...

        def delete(self, key: str) -> None: ...

    with pytest.raises(InputError, match=r"needs keys\(\)"):
        KeyedTier(Cannot(), 1 << 20, name="x", durable=True)
    for wrong in ({"capacity": 0}, {"name": ""}, {"at_once": 0}):
        with pytest.raises(InputError):
            KeyedTier(Cannot(), **{"capacity": 1, "name": "x", **wrong})


def test_places_of_another_tier_or_changed_ones_are_not_believed() -> None:
    store, unit = Dict(), WORLD.unit(tokens_of(1, 3))
    tier = open_(store)
    tier.publish(unit)
    places = tier.lookup(LAYOUT, unit.digests).places
    for name, value in (("row", -1), ("row", 1 << 40), ("serial", 0), ("serial", 77), ("length", 7), ("group", 9)):
        bad = places.take(np.arange(len(places)))
        bad.entries[name] = value
        _, done = fetch(tier, bad)
        right = sum(int(a == b) for a, b in zip(bad.entries, places.entries, strict=True))
        assert (done.results == Result.OK).sum() == right
    other = places.take(np.arange(len(places))[::-1])
    crossed = type(places)(places.layout, other.digests, places.entries, places.rows)
    got, _ = fetch(tier, crossed)
    assert any(part is None for part in got)
    assert hit(tier, WORLD, unit), "nothing was quarantined for a wrong question"


def test_objects_of_a_unit_that_nothing_asks_for_are_not_kept() -> None:
    store, unit = Dict(), WORLD.unit(tokens_of(1, 2))
    tier = open_(store)
    extra = NewObject(0, 77, 0, Grade.CANONICAL, b"nobody asks")
    more = Unit(unit.layout, unit.root, unit.digests, unit.tokens, unit.segment, [*unit.objects, extra], unit.needs)
    assert tier.publish(more).stored
    assert tier.usage().objects == len(unit.objects)
    counted(tier, store)
    assert restarted(store, [unit]) == [True]
