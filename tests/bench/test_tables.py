"""What ``kvloom bench tables`` measures, and that it adds metadata up honestly."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from kvloom.bench.metadata import arrays_of, fill, measure
from kvloom.bench.tables import SEGMENTS, TOKENS, time_cuckoo
from kvloom.cli.app import app
from kvloom.config import Device
from kvloom.manager.manager import Manager
from kvloom.spec.presets import PRESETS, load_preset

TIER = 2 << 30


def test_every_array_of_a_manager_is_counted_once() -> None:
    manager = Manager(load_preset("gpt-oss-20b"), [Device(TIER)], max_sequences=3)
    sequence = manager.open(np.arange(300, dtype=np.int32))  # holds views of the block tables
    parts = arrays_of(manager)
    for holder in (manager.arrays, manager.rows):
        for name, value in holder.items():
            if isinstance(value, np.ndarray) and value is not manager.arrays.order:  # of another name as well
                assert parts[f"{type(holder).__name__}.{name}"] == value.nbytes
    extra = np.zeros(12_345, dtype=np.int8)
    sequence.extra = extra[5:]  # type: ignore[attr-defined]
    manager.arrays_of_a_test = [extra, extra[1:], {"a": extra}]  # type: ignore[attr-defined]
    assert sum(arrays_of(manager).values()) == sum(parts.values()) + 12_345


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-120b", "kimi-linear-48b"])
def test_filled_to_four_fifths(name: str) -> None:
    manager = Manager(load_preset(name), [Device(TIER)], max_sequences=1)
    fill(manager)
    assert 0.8 <= manager.stats().used / manager.geometry.arena_bytes < 0.95
    assert sum(kind.evictions for kind in manager.stats().kinds.values()) == 0


def test_the_share_is_of_what_is_in_use_without_the_token_store() -> None:
    row = measure("gpt-oss-20b", load_preset("gpt-oss-20b"), TIER, 4)
    assert row.metadata_bytes == sum(size for _, size in row.parts)
    assert row.token_store_bytes > 0
    assert "Arrays.tokens" not in dict(row.parts)
    assert row.share == row.metadata_bytes / row.kv_bytes
    assert 0 < row.share < 0.01


def test_no_lookup_reads_a_third_bucket() -> None:
    row = time_cuckoo(20_000)
    assert row.one_read + row.two_reads == pytest.approx(1)
    assert row.load > 0.94
    assert row.bytes_per_entry < 27
    assert row.rebuilt < 2


def test_the_command() -> None:
    done = CliRunner().invoke(app, ["bench", "tables", "--entries", "10000", "--device", "2GiB", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert {(row["tokens"], row["segment"]) for row in report["digests"]} == {(t, s) for t in TOKENS for s in SEGMENTS}
    assert report["digest_exponents"].keys() == {str(segment) for segment in SEGMENTS}
    assert [row["entries"] for row in report["cuckoo"]] == [10_000]
    assert [row["model"] for row in report["metadata"]] == list(PRESETS)
    assert all(row["share"] > 0 and row["parts"] for row in report["metadata"])


def test_the_command_for_people() -> None:
    done = CliRunner().invoke(app, ["bench", "tables", "--entries", "10000", "--device", "2GiB"])
    assert done.exit_code == 0, done.output
    for words in ("Digests of a whole prompt", "10,000", "deepseek-v4-flash", "llama-3.1-70b"):
        assert words in done.stdout


def test_a_size_that_is_none() -> None:
    done = CliRunner().invoke(app, ["bench", "tables", "--device", "much"])
    assert done.exit_code == 2
