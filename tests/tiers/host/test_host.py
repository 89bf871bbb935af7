"""What the host tier does beyond the contract, and the faults that it has to bear."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest

from kvloom.errors import InputError, StoreError
from kvloom.testing.units import (
    FULL,
    LAYOUT,
    MIB,
    SEGMENT,
    SNAPSHOT,
    World,
    fetch,
    hit,
    payload,
    tokens_of,
    wrong,
    wrong_bytes,
)
from kvloom.tiers.disk import DiskStore
from kvloom.tiers.host import HostStore, Verify, arrays
from kvloom.tiers.host.arrays import CHECK, COLUMN, FORM, GRADE, GROUP, LENGTH, RUN, SUM
from kvloom.tiers.values import Fill, Need, NewObject, Outcome, PayloadForm, Places, Result, Unit
from kvloom.types import Grade

WORLD = World()
ROOT = b"r" * 32


@pytest.fixture
def store():
    with HostStore(8 * MIB) as made:
        yield made
        made.check_integrity()


def end(unit: Unit) -> tuple[bytes, bytes]:
    return unit.layout, unit.digests[-1].tobytes()


# ---------------------------------------------------------------- memory and books


@pytest.mark.parametrize("capacity", [256 << 10, MIB, 100 * MIB + 12345])
@pytest.mark.parametrize("object_bytes", [4096, 10_000, 1 << 20])
def test_memory_and_books_are_within_the_capacity(capacity: int, object_bytes: int) -> None:
    asked = []

    def memory(n: int) -> np.ndarray:
        asked.append(n)
        return aligned(n)

    with HostStore(capacity, memory, object_bytes=object_bytes) as store:
        books = sum(array.nbytes for _, array in store._books.a.items()) + store._books.table.stats().bytes
        assert len(asked) == 1
        assert asked[0] % 4096 == 0
        assert books + asked[0] <= capacity
        assert books + asked[0] >= capacity - 40_000 - capacity // 50
        assert store.usage().bytes == books


def aligned(n: int) -> np.ndarray:
    raw = np.zeros(n + 4096, np.uint8)
    skip = -raw.ctypes.data % 4096
    return raw[skip : skip + n]


def test_memory_that_is_not_as_it_was_asked_for_is_refused() -> None:
    for memory in (
        lambda n: aligned(n + 4096),
        lambda n: aligned(n).view(np.int8),
        lambda n: aligned(n + 4096)[64 : 64 + n],
    ):
        with pytest.raises(InputError):
            HostStore(MIB, memory)
    with pytest.raises(InputError):
        HostStore(100_000)
    with pytest.raises(InputError):
        HostStore(MIB, object_bytes=100)
    with pytest.raises(InputError):
        HostStore(MIB, threads=7)


def test_an_object_fits_whenever_enough_pages_are_free(store: HostStore) -> None:
    """Every other page taken: a large object lies in hundreds of pieces, and is right."""
    small = World((4000, 4000, 4000), columns=1)
    units = [small.unit(tokens_of(i, 1)) for i in range(400)]
    assert all(store.publish(unit).stored for unit in units)
    for unit in units[::2]:
        store._books.drop_unit(store._books.unit_at(*end(unit)))
    store.check_integrity()
    free = int(store._books.a.scalars[arrays.FREE])
    large = World(((free - 12) * 4096 - 700, 300, 100), columns=1)
    unit = large.unit(tokens_of(5000, 1))
    assert store.publish(unit).stored
    assert store.counts().evicted == 0
    row = int(store.lookup(LAYOUT, unit.digests).places.entries["row"][-1])
    run = store._books.a.run[store._books.a.obj[row, RUN]]
    assert run[0] * 4096 < large.sizes[0]
    assert hit(store, large, unit)
    assert all(hit(store, small, other) for other in units[1::2])
    written = Fill(large.sizes[0], lambda into: into.__setitem__(slice(None), b"y" * large.sizes[0]))
    store.clear(LAYOUT, ROOT)
    assert store.publish(Unit(LAYOUT, ROOT, unit.digests, unit.tokens, SEGMENT,
                              [NewObject(0, FULL, 0, Grade.FAITHFUL, written)], [Need(FULL, 0, 1)])).stored  # fmt: skip
    got, done = fetch(store, store.lookup(LAYOUT, unit.digests).places)
    assert done.ok
    assert got == [b"y" * large.sizes[0]]


def test_random_publications_under_a_tight_cap_keep_the_books_right() -> None:
    random = np.random.Generator(np.random.PCG64(3))
    worlds = [World((int(a), int(b), int(c)), layout=bytes([i]) * 32) for i, (a, b, c) in
              enumerate(random.integers(1, 40_000, (3, 3)))]  # fmt: skip
    with HostStore(2 * MIB) as store:
        for step in range(300):
            world = worlds[int(random.integers(3))]
            tokens = tokens_of(int(random.integers(6)), 6)[: int(random.integers(1, 48))]
            grade = Grade(int(random.integers(3)))
            unit = world.unit(tokens, root=bytes([int(random.integers(2))]) * 32, grade=grade)
            assert store.publish(unit).stored
            assert hit(store, world, unit)
            if random.random() < 0.3:
                store.touch(*end(unit))
            if random.random() < 0.03:
                store.clear(unit.layout, unit.root)
            if step % 10 == 0:
                store.check_integrity()
            usage = store.usage()
            assert usage.bytes <= usage.capacity == 2 * MIB
        assert store.counts().evicted > 20
        store.clear()
        store.check_integrity()
        assert store._books.a.scalars[arrays.FREE] == store._books.a.scalars[arrays.PAGES]
        assert len(store._books.table) == 0


# ---------------------------------------------------------------- heat, demotion, cold forms


def test_what_is_used_most_and_last_goes_last(store: HostStore) -> None:
    units = [WORLD.unit(tokens_of(i, 1)) for i in range(4)]
    for unit in units:
        store.publish(unit)
    for i in (1, 1, 1, 3):
        store.touch(*end(units[i]))
    order = [key for key in store.coldest(1 << 30) if key]
    assert order == [end(units[i]) for i in (0, 2, 3, 1)]
    hits = [store.hits(*end(unit)) for unit in units]
    assert hits[1] > hits[3] > 0
    assert (hits[0], hits[2]) == (0, 0), "never used since they were published"
    assert store.hits(LAYOUT, b"?" * 32) == 0
    before = store.hits(*end(units[1]))
    for i in range(100, 164):
        store.publish(WORLD.unit(tokens_of(i, 1)))
    assert store.hits(*end(units[1])) < before / 2


def test_the_order_in_which_units_go_is_that_of_all_of_them_sorted(store: HostStore) -> None:
    random = np.random.default_rng(5)
    for i in range(200):
        store.publish(WORLD.unit(tokens_of(i, int(random.integers(1, 4)))))
        store.touch(*end(WORLD.unit(tokens_of(int(random.integers(i + 1)), 1))))
    books = store._books
    units = books.a.heap[: books.units].copy()
    heat, depth = books.a.heat[units], books.a.node[units, arrays.DEPTH]
    right = units[np.lexsort((units, -depth, heat[:, arrays.AT], heat[:, arrays.KEY]))].tolist()
    assert len(right) > 50
    assert list(books.in_order()) == right
    assert [n for n, _ in zip(books.in_order(), range(5), strict=False)] == right[:5]
    gone = [(n, np.sort(free).tolist()) for n, free in books.going()]
    assert [n for n, _ in gone] == right
    assert sum(len(free) for _, free in gone) == books.objects, "each object goes with the last unit that needs it"


def test_the_coldest_free_what_they_promise_and_no_more_than_needed(store: HostStore) -> None:
    head = tokens_of(0, 3)
    for i in range(12):
        store.publish(WORLD.unit(np.concatenate([head, tokens_of(1 + i, 2)])))
    for wanted in (1, 50_000, 200_000):
        names = store.coldest(wanted)
        free = int(store._books.a.scalars[arrays.FREE])
        for layout, digest in names[:-1]:
            store._books.drop_unit(store._books.unit_at(layout, digest))
        nearly = int(store._books.a.scalars[arrays.FREE]) - free
        store._books.drop_unit(store._books.unit_at(*names[-1]))
        gained = int(store._books.a.scalars[arrays.FREE]) - free
        assert gained * 4096 >= wanted
        assert nearly * 4096 < wanted + 4096 * 2 * len(names)
        store.check_integrity()


def test_a_unit_moves_to_disk_and_back(store: HostStore, tmp_path: Path) -> None:
    unit = WORLD.unit(tokens_of(1, 5, ragged=3), grade=Grade.FAITHFUL)
    store.publish(WORLD.unit(tokens_of(1, 5)[: 2 * SEGMENT]))
    store.publish(unit)
    moved = store.unit(*end(unit))
    assert moved is not None
    assert (moved.root, moved.segment, moved.tokens.tolist()) == (ROOT, SEGMENT, unit.tokens.tolist())
    assert sorted(moved.needs, key=str) == sorted(unit.needs, key=str)
    with DiskStore.open(tmp_path / "store", 32 * MIB) as disk:
        store.clear()  # the objects stay as long as the unit does
        assert store.usage().bytes > store._books._books_bytes + store._books.table.stats().bytes
        assert disk.publish(moved).objects == len(moved.objects)
        assert hit(disk, WORLD, unit)
        grades = set(disk.lookup(LAYOUT, unit.digests).places.entries["grade"].tolist())
        assert grades == {int(Grade.FAITHFUL), int(Grade.CANONICAL)}
    del moved
    assert store.usage().bytes == store._books._books_bytes + store._books.table.stats().bytes
    assert store.unit(*end(unit)) is None


def test_a_cold_form_takes_the_place_of_objects(store: HostStore) -> None:
    world = World((40_000, 9000, 500))
    unit = world.unit(tokens_of(1, 4))
    store.publish(unit)
    before = store.usage()
    places = store.lookup(LAYOUT, unit.digests).places
    full = places.take(places.entries["group"] == FULL)
    cold = [bytes([i]) * 9000 for i in range(len(full))]
    assert store.rewrite(full, cold, PayloadForm.FP8, Grade.APPROXIMATE) == len(full) == 8
    store.check_integrity()
    assert before.bytes - store.usage().bytes == 8 * (10 - 3) * 4096
    assert (store.usage().objects, store.usage().units) == (before.objects, 1)
    found = store.lookup(LAYOUT, unit.digests)
    assert found.boundary[-1]
    now = found.places.take(found.places.entries["group"] == FULL)
    assert set(now.entries["form"].tolist()) == {int(PayloadForm.FP8)}
    assert set(now.entries["grade"].tolist()) == {int(Grade.APPROXIMATE)}
    got, done = fetch(store, now)
    assert done.ok
    by_row = {(int(r), int(e["column"])): data for r, e, data in zip(full.rows, full.entries, cold, strict=True)}
    assert got == [by_row[int(r), int(e["column"])] for r, e in zip(now.rows, now.entries, strict=True)]
    assert set(fetch(store, full)[1].results.tolist()) == {Result.MISSING}
    assert store.rewrite(full, cold, PayloadForm.FP8, Grade.APPROXIMATE) == 0
    assert store.rewrite(now, [b"z" * 40_000] * 8, PayloadForm.RAW, Grade.CANONICAL) == 0
    store.publish(unit)  # canonical again
    assert hit(store, world, unit)


def test_the_catalogue_has_every_node_with_its_tokens(store: HostStore) -> None:
    unit = WORLD.unit(tokens_of(1, 6, ragged=5))
    store.publish(unit)
    store.publish(World(layout=b"x" * 32).unit(tokens_of(2, 2)))
    batches = list(store.catalogue())
    assert sum(len(batch.places) for batch in batches) == store.usage().objects
    batch = next(batch for batch in batches if batch.layout == LAYOUT)
    order = np.argsort(batch.depth)
    assert (batch.digests[order] == unit.digests).all()
    assert (batch.parents[order][1:] == unit.digests[:-1]).all()
    assert batch.parents[order][0].tobytes() == ROOT
    tokens = [batch.tokens[batch.starts[i] : batch.starts[i + 1]] for i in order.tolist()]
    assert np.concatenate(tokens).tolist() == unit.tokens.tolist()
    assert batch.boundary[order].tolist() == [False] * 6 + [True]
    assert ((batch.touched > 0) == batch.boundary).all()


# ---------------------------------------------------------------- races


def test_c1_c3_what_is_evicted_while_it_is_read_stays_until_the_read_ends() -> None:
    world = World((MIB, 9000, 500))
    with HostStore(24 * MIB) as store:
        unit = world.unit(tokens_of(1, 4))
        store.publish(unit)
        places = store.lookup(LAYOUT, unit.digests).places
        lengths = places.entries["length"].astype(np.int64)
        offsets, into = np.cumsum(lengths) - lengths, np.zeros(int(lengths.sum()), np.uint8)
        asked = threading.Lock()
        done = []

        def stop() -> bool:
            with asked:
                if not done:
                    done.append(store.clear())
                    for i in range(5):
                        assert store.publish(world.unit(tokens_of(10 + i, 2))).stored
                    usage = store.usage()
                    assert usage.bytes <= usage.capacity
            return False

        result = store.read(places, into, offsets, stop)
        assert done == [1]
        assert result.ok
        got = [into[o : o + n].tobytes() for o, n in zip(offsets.tolist(), lengths.tolist(), strict=True)]
        assert wrong(places, got, result.results) == 0
        store.check_integrity()
        assert not hit(store, world, unit)
        store.clear()
        assert store._books.a.scalars[arrays.FREE] == store._books.a.scalars[arrays.PAGES]


@pytest.mark.parametrize("keep", ["view", "array"])
def test_c2_a_late_write_of_a_payload_is_noticed(store: HostStore, keep: str) -> None:
    kept: list = []
    unit = WORLD.unit(tokens_of(1, 1))
    digest = unit.digests[0].tobytes()

    def write(into: memoryview) -> None:
        into[:] = payload(digest, FULL, 0, 9000).data
        kept.append(into if keep == "view" else np.frombuffer(into, np.uint8))

    objects = [NewObject(0, FULL, 0, Grade.CANONICAL, Fill(9000, write))]
    one = Unit(LAYOUT, ROOT, unit.digests, unit.tokens, SEGMENT, objects, [Need(FULL, 0, 1)])
    assert store.publish(one).stored
    assert wrong_bytes(store, store.lookup(LAYOUT, unit.digests).places) == 0
    store.clear()
    other = WORLD.unit(tokens_of(2, 3))
    store.publish(other)
    if keep == "view":
        with pytest.raises(ValueError, match="released"):
            kept[0][:] = b"late" * 2250
        assert hit(store, WORLD, other)
    else:
        kept[0].flags.writeable = True
        kept[0][:] = 7
        assert wrong_bytes(store, store.lookup(LAYOUT, other.digests).places) == 0
        assert not hit(store, WORLD, other)
        assert store.counts().quarantined >= 1


def test_c5_what_is_gone_is_no_error(store: HostStore) -> None:
    unit = WORLD.unit(tokens_of(1, 1))
    store.publish(unit)
    places = store.lookup(LAYOUT, unit.digests).places
    store.clear()
    store.touch(*end(unit))
    assert store.unit(*end(unit)) is None
    assert store.rewrite(places, [b"x"] * len(places), PayloadForm.FP8, Grade.APPROXIMATE) == 0
    assert set(fetch(store, places)[1].results.tolist()) == {Result.MISSING}


def test_evictions_during_a_publication_leave_what_it_builds_on(store: HostStore) -> None:
    tokens = tokens_of(1, 6)
    store.publish(WORLD.unit(tokens[: 3 * SEGMENT]))
    unit = WORLD.unit(tokens, have=3)
    first = unit.objects[0]

    def write(into: memoryview) -> None:
        assert store.clear() == 1
        into[:] = memoryview(first.payload)

    objects = [
        NewObject(first.node, first.group, first.column, first.grade, Fill(first.size, write)),
        *unit.objects[1:],
    ]
    done = store.publish(Unit(LAYOUT, ROOT, unit.digests, unit.tokens, SEGMENT, objects, unit.needs))
    assert done.outcome is Outcome.PUBLISHED
    assert hit(store, WORLD, unit)
    assert not hit(store, WORLD, WORLD.unit(tokens[: 3 * SEGMENT]))


# ---------------------------------------------------------------- damage


def flip_payload(store: HostStore, row: int) -> None:
    page = int(store._books.a.obj[row, RUN])
    store._books.memory[page * 4096 + 1234] ^= 1


def flip_obj(column: int, bit: int = 0):
    def flip(store: HostStore, row: int) -> None:
        store._books.a.obj[row, column] ^= 1 << bit

    return flip


def flip_check(store: HostStore, row: int) -> None:
    store._books.a.obj64[row, CHECK + 1] ^= 1 << 17


def flip_digest(store: HostStore, row: int) -> None:
    store._books.a.node64[store._books.a.obj[row, arrays.OBJ_NODE], 2] ^= 1 << 40


def flip_link(store: HostStore, row: int) -> None:
    store._books.a.run[store._books.a.obj[row, RUN], 0] = 1 << 29


FLIPS = {
    "payload": flip_payload,
    "checksum": flip_check,
    "length": flip_obj(LENGTH, 3),
    "group": flip_obj(GROUP),
    "column": flip_obj(COLUMN),
    "form": flip_obj(FORM),
    "grade": flip_obj(GRADE),
    "page": flip_obj(RUN, 2),
    "page beyond": flip_obj(RUN, 30),
    "run": flip_link,
    "digest": flip_digest,
}


@pytest.mark.parametrize("looked_up", ["before", "after"])
@pytest.mark.parametrize("what", FLIPS)
def test_d5_a_flip_is_never_delivered(what: str, looked_up: str) -> None:
    with HostStore(8 * MIB) as store:
        unit, other = WORLD.unit(tokens_of(1, 3)), WORLD.unit(tokens_of(2, 3))
        store.publish(unit)
        store.publish(other)
        places = store.lookup(LAYOUT, unit.digests).places
        which = int(np.flatnonzero((places.entries["group"] == 1) & (places.rows == 2))[0])
        FLIPS[what](store, int(places.entries["row"][which]))
        if looked_up == "after":
            places = store.lookup(LAYOUT, unit.digests).places
            got, done = fetch(store, places)
            for i, data in enumerate(got):
                if data is not None:
                    e = places.entries[i]
                    right = payload(places.digests[i].tobytes(), int(e["group"]), int(e["column"]), len(data))
                    assert data == right.tobytes()
        else:
            got, done = fetch(store, places)
            assert wrong(places, got, done.results) == 0
            assert done.results[which] == Result.INTEGRITY
            assert (done.results != 0).sum() >= 1
        assert not hit(store, WORLD, unit)
        assert hit(store, WORLD, other)
        if not what.startswith(("run", "page", "digest")):
            assert store.publish(unit).stored
            assert hit(store, WORLD, unit)


@pytest.mark.parametrize("at", [0, 5, 8 * 4 + 1])
def test_d5_flipped_tokens_and_needs_are_noticed(store: HostStore, at: int) -> None:
    unit, other = WORLD.unit(tokens_of(1, 1)), WORLD.unit(tokens_of(2, 2))
    store.publish(unit)
    store.publish(other)
    a = store._books.a
    node = store._books.unit_at(*end(unit))
    store._books.memory[int(a.node[node, arrays.BLOB]) * 4096 + at] ^= 4
    assert sum(len(batch.digests) for batch in store.catalogue()) == 2
    assert store.unit(*end(unit)) is None
    assert store.counts().recounts == 1
    assert hit(store, WORLD, other)
    assert not store.lookup(LAYOUT, unit.digests).boundary.any()
    assert store.publish(unit).stored
    assert hit(store, WORLD, unit)


def test_d5_a_flipped_checksum_of_tokens_is_noticed(store: HostStore) -> None:
    unit = WORLD.unit(tokens_of(1, 2))
    store.publish(unit)
    store._books.a.node64[store._books.unit_at(*end(unit)), SUM] ^= 1
    assert store.unit(*end(unit)) is None
    assert store.clear() == 0


def test_d2_another_objects_bytes_are_refused(store: HostStore) -> None:
    units = [WORLD.unit(tokens_of(i, 2)) for i in range(2)]
    for unit in units:
        store.publish(unit)
    rows = [int(store.lookup(LAYOUT, unit.digests).places.entries["row"][0]) for unit in units]
    a = store._books.a
    a.obj[rows[0], RUN], a.obj[rows[1], RUN] = int(a.obj[rows[1], RUN]), int(a.obj[rows[0], RUN])
    a.obj64[rows, CHECK : CHECK + 2] = a.obj64[rows[::-1], CHECK : CHECK + 2]
    for unit in units:
        places = store.lookup(LAYOUT, unit.digests).places
        got, done = fetch(store, places)
        assert wrong(places, got, done.results) == 0
        assert (done.results == Result.INTEGRITY).sum() == 1
        assert not hit(store, WORLD, unit)


def test_c6_a_damaged_object_takes_with_it_only_what_needs_it(store: HostStore) -> None:
    tokens = tokens_of(1, 6)
    short, long, other = WORLD.unit(tokens[: 3 * SEGMENT]), WORLD.unit(tokens), WORLD.unit(tokens_of(2, 6))
    for unit in (short, long, other):
        store.publish(unit)
    places = store.lookup(LAYOUT, long.digests).places
    which = int(np.flatnonzero((places.entries["group"] == SNAPSHOT) & (places.rows == 5))[0])
    flip_payload_at_start(store, int(places.entries["row"][which]))
    assert wrong_bytes(store, places) == 0
    assert not hit(store, WORLD, long)
    assert hit(store, WORLD, short)
    assert hit(store, WORLD, other)
    assert store.counts().quarantined == 1
    store.check_integrity()
    assert store.publish(WORLD.unit(tokens, have=3)).stored
    assert hit(store, WORLD, long)


def flip_payload_at_start(store: HostStore, row: int) -> None:
    store._books.memory[int(store._books.a.obj[row, RUN]) * 4096] ^= 255


def test_a_damaged_unit_cannot_be_moved(store: HostStore) -> None:
    unit = WORLD.unit(tokens_of(1, 2))
    store.publish(unit)
    moved = store.unit(*end(unit))
    assert moved is not None
    flip_payload(store, int(store.lookup(LAYOUT, unit.digests).places.entries["row"][0]))
    failed = 0
    for item in moved.objects:
        assert isinstance(item.payload, Fill)
        room = bytearray(item.size)
        try:
            item.payload.write(memoryview(room))
        except StoreError:
            failed += 1
            assert not any(room)
    assert failed == 1
    assert not hit(store, WORLD, unit)


def test_without_verification_damage_is_delivered() -> None:
    with HostStore(4 * MIB, verify=Verify.NEVER) as store:
        world = World((70_001, 20_000, 5))
        unit = world.unit(tokens_of(1, 2))
        store.publish(unit)
        assert hit(store, world, unit)
        places = store.lookup(LAYOUT, unit.digests).places
        flip_payload(store, int(places.entries["row"][0]))
        got, done = fetch(store, places)
        assert done.ok
        assert wrong(places, got, done.results) == 1


def test_closing_gives_the_memory_back_when_the_last_unit_is_gone() -> None:
    gone = threading.Event()

    class Owned(np.ndarray):
        def __del__(self) -> None:
            if self.base is not None and self.shape == whole:
                gone.set()

    whole: tuple[int, ...] = ()

    def memory(n: int) -> np.ndarray:
        nonlocal whole
        whole = (n,)
        return aligned(n).view(Owned)

    store = HostStore(4 * MIB, memory)
    unit = WORLD.unit(tokens_of(1, 2))
    store.publish(unit)
    moved = store.unit(*end(unit))
    assert moved is not None
    store.close()
    gc.collect()
    assert not gone.is_set()
    into = bytearray(moved.objects[0].size)
    assert isinstance(moved.objects[0].payload, Fill)
    moved.objects[0].payload.write(memoryview(into))
    assert any(into)
    del moved
    gc.collect()
    assert gone.is_set()
    assert store.clear() == 0
    assert store.coldest(1) == []
    assert store.unit(*end(unit)) is None
    assert list(store.catalogue()) == []
    assert store.usage().units == 0


def test_places_of_nonsense_are_missing(store: HostStore) -> None:
    unit = WORLD.unit(tokens_of(1, 2))
    store.publish(unit)
    places = store.lookup(LAYOUT, unit.digests).places
    entries = places.entries.copy()
    entries["row"] = 2**32 - 1
    done = fetch(store, Places(LAYOUT, places.digests, entries, places.rows))[1]
    assert set(done.results.tolist()) == {Result.MISSING}
    assert hit(store, WORLD, unit)


def test_roots_and_layouts_of_repeated_bytes_are_told_apart(store: HostStore) -> None:
    units = [
        World(layout=bytes([layout]) * 32).unit(tokens_of(1, 2), root=bytes([root]) * 32)
        for layout in range(3)
        for root in range(3)
    ]
    assert all(store.publish(unit).stored for unit in units)
    store.check_integrity()
    assert store.usage().units == 9
    assert store.clear(bytes(32), bytes(32)) == 1
    assert store.usage().units == 8


def test_a_digest_that_is_in_a_chain_twice_is_refused(store: HostStore) -> None:
    unit = WORLD.unit(tokens_of(1, 3))
    twice = unit.digests.copy()
    twice[1] = twice[0]
    done = store.publish(Unit(LAYOUT, ROOT, twice, unit.tokens, SEGMENT, unit.objects, unit.needs))
    assert not done.stored
    store.check_integrity()
    assert store.usage().objects == 0
    assert store.publish(unit).stored
    assert hit(store, WORLD, unit)


def test_digests_that_are_not_one_chain_are_refused(store: HostStore) -> None:
    unit, other = WORLD.unit(tokens_of(1, 3)), WORLD.unit(tokens_of(2, 3))
    store.publish(unit)
    mixed = other.digests.copy()
    mixed[1] = unit.digests[1]
    done = store.publish(Unit(LAYOUT, ROOT, mixed, other.tokens, SEGMENT, other.objects, other.needs))
    assert done.outcome is Outcome.UNAVAILABLE
    assert hit(store, WORLD, unit)
