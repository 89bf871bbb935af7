"""``kvloom bench sessions``: it measures what it says, and fails when an answer differs."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from typer.testing import CliRunner

from kvloom.bench import sessions
from kvloom.cli.app import app

ARGUMENTS = ["bench", "sessions", "--count", "4", "--tokens", "384", "--turns", "1", "--share", "0.4", "--json"]


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_nothing_is_computed_again_and_every_answer_is_the_same(family: str) -> None:
    done = CliRunner().invoke(app, [*ARGUMENTS, "--family", family], standalone_mode=False)
    assert done.return_value == 0, done.output
    free, *rows = json.loads(done.stdout)["rows"]
    assert free["device_share"] == 1
    assert free["loaded_bytes"] == {}
    assert [row["prefetch"] for row in rows] == [False, True]
    for row in rows:
        assert row["identical"]
        assert row["recomputed"] == 0
        assert sum(row["loaded_bytes"].values()) > 0
        assert sum(row["found"].values()) == pytest.approx(1)
        assert set(row["found"]) == {"device", "prefetched", "arriving", "host", "disk"}
        assert row["device_bytes"] < 0.41 * free["device_bytes"]
    without, ahead = rows
    assert without["found"]["prefetched"] == without["found"]["arriving"] == 0
    assert without["found_on_device"] < 0.5
    assert without["prefetches"] == {"begun": 0, "used": 0}
    assert ahead["found"]["prefetched"] + ahead["found"]["arriving"] > 0.5, "they were asked for a turn ahead"
    assert ahead["prefetches"]["used"] > 0


def test_a_wrong_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = sessions._run, []

    def spoiled(*arguments: Any, **options: Any) -> Any:
        run = real(*arguments, **options)
        calls.append(run)
        if len(calls) == 2:
            run.answers[-1].first_logits[0] += 1
        return run

    monkeypatch.setattr(sessions, "_run", spoiled)
    done = CliRunner().invoke(app, ARGUMENTS, standalone_mode=False)
    assert done.return_value == 1
    assert [row["identical"] for row in json.loads(done.stdout)["rows"]] == [True, False, True]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--family", "llama"], "use one of: gpt_oss"),
        (["--share", "2"], "numbers between 0 and 1"),
        (["--share", "x"], "numbers between 0 and 1"),
        (["--directory", "/nowhere"], "is no folder"),
        (["--host", "inf"], "--host"),
    ],
)
def test_bad_input(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["bench", "sessions", *arguments], standalone_mode=False)
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
