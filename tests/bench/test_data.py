"""What ``kvloom bench data`` measures, that it says so, and that nothing of it is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvloom.bench.core.sides import PeerName
from kvloom.bench.data.memory import checksums, memory_rows
from kvloom.bench.data.peer import FilePeer
from kvloom.bench.data.rows import Cell, fastest, row, take_turns
from kvloom.bench.data.run import Settings, file_system, run_all
from kvloom.bench.data.world import UNIT_BYTES, DataError, World, payload_of
from kvloom.cli.app import app
from kvloom.errors import ConfigError
from kvloom.tiers.disk import DiskStore

PEER = Path(__file__).with_name("own_fs.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    place = tmp_path_factory.mktemp("data")
    (place / "disk").mkdir()
    command = ["bench", "data", "--directory", str(place / "disk"), "--size", "128MiB", "--repeats", "5", "--json"]
    done = CliRunner().invoke(app, [*command, "--output", str(place / "file.json")])
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert json.loads((place / "file.json").read_text()) == made
    assert list((place / "disk").iterdir()) == [], "something was left"
    return made


def test_every_cell_is_there(report: dict) -> None:
    disk = [row for row in report["rows"] if row["section"] == "disk"]
    assert {row["object_bytes"] for row in disk} == {64 << 10, 512 << 10, 4 << 20}
    names = {"O_DIRECT writes, same syncs", "store", "restore, verified"}
    names |= {f"4 MiB O_DIRECT reads, {depth} in flight" for depth in (1, 2, 4, 8)}
    assert {row["what"] for row in disk} == names
    assert {row["what"] for row in report["rows"] if row["section"] == "memory"} == {
        *("memcpy", "memcpy, 2 threads", "restore from host, verified", "restore from host, not verified")
    }
    assert {row["what"] for row in report["rows"] if row["section"] == "checksum"} == set(checksums())


def test_the_figures_fit_together(report: dict) -> None:
    for one in report["rows"]:
        assert 0 < one["gbps_least"] <= one["gbps"] <= one["gbps_most"]
        if one["ratio"] is not None:
            assert one["ratio_least"] <= one["ratio"] <= one["ratio_most"]
            assert one["ratio"] == pytest.approx(one["gbps"] / one["beside_gbps"], rel=0.9)
    for one in report["rows"]:
        if one["what"] == "restore, verified":
            same = [
                r for r in report["rows"] if r["object_bytes"] == one["object_bytes"] and "O_DIRECT reads" in r["what"]
            ]
            assert one["beside"] == max(same, key=lambda r: r["gbps"])["what"], "the limit is the fastest of them"
            assert (one["wanted"], one["met"]) == (0.9, one["ratio"] >= 0.9)
    assert {row["wanted"] for row in report["rows"] if row["what"] == "store"} == {0.8}
    assert {row["facts"]["syncs"] for row in report["rows"] if row["what"] == "store"} == {2}
    assert {"processor", "cores", "python", "file_system"} <= set(report["machine"])
    assert report["settings"]["total"] == UNIT_BYTES
    assert {one["dtype"] for one in report["codecs"]} == {"bfloat16", "float16", "float32"}


def test_bytes_really_come_from_the_device(report: dict) -> None:
    restores = [row for row in report["rows"] if row["what"] == "restore, verified"]
    if report["machine"]["file_system"] in {"tmpfs", "overlay", "unknown"}:
        pytest.skip("temporary files are not on a disk here")
    assert all(row["facts"]["device_bytes"] >= UNIT_BYTES for row in restores)


def test_turns_and_rows() -> None:
    order: list[str] = []

    def side(name: str, seconds: list[float]):
        def work() -> float:
            order.append(name)
            return seconds.pop(0)

        return work

    reports: list[int] = []
    sides = {"limit": side("limit", [9, 1, 2, 3]), "ours": side("ours", [9, 2, 2, 2])}
    times = take_turns(sides, 3, lambda: reports.append(1))
    assert order == ["ours", "limit", "limit", "ours"] * 2, "there and back"
    assert len(reports) == 4
    assert times == {"limit": [1, 2, 3], "ours": [2, 2, 2]}, "the rehearsal does not count"
    cell = Cell("disk", 1, 4 * 10**9)
    made = row(cell, "ours", times["ours"], "limit", times["limit"])
    assert made.to_json()["met"] is None
    for wanted in (0.9, 1.1):
        some = row(cell, "ours", times["ours"], "limit", times["limit"], wanted=wanted)
        assert some.to_json()["met"] is (wanted < 1)
    assert fastest({**times, "other": [0.1, 3, 3]}, ["ours", "limit", "other"]) in {"ours", "limit"}
    assert fastest({**times, "other": [0.1, 0.1, 3]}, ["ours", "limit", "other"]) == "other"
    assert (made.gbps, made.beside_gbps) == (2, 2)
    assert (made.ratio_least, made.ratio, made.ratio_most) == (0.5, 1, 1.5)


def test_a_tier_that_lies_is_found_out(tmp_path: Path) -> None:
    world = World(payload_of(UNIT_BYTES), 4 << 20)

    class Lying:
        name = "lying"

        def __init__(self) -> None:
            self.store = DiskStore.open(tmp_path / "store", 1 << 30)
            for word in ("publish", "lookup", "close"):
                setattr(self, word, getattr(self.store, word))

        def read(self, places, into, offsets):
            done = self.store.read(places, into, offsets)
            into[12345] ^= 1
            return done

    with pytest.raises(DataError, match="other bytes"):
        memory_rows(world, {"lying": lambda _total, _size: Lying()}, 1, lambda _what: None)


def test_a_tier_in_memory_is_measured_beside_copies(tmp_path: Path) -> None:
    world = World(payload_of(UNIT_BYTES), 512 << 10)
    make = {"some": lambda total, _size: DiskStore.open(tmp_path / "store", 4 * total)}
    rows = {row.what: row for row in memory_rows(world, make, 1, lambda _what: None)}
    assert set(rows) == {"memcpy", "memcpy, 2 threads", "restore from some"}
    assert rows["restore from some"].beside == "memcpy"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--size", "100MiB"), "multiple of 128MiB"),
        (("--size", "much"), "much"),
        (("--directory", "/nowhere/at/all"), "there is no such directory"),
        (("--size", "1024TiB"), "are free there; use a smaller --size"),
        (("--repeats", "1"), "repeats"),
        (("--peer", "sglang=" + sys.executable), "no tier on disk"),
        (("--peer", "vllm=/nowhere"), "is no program"),
    ],
)
def test_bad_input_is_one_line(options: tuple[str, ...], says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvloom", "bench", "data", *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvloom", "bench", "data", "--directory", str(tmp_path), "--size", "128MiB"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell passes it on as ignored
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        until = time.monotonic() + 120
        while not list(tmp_path.glob("*/store/extents/*")) and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_peer_takes_its_turns(tmp_path: Path) -> None:
    peer = FilePeer(PeerName("vllm", Path(sys.executable)), PEER)
    try:
        assert peer.version() == "own 1"
        rows = run_all(tmp_path, Settings(UNIT_BYTES, 5, (4 << 20,)), lambda *_: None, [peer])
    finally:
        peer.close()
    named = {row.what: row for row in rows if row.what.startswith("vllm fs")}
    assert set(named) == {
        f"vllm fs {what}" for what in ("store, not synced", "store and fdatasync", "load, not verified")
    }
    assert named["vllm fs store and fdatasync"].gbps < named["vllm fs store, not synced"].gbps
    assert named["vllm fs load, not verified"].facts == {"device_bytes": 17}


def test_sizes() -> None:
    for total in (0, 1, UNIT_BYTES - 1, UNIT_BYTES + 1):
        with pytest.raises(ConfigError, match="multiple"):
            Settings(total)
    assert len(Settings(2 * UNIT_BYTES).sizes) == 3
    assert file_system(Path("/proc/self")) == "proc"
    assert np.array_equal(payload_of(1 << 20), payload_of(1 << 20))
