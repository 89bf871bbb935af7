"""Archives: what goes out comes in again; anything else is refused, whatever its bytes."""

from __future__ import annotations

import contextlib
import random
import resource
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.tiers.disk.scenarios import SMALL, units
from tests.tiers.disk.world import LAYOUT, MIB, SEGMENT, World, hit, tokens_of, wrong_bytes

from kvloom.errors import FormatError, InputError, StoreError
from kvloom.tiers.disk import DiskStore, Outcome, PayloadForm
from kvloom.tiers.disk.format import (
    HEADER,
    NEED,
    PAGE,
    RECORD,
    TYPE_ARCHIVE,
    TYPE_OBJECT,
    TYPE_RUN,
    BoundaryInfo,
    Manifest,
    NodeInfo,
    checksum,
    first_page,
    headers,
    padded,
    seal,
)


@pytest.fixture
def archive(fast_path: Path) -> Path:
    with DiskStore.open(fast_path / "source", 64 * MIB) as store:
        for unit in units(SMALL, 6):
            assert store.publish(unit).stored
        assert store.publish(World(layout=b"o" * 32).unit(tokens_of(3, 2, ragged=3))).stored
        done = store.export_archive(fast_path / "archive")
        assert (done.units, done.skipped) == (7, 0)
        assert done.bytes == (fast_path / "archive").stat().st_size
    return fast_path / "archive"


def test_there_and_back(archive: Path, fast_path: Path) -> None:
    with DiskStore.open(fast_path / "target", 64 * MIB) as store:
        assert store.import_archive(archive) == Counter({Outcome.PUBLISHED: 7})
        assert all(hit(store, SMALL, unit) for unit in units(SMALL, 6))
        assert hit(store, SMALL, World(layout=b"o" * 32).unit(tokens_of(3, 2, ragged=3)))
        assert store.verify().ok
        assert store.import_archive(archive) == Counter({Outcome.KNOWN: 7})
        with DiskStore.open(fast_path / "source") as source:
            names = ("layouts", "nodes", "units", "objects", "payload")
            assert [getattr(store.contents(), n) for n in names] == [getattr(source.contents(), n) for n in names]


def test_what_has_no_room_and_what_builds_on_it(fast_path: Path) -> None:
    big = World((6_000_000, 3_000_000, 3000))
    chain = [big.unit(tokens_of(0, n)) for n in (1, 3)]
    with DiskStore.open(fast_path / "source", 64 * MIB) as store:
        assert all(store.publish(unit).stored for unit in (*chain, *units(SMALL, 2)))
        store.export_archive(fast_path / "archive")
    with DiskStore.open(fast_path / "target", 8 * MIB) as store:
        done = store.import_archive(fast_path / "archive")
        assert done == Counter({Outcome.NO_ROOM: 1, Outcome.INCOMPLETE: 1, Outcome.PUBLISHED: 2})
        assert all(hit(store, SMALL, unit) for unit in units(SMALL, 2))
        assert store.verify().ok


def test_a_disk_without_room_for_an_archive(archive: Path, fast_path: Path) -> None:
    """A limit on the size of files stands for the full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with DiskStore.open(fast_path / "source") as store:
        store.contents()
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * PAGE, before[1]))
        try:
            with pytest.raises(StoreError, match=r"other cannot be written: File too large; free some room, or"):
                store.export_archive(fast_path / "other")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (fast_path / "other").exists()


def test_an_archive_is_never_written_over(archive: Path, fast_path: Path) -> None:
    with DiskStore.open(fast_path / "source") as store, pytest.raises(StoreError, match="exists already"):
        store.export_archive(archive)


def test_what_is_damaged_is_left_out(archive: Path, fast_path: Path) -> None:
    archive.unlink()
    (extent,) = (fast_path / "source" / "extents").iterdir()
    data = bytearray(extent.read_bytes())
    data[len(data) // 2] ^= 1
    extent.write_bytes(data)
    with DiskStore.open(fast_path / "source") as store:
        done = store.export_archive(archive)
        assert done.units + done.skipped == 7
    with DiskStore.open(fast_path / "target", 64 * MIB) as store:
        done_in = store.import_archive(archive)
        assert done_in[Outcome.PUBLISHED] + done_in[Outcome.INCOMPLETE] == done.units
        assert store.verify().ok


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: b"", "ends within"),
        (lambda data: data[:100], "ends within"),
        (lambda data: b"PK\x03\x04" * 2000, "no record begins"),
        (lambda data: data[: len(data) // 2], "ends within|no record begins"),
        (lambda data: data[:-PAGE], "ends within"),
        (lambda data: first_page(1, extent=5) + data[PAGE:], "no archive"),
    ],
)
def test_what_is_no_archive(archive: Path, fast_path: Path, change, words: str) -> None:
    archive.write_bytes(change(archive.read_bytes()))
    with DiskStore.open(fast_path / "target", 64 * MIB) as store:
        with pytest.raises(FormatError, match=words) as caught:
            store.import_archive(archive)
        assert "\n" not in str(caught.value)
        assert store.verify().ok
    with DiskStore.open(fast_path / "target") as store, pytest.raises(StoreError, match="cannot be read"):
        store.import_archive(fast_path / "nothing")


def looks_fine(store: DiskStore, archive: Path) -> None:
    """Import, whatever it is: FormatError at most, and a sound store that holds nothing wrong."""
    with contextlib.suppress(FormatError, InputError):
        store.import_archive(archive)
    assert store.verify().ok
    for unit in units(SMALL, 6):
        assert wrong_bytes(store, store.lookup(LAYOUT, unit.digests).places) == 0


@pytest.mark.parametrize(("at", "of"), [(0, 1), (1, 0), (0, 0), (2, 0)])
def test_an_archive_cannot_bend_a_chain_that_is_stored(fast_path: Path, at: int, of: int) -> None:
    """Its node ``at`` has the digest of the node ``of`` of another prompt: a chain has one place for a digest."""
    world, other = World(), World()
    good, liar = world.unit(tokens_of(1, 3)), other.unit(tokens_of(2, at + 1))
    digests = liar.digests.copy()
    digests[at] = good.digests[of]
    with DiskStore.open(fast_path / "liars", 64 * MIB) as store:
        assert store.publish(replace(liar, digests=digests)).stored
        assert store.export_archive(fast_path / "lies").units == 1
    with DiskStore.open(fast_path / "target", 64 * MIB) as store:
        assert store.publish(good).stored
        assert store.import_archive(fast_path / "lies") == Counter({Outcome.INCOMPLETE: 1})
        assert hit(store, world, good)
        assert store.verify().ok
        store.export_archive(fast_path / "truth")
    with DiskStore.open(fast_path / "again", 64 * MIB) as store:
        assert store.import_archive(fast_path / "truth") == Counter({Outcome.PUBLISHED: 1})


def test_every_kind_of_flipped_byte(archive: Path, fast_path: Path) -> None:
    data, rng = archive.read_bytes(), random.Random(0)
    structure = [at + i for at in range(0, len(data), 256) if data[at : at + 7] == b"KVLMREC" for i in range(0, 256, 5)]
    with DiskStore.open(fast_path / "target", 64 * MIB) as store:
        for at in [*rng.sample(structure, 120), *(rng.randrange(len(data)) for _ in range(60))]:
            changed = bytearray(data)
            changed[at] ^= 1 << rng.randrange(8)
            archive.write_bytes(changed)
            looks_fine(store, archive)
            store.clear()


def forged(manifest: bytes, objects: list[dict[str, int]], run_bytes: int | None = None, **head: int) -> bytes:
    """An archive whose checksums are all right and whose contents are anything."""
    run = headers(1, TYPE_RUN)
    run["length"], run["layout"] = len(manifest), np.frombuffer(LAYOUT, np.uint8)
    run["payload"] = np.frombuffer(checksum(manifest), np.uint8)
    for name, value in head.items():
        run[name] = value
    body = seal(run).tobytes() + manifest.ljust(padded(len(manifest)), b"\0")
    for fields in objects:
        record = headers(1, TYPE_OBJECT)
        data = b"x" * min(fields.get("length", 10), 1000)
        record["layout"], record["length"] = np.frombuffer(LAYOUT, np.uint8), len(data)
        record["payload"] = np.frombuffer(checksum(data), np.uint8)
        for name, value in fields.items():
            record[name] = value
        body += seal(record).tobytes() + data.ljust(padded(len(data)), b"\0")
    return first_page(TYPE_ARCHIVE) + body.ljust(padded(len(body), PAGE), b"\0") + first_page(5, extent=1)


numbers = st.one_of(st.integers(0, 3), st.sampled_from([2**31 - 1, 2**31, 2**32 - 1]), st.integers(0, 2**32 - 1))
digests = st.sampled_from([bytes([i]) * 32 for i in range(4)])
nodes = st.builds(NodeInfo, digests, digests, numbers, st.integers(0, 12).map(lambda n: np.arange(n, dtype=np.int32)))
need = st.tuples(numbers, numbers, numbers, numbers)
boundaries = st.builds(
    BoundaryInfo,
    digests,
    st.lists(need, max_size=3).map(lambda rows: np.array(rows, NEED) if rows else np.empty(0, NEED)),
    st.integers(0, 2**64 - 1),
    numbers,
)
small = st.sampled_from([0, 1, 2, 3, 255])
fields = dict.fromkeys(("group", "column", "header"), numbers) | dict.fromkeys(("form", "grade", "type"), small)
fields |= {"length": st.sampled_from([0, 1, 300, 2**40]), "version": st.sampled_from([1, 2, 9])}
records = st.fixed_dictionaries({}, optional=fields)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(nodes, max_size=4),
    st.lists(boundaries, max_size=2),
    st.lists(records, max_size=3),
    numbers,
    st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    st.booleans(),
)
def test_forged_archives(fuzz_store: DiskStore, given_nodes, ends, objects, count, size, honest: bool) -> None:
    """Right checksums over nodes in circles, sizes beyond the file, forms nobody knows, overflows."""
    empty = Manifest(given_nodes, ends, len(objects), 0).encode()
    body = HEADER + padded(len(empty)) + sum(HEADER + padded(min(o.get("length", 10), 1000)) for o in objects)
    made = Manifest(
        given_nodes, ends, len(objects) if honest else count, padded(body, PAGE) if honest or size is None else size
    )
    path = fuzz_store._directory.path.parent / "forged"
    path.write_bytes(forged(made.encode(), objects))
    looks_fine(fuzz_store, path)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=300), st.integers(0, 2**64 - 1))
def test_forged_manifests(fuzz_store: DiskStore, data: bytes, length: int) -> None:
    path = fuzz_store._directory.path.parent / "forged"
    for head in ({}, {"length": length}):
        path.write_bytes(forged(data, [], **head))
        looks_fine(fuzz_store, path)


@pytest.fixture(scope="module")
def fuzz_store(tmp_path_factory: pytest.TempPathFactory):
    with DiskStore.open(tmp_path_factory.mktemp("fuzz") / "s", 64 * MIB) as store:
        yield store


def test_a_forged_archive_that_is_honest_comes_in(fuzz_store: DiskStore) -> None:
    """The forger's work is right where it is right: without this the fuzzing would test nothing."""
    first, second = b"\1" * 32, b"\2" * 32
    tokens = np.arange(SEGMENT, dtype=np.int32)
    chain = [NodeInfo(first, b"\0" * 32, 0, tokens), NodeInfo(second, first, 1, tokens)]
    ends = [BoundaryInfo(second, np.array([(4, 1, 0, 1)], NEED))]
    sizes = HEADER + padded(len(Manifest(chain, ends, 1, 0).encode())) + HEADER + padded(10)
    manifest = Manifest(chain, ends, 1, padded(sizes, PAGE)).encode()
    record = {"group": 4, "form": int(PayloadForm.FP8), "grade": 0}
    path = fuzz_store._directory.path.parent / "honest"
    data = forged(manifest, [record])
    at = data.index(b"KVLMREC1", PAGE + HEADER)
    row = np.frombuffer(bytearray(data[at : at + HEADER]), RECORD).copy()
    row["node"] = np.frombuffer(second, np.uint8)
    path.write_bytes(data[:at] + seal(row).tobytes() + data[at + HEADER :])
    assert fuzz_store.import_archive(path) == Counter({Outcome.PUBLISHED: 1})
    entries = fuzz_store.lookup(LAYOUT, np.frombuffer(second, np.uint8).reshape(1, 32)).places.entries
    assert (entries["group"].tolist(), entries["form"].tolist()) == ([4], [2])
