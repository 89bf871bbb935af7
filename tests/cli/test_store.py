"""``kvloom store``: every command on a real store, and what it says when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_documented import keys, printed
from tests.tiers.disk.world import LAYOUT, MIB, World, hit, tokens_of

from kvloom.tiers.disk import DiskStore

WORLD = World()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with DiskStore.open(tmp_path / "store", 64 * MIB) as store:
        for i in range(3):
            store.publish(WORLD.unit(tokens_of(i, 3), root=bytes([i]) * 32))
            store.publish(WORLD.unit(tokens_of(i, 5), root=bytes([i]) * 32))
        store.touch(LAYOUT, WORLD.unit(tokens_of(1, 5), root=b"\1" * 32).digests[-1].tobytes())
    return tmp_path / "store"


def test_ls(invoke, directory: Path) -> None:
    units = printed(invoke, "store", "ls", directory)["units"]
    assert len(units) == 6
    first = WORLD.unit(tokens_of(1, 5), root=b"\1" * 32)
    assert (units[0]["digest"], units[0]["hits"]) == (first.digests[-1].tobytes().hex(), 1)
    assert (units[0]["tokens"], units[0]["nodes"], units[0]["root"]) == (40, 5, "01" * 32)
    text = invoke("store", "ls", directory)
    assert units[0]["digest"][:12] in text.stdout
    short = invoke("store", "ls", directory, "--limit", "2")
    assert "4 more" in short.stderr


def test_stats(invoke, directory: Path) -> None:
    report = printed(invoke, "store", "stats", directory)
    assert (report["capacity"], report["units"], report["nodes"]) == (64 * MIB, 6, 15)
    text = invoke("store", "stats", directory).stdout
    assert "64.0 MiB" in text
    assert "6 in 1 layout" in text
    assert "layouts" not in text


def test_verify(invoke, directory: Path) -> None:
    assert printed(invoke, "store", "verify", directory)["ok"]
    assert "6 units checked" in (text := invoke("store", "verify", directory).stdout)
    assert text.endswith(": nothing is wrong\n")
    (extent,) = (directory / "extents").iterdir()
    data = bytearray(extent.read_bytes())
    data[len(data) // 2] ^= 4
    extent.write_bytes(data)
    done = invoke("store", "verify", directory, "--json")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["ok"], report["integrity"]) == (1, False, 1)
    assert report["incomplete"] >= 1
    done = invoke("store", "verify", directory)
    assert "not whole: misses, until" in done.stdout
    assert done.exit_code == 1


def test_gc(invoke, directory: Path) -> None:
    stray = directory / "extents" / f"{5:016x}.extent"
    stray.write_bytes(bytes(MIB))
    report = printed(invoke, "store", "gc", directory)
    assert not stray.exists()
    assert report["after"] <= report["before"]
    assert "after" in invoke("store", "gc", directory).stdout


def test_an_import_says_what_had_no_room(invoke, tmp_path: Path) -> None:
    big = World((6_000_000, 3_000_000, 3000))
    with DiskStore.open(tmp_path / "store", 64 * MIB) as store:
        store.publish(big.unit(tokens_of(0, 1)))
        store.publish(big.unit(tokens_of(0, 3)))
    invoke("store", "export", tmp_path / "store", tmp_path / "archive")
    done = invoke("store", "import", tmp_path / "other", tmp_path / "archive", "--capacity", "8MiB")
    assert (done.exit_code, done.stdout) == (0, "1 no_room, 1 incomplete\n")
    assert "2 units were not taken: they, or what they build on, have no room below the cap of 8.0 MiB" in done.stderr
    done = invoke("store", "import", tmp_path / "other", tmp_path / "archive", "--capacity", "64MiB")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "2 published\n", "")


def test_a_damaged_index_is_one_note(directory: Path) -> None:
    (index,) = directory.glob("index-*")
    index.write_bytes(b"x" * 5000)
    command = [sys.executable, "-m", "kvloom", "store", "ls", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("6 units")
    assert done.stderr.startswith(f"kvloom: note: the index of {directory} was damaged; a new one was made")
    assert done.stderr.count("\n") == 1


def test_clear(invoke, directory: Path) -> None:
    refused = invoke("store", "clear", directory)
    assert refused.exit_code == 2
    assert "would remove 6 units" in refused.stderr
    one = ("--layout", LAYOUT.hex(), "--namespace", "01" * 32)
    assert "would remove 2 units" in invoke("store", "clear", directory, *one).stderr
    assert printed(invoke, "store", "clear", directory, *one, "--yes") == {"units": 2}
    with DiskStore.open(directory) as store:
        assert hit(store, WORLD, WORLD.unit(tokens_of(0, 5), root=b"\0" * 32))
        assert not hit(store, WORLD, WORLD.unit(tokens_of(1, 5), root=b"\1" * 32))
    assert "4 units removed" in invoke("store", "clear", directory, "--yes").stdout
    assert printed(invoke, "store", "ls", directory) == {"units": []}


def test_export_and_import(invoke, directory: Path, tmp_path: Path) -> None:
    archive, other = tmp_path / "archive", tmp_path / "other"
    assert printed(invoke, "store", "export", directory, archive)["units"] == 6
    again = invoke("store", "export", directory, archive)
    assert again.exit_code == 2
    assert "exists already" in again.stderr
    assert "add --capacity SIZE" in invoke("store", "import", other, archive).stderr
    assert "no such file" in invoke("store", "import", other, tmp_path / "nothing", "--capacity", "32MiB").stderr
    assert not other.exists()
    other.mkdir()
    assert "add --capacity SIZE" in invoke("store", "import", other, archive).stderr
    said = invoke("store", "import", other, archive, "--capacity", "32MiB")
    assert (said.exit_code, said.stdout) == (0, "6 published\n")
    assert printed(invoke, "store", "import", other, archive) == {"outcomes": {"known": 6}}
    names = [printed(invoke, "store", "ls", place)["units"] for place in (directory, other)]
    assert {unit["digest"] for unit in names[0]} == {unit["digest"] for unit in names[1]}


def test_keys_are_documented(invoke, directory: Path, tmp_path: Path) -> None:
    for command, arguments in (
        ("ls", ()),
        ("stats", ()),
        ("verify", ()),
        ("gc", ()),
        ("export", (tmp_path / "a",)),
        ("import", (tmp_path / "a",)),
        ("clear", ("--yes",)),
    ):
        report: dict[str, Any] = printed(invoke, "store", command, directory, *arguments)
        assert keys(f"kvloom store {command}") == set(report), command
    with DiskStore.open(directory) as store:
        assert keys("kvloom store stats") == {*asdict(store.contents()), "write_amplification"}


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "gc", "clear"])
def test_what_is_no_store(invoke, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thing").touch()
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("nothing", "no such directory"),
        ("file", "not a directory"),
        ("theirs", "not a kvloom store"),
        ("empty", "it is empty; name one that kvloom made"),
    ):
        done = invoke("store", command, tmp_path / name)
        assert done.exit_code == 2
        assert done.stderr.startswith("kvloom: error: ")
        assert done.stderr.count("\n") == 1
        assert words in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "theirs"]


def test_bad_options(invoke, directory: Path, tmp_path: Path) -> None:
    for arguments, words in (
        (("clear", directory, "--layout", "ab"), "go together"),
        (("clear", directory, "--layout", "xy", "--namespace", "01" * 32), "not 64 hex digits"),
        (("import", directory, tmp_path / "nothing"), "cannot be read: no such file"),
        (("import", tmp_path / "new", tmp_path / "nothing", "--capacity", "3 apples"), "size"),
        (("import", tmp_path / "new", tmp_path / "nothing", "--capacity", "1MiB"), "too small"),
        (("export", directory, tmp_path / "no" / "folder"), "No such file"),
    ):
        done = invoke("store", *arguments)
        assert done.exit_code == 2, (arguments, done.stderr)
        assert words in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
