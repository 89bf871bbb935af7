"""``kvloom bench restore``: it measures what it says, with transfers under way when it says so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from typer.testing import CliRunner

from kvloom.bench.beside import Decode, Times
from kvloom.cli.app import app

SMALL = ["bench", "restore", "--tokens", "1024", "--layers", "4"]


def measured(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*SMALL, *arguments, "--json"], standalone_mode=False)
    assert done.return_value == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_way_to_the_first_token_gives_the_same(tmp_path: Path) -> None:
    found = measured("--only", "restore", "--speeds", "0", "--repeats", "1", "--directory", str(tmp_path))
    assert found["identical"]
    assert [row["way"] for row in found["rows"]] == ["cold", "whole", "layers"]
    assert [row["reused"] for row in found["rows"]] == [0, 1024, 1024]
    assert found["decode"] == []
    assert list(tmp_path.iterdir()) == [], "what was written is removed"


def test_decode_steps_are_counted_while_transfers_run() -> None:
    found = measured("--only", "decode", "--steps", "10", "--paces", "1,0.05")
    assert found["rows"] == []
    assert found["parameters"] > 1e6
    rows = {(row["beside"], row["pace"]): row for row in found["decode"]}
    assert set(rows) == {(what, pace) for what in ("load", "store") for pace in (1.0, 0.05)}
    for row in rows.values():
        assert row["rounds"] >= 5
        assert row["alone"]["steps"] >= 10
        assert 0 < row["alone"]["first"] <= row["alone"]["median"] <= row["alone"]["third"] <= row["alone"]["p99"]
        assert row["bytes"] > row["rounds"] * (1 << 20)
        assert row["mbps"] == pytest.approx(row["bytes"] / row["seconds"] / 1e6)
    for what in ("load", "store"):
        assert rows[what, 0.05]["step"]["steps"] >= 10
        assert rows[what, 0.05]["mbps"] < rows[what, 1.0]["mbps"], "it keeps to its pace"


def test_without_steps_there_is_no_figure() -> None:
    none = Decode("load", 1.0, 5, Times.of([1.0, 1.0, 1.0]), Times.of([]), 0, 0.0)
    assert math.isnan(none.ratio)
    found = none.to_json()
    assert (found["ratio"], found["step"]["median"], found["step"]["steps"]) == (None, None, 0)
    assert (found["mbps"], found["alone"]["median"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "some"], "--only 'some': use all, restore, decode"),
        (["--paces", "0"], "above 0 and up to 1"),
        (["--paces", "2"], "above 0 and up to 1"),
        (["--paces", "nan"], "above 0 and up to 1"),
        (["--paces", ""], "above 0 and up to 1"),
        (["--paces", "fast"], "no list of shares"),
        (["--speeds", "x"], "list of whole numbers"),
        (["--layers", "5"], "even number"),
        (["--directory", "/nowhere"], "name a directory to write to"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, [*SMALL, *arguments], standalone_mode=False)
    assert done.return_value == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
