"""``kvloom bench recovery``: a few real cells, and what it makes of measurements."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from typer.testing import CliRunner

from kvloom.bench.recovery import SHORT, SlowReads, Sweep, run_all
from kvloom.bench.recovery_cells import Cell, Result, verdict
from kvloom.cli.app import app


def cell(best: str, picked: str = "", planner: float = 1.0, **measured: float) -> Cell:
    times = {"recompute": 4.0, "restore": 2.0, "exact_replay": 3.0} | measured
    times[best] = 1.0
    expected = dict.fromkeys(times)
    return Cell(
        "short windows", 64, 1e6, "empty", times, picked or best, planner, expected, 0, times["recompute"], 0.0, 7, 0
    )


def test_a_few_cells(tmp_path: Path) -> None:
    told: list[int] = []
    sweep = Sweep(SHORT.models, (320,), (1e9,), rounds=1, cell_s=0.0)
    result = run_all(sweep, lambda _what, done, _of: told.append(done), tmp_path)
    assert told == [1, 2]
    lost, empty = result.cells
    assert (lost.device, empty.device) == ("windows lost", "empty")
    assert set(lost.measured_s) == {"recompute", "restore", "exact_replay"}
    assert set(empty.measured_s) == {"recompute", "restore"}
    assert lost.replayed == 96
    assert empty.replayed == 0
    assert all(seconds > 0.0 for one in result.cells for seconds in one.measured_s.values())
    assert json.loads(json.dumps(result.to_json()))["cells"] == 2


def test_the_verdict_says_what_is_not_met() -> None:
    ways = ("recompute", "restore", "exact_replay")
    good = [cell(way) for way in ways for _ in range(5)]
    assert verdict(Result(tuple(good))) == []
    assert verdict(Result(tuple(good[1:])))[0] == "recompute was best in 4 cells"
    wrong = [*good, *(cell("restore", "exact_replay") for _ in range(2))]
    assert verdict(Result(tuple(wrong)))[0] == "the best way was picked in 15 of 17 cells"
    slow = [*good, cell("recompute", planner=1.2, recompute=1.0)]
    assert "more than a tenth slower" in verdict(Result(tuple(slow)))[0]
    near = cell("restore", "exact_replay", exact_replay=1.04)
    assert Result((near,)).right() == 1


def test_slow_reads_are_as_slow_as_they_say(tmp_path: Path) -> None:
    path, ops = tmp_path / "file", SlowReads()
    path.write_bytes(bytes(4096))
    fd = os.open(path, os.O_RDONLY)
    into = memoryview(bytearray(4096))
    ops.speed = 4096 / 0.05
    began = time.perf_counter()
    assert ops.read(fd, into, 0) == 4096
    assert time.perf_counter() - began >= 0.05
    os.close(fd)


def test_the_command_refuses_a_folder_that_is_not_there() -> None:
    done = CliRunner().invoke(app, ["bench", "recovery", "--short", "--directory", "/nowhere/at/all"])
    assert done.exit_code == 2
