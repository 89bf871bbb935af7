"""``kvloom replay``: tables, JSON, the HTML report, and what it says about bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.replay.plain import AZURE, CONVERSATION, DATA
from typer.testing import CliRunner

from kvloom.cli.app import app
from kvloom.config import Device, parse_size
from kvloom.manager.watched import WatchedManager
from kvloom.replay.recorder import Recorder
from kvloom.spec.presets import load_preset

KEYS = {"block_hit_rate", "token_hit_rate", "optimum_block_hit_rate", "kinds", "evictions", "seconds"}


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Callable:
    monkeypatch.setenv("COLUMNS", "120")
    return lambda *args: CliRunner().invoke(app, ["replay", *(str(a) for a in args)])


@pytest.fixture
def short(tmp_path: Path) -> Path:
    path = tmp_path / "short <b>.jsonl"
    path.write_text("".join(CONVERSATION.read_text().splitlines(keepends=True)[:60]))
    return path


def test_json_of_one_run(invoke, short: Path) -> None:
    done = invoke(short, "--model", "gpt-oss-20b", "--device", "20%", "--prefill-speed", "1000", "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report.keys() >= KEYS
    assert report["runs"] == [{key: value for key, value in report.items() if key != "runs"}]
    assert 0 < report["block_hit_rate"] <= report["optimum_block_hit_rate"] <= report["unlimited_block_hit_rate"] < 1
    assert report["kinds"].keys() == {"compressed", "window"}
    for kind in report["kinds"].values():
        assert kind.keys() >= {"hits", "misses", "evictions", "bytes"}
    assert report["evictions"]["total"] == sum(kind["evictions"] for kind in report["kinds"].values())
    assert sum(report["evictions"]["reasons"].values()) == report["evictions"]["total"] > 0
    assert sum(report["lookups"].values()) == report["trace"]["requests"] == 60
    assert report["saved_prefill_seconds"] == pytest.approx(report["saved_prefill_tokens"] / 1000)
    assert report["token_hit_rate"] == report["saved_prefill_tokens"] / report["trace"]["input_tokens"]
    assert report["device"]["asked"] == "20%"


def test_several_traces_and_sizes(invoke, short: Path) -> None:
    done = invoke(
        short, AZURE, "--model", "llama-3.1-8b", "--device", "20%,64GiB", "--policy", "all", "--cache-only", "--json"
    )
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report.keys() == {"runs"}
    assert {(run["trace"]["name"], run["device"]["asked"]) for run in report["runs"]} == {
        (name, size) for name in (short.name, AZURE.name) for size in ("20%", "64GiB")
    }
    assert all(run.keys() >= KEYS for run in report["runs"])
    assert all(run["block_size"] == run["trace"]["block_tokens"] for run in report["runs"])
    assert all(run["saved_prefill_seconds"] is None for run in report["runs"])


def test_tables(invoke, short: Path) -> None:
    done = invoke(short, "--model", "llama-3.1-8b", "--device", "3%", "--cache-only")
    assert done.exit_code == 0, done.stderr
    assert "60 requests" in done.stdout
    assert "requests were larger than the tier" in done.stdout
    for word in ("Hit rates", "optimum", "3%", "cost", "compressed", "evictions"):
        assert word in done.stdout
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith("3%"))
    assert row[3] in ("MiB", "GiB")
    assert parse_size(f"{row[2]}{row[3]}") > 1 << 20


def test_colder_tiers(invoke, short: Path, tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    given = ("--model", "gpt-oss-20b", "--device", "10%", "--host", "20%,1000TiB", "--disk", "40%")
    pytest.importorskip("plotly")
    done = invoke(short, *given, "--json", "--html", html)
    assert done.exit_code == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert [(run["tiers"]["host"]["asked"], run["tiers"]["disk"]["asked"]) for run in runs] == [
        ("20%", "40%"),
        ("1000TiB", "40%"),
    ]
    for run in runs:
        tiers = run["tiers"]
        assert run.keys() >= KEYS
        assert run["prefill_tokens_per_second"] == tiers["prefill_tokens_per_second"] == 8000
        assert sum(tiers["reused_tokens"].values()) == run["saved_prefill_tokens"]
        assert sum(tiers["chosen"].values()) == sum(tiers["reasons"].values()) == 60
        assert tiers["time_to_first_token_s"]["total"] <= tiers["time_to_first_token_device_alone_s"]["total"] * 1.001
        for name in ("host", "disk"):
            tier = tiers[name]
            assert 0 < tier["bytes_in_use"] <= tier["bytes"]
            assert tier["bytes_written"] >= sum(tier["bytes_stored"].values()) > 0
            assert tier["bytes_stored"].keys() == {"compressed", "window"}
            assert sum(tier["bytes_loaded"].values()) == tier["bytes_read"]
    text = html.read_text(encoding="utf-8")
    for words in ("Time to first token", "Where prompt tokens came from", "host 1000TiB + disk 40%", "Colder tiers"):
        assert words in text

    done = invoke(short, *given[:-2], "--prefill-speed", "500", "--host-speed", "25", "--policy", "lru")
    assert done.exit_code == 0, done.stderr
    for words in ("Time to first token", "What the planner chose", "500 tokens/s", "host 25 GB/s", "admission always"):
        assert words in done.stdout
    assert "device size" in done.stdout
    assert "exact replay" in done.stdout
    assert "exact_replay" not in done.stdout, "one spelling"
    for line in done.stdout.splitlines():
        heads = [head for head in re.split(r"  +", line.strip()) if head and not head[0].isdigit()]
        if "policy" in heads:
            assert len(set(heads)) == len(heads), "no two columns have one head"


def test_colder_tiers_are_for_traces(invoke, tmp_path: Path) -> None:
    recording = tmp_path / "run.jsonl"
    with Recorder(recording) as recorder:
        manager = WatchedManager(load_preset("gpt-oss-20b"), [Device("1GiB")], watch=recorder)
        manager.open(np.arange(4, dtype=np.int32)).close()
    for option in ("--host", "--disk"):
        done = invoke(recording, option, "1GiB")
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "is a recording" in done.stderr


def test_the_report_is_one_file_without_links(invoke, short: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    html = tmp_path / "report.html"
    done = invoke(short, AZURE, "--model", "gpt-oss-20b", "--device", "10%,50%", "--html", html)
    assert done.exit_code == 0, done.stderr
    assert "report.html" in done.stdout
    text = html.read_text(encoding="utf-8")
    script = text.index("<script>"), text.index("</script>")
    ours = text[: script[0]] + text[script[1] :]
    for link in ("<link", " src=", "@import", "http://", "https://"):
        assert link not in ours
    assert re.search(r'"10% \([0-9.]+ [MG]iB\)"', ours)
    for words in (
        "Hit rate over the trace",
        "Bytes kept, by kind",
        "azure_200.csv",
        "short &lt;b&gt;.jsonl",
        "Plotly.newPlot",
    ):
        assert words in ours
    assert "<b>.jsonl" not in ours.replace("\\u003cb\\u003e", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "llama-3.1-8b", "--device", "0%"], ["device '0%'", "10%"]),
        (["--model", "llama-3.1-8b", "--device", "1000TiB", "--block", "1"], ["'1000TiB'", "smaller --device"]),
        (["--model", "llama-3.1-8b", "--device", "1KiB"], ["device: a tier of 1KiB", "at least"]),
        (["--model", "lama-3.1-8b", "--device", "5%"], ["did you mean llama-3.1-8b"]),
        (["--model", "llama-3.1-8b", "--device", "5%", "--policy", "best"], ["policy 'best'", "s3-fifo, or all"]),
        (["--model", "llama-3.1-8b", "--device", "5%", "--host", "0%"], ["host '0%'", "10%"]),
        (["--model", "llama-3.1-8b", "--device", "5%", "--host", "1KiB"], ["--host 1KiB", "at least 256KiB"]),
        (["--model", "llama-3.1-8b", "--device", "5%", "--disk", "1MiB"], ["--disk 1MiB", "at least 8MiB"]),
        (["--model", "llama-3.1-8b", "--device", "5%", "--disk", "5%", "--disk-speed", "nan"], ["--disk-speed nan"]),
        (["--model", "llama-3.1-8b", "--device", "5%", "--host-speed", "5"], ["--host-speed", "add --host SIZE"]),
        (
            ["--model", "llama-3.1-8b", "--device", "5%", "--disk", "5%", "--admission", "reused"],
            ["--admission", "add --host SIZE"],
        ),
        (["--model", "llama-3.1-8b", "--device", "5%", "--prefill-speed", "0"], ["--prefill-speed 0", "8000"]),
        (
            ["--model", "llama-3.1-8b", "--device", "5%", "--html", "/nowhere/r.html"],
            ["html /nowhere/r.html", "writable"],
        ),
    ],
)
def test_bad_options(invoke, arguments: list[str], words: list[str]) -> None:
    done = invoke(CONVERSATION, *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kvloom: error: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


def test_a_bad_trace_is_named_before_anything_runs(invoke, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(CONVERSATION.read_text()[:5000])
    done = invoke(CONVERSATION, bad, "--model", "llama-3.1-8b", "--device", "5%")
    assert done.exit_code == 2
    assert f"{bad}, line " in done.stderr
    assert "cut off" in done.stderr


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", ["line 1", "the file is empty"]),
        (b"\x1f\x8b\x08\x00\x00", ["line 1", "compressed with gzip", "gunzip"]),
        (b"\x7fELF\xff", ["line 1", "not UTF-8 text"]),
        (b'{"timestamp": 1, "input_length": -5, "output_length": 1, "hash_ids": []}', ["line 1", "input_length is -5"]),
        (b'{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}', ["line 1", "there are 2 ids"]),
        (b'{"timestamp": 1, "inp', ["line 1", "cut off"]),
        (b"[" * 100_000, ["line 1", "nested too deeply"]),
    ],
)
def test_bad_traces_are_one_line_and_exit_code_2(invoke, tmp_path: Path, raw: bytes, words: list[str]) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(raw)
    for path, expected in ((bad, words), (tmp_path, ["Is a directory", "name a trace file"])):
        done = invoke(path, "--model", "llama-3.1-8b", "--device", "5%")
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert all(word in done.stderr for word in [str(path), *expected]), done.stderr


def test_traces_need_a_model_and_a_size(invoke) -> None:
    for given, missing in (("--model=llama-3.1-8b", "--device SIZE"), ("--device=5%", "--model PRESET")):
        done = invoke(CONVERSATION, given)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f"is a trace, which needs {missing}" in done.stderr


def test_the_cuts_are_small_and_their_licences_are_named() -> None:
    notice = (DATA / "README.md").read_text()
    files = [path for path in DATA.iterdir() if path.suffix in (".jsonl", ".csv")]
    assert sum(path.stat().st_size for path in files) < 300_000
    assert all(path.name in notice for path in files)
