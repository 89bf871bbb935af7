"""``kvloom run --record FILE`` and its replay: the same hits, bytes and evictions, kind by kind, under every policy."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.cli.test_documented import rows

from kvloom.eviction import POLICIES
from kvloom.replay.rerun import rerun

QUESTIONS = (
    "What jumps?",
    "Over what does it jump, and why?",
    "Is it a dog? I want to know it in detail.",
    "What jumps?",
)
ASKED = [word for question in QUESTIONS for word in ("--question", question)]
FAMILIES = {"gpt_oss": "360KiB", "gemma3": "360KiB", "qwen3_next": "400KiB", "deepseek_v4": "110KiB"}
"""Families of hybrid models, and a tier in which such questions about the document push each other out."""
Run = Callable[..., Any]


@pytest.fixture
def run(invoke, model_of, document: Path) -> Run:
    def run(family: str, *more: object) -> Any:
        size = [] if "--device" in more else ["--device", FAMILIES[family]]
        asked = ["run", "--model", model_of(family), "--document", document, *ASKED, *size]
        return invoke(*asked, "--block-size", "32", "--max-new-tokens", "6", *more)

    return run


def printed(done: Any, code: int = 0) -> dict[str, Any]:
    assert done.exit_code == code, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_replay_gives_the_figures_of_the_run(run: Run, invoke, tmp_path: Path, family: str, policy: str) -> None:
    path = tmp_path / "run.jsonl"
    ran = printed(run(family, "--policy", policy, "--record", path, "--json"))
    again = printed(invoke("replay", path, "--json"))
    assert (again["same_as_recorded"], again["difference"]) == (True, None)
    assert (again["policy"], ran["policy"]) == (policy, policy)
    assert again["kinds"].keys() == ran["kinds"].keys()
    for kind, counters in ran["kinds"].items():
        assert counters["evictions"] > 0
        assert {name: again["kinds"][kind][name] for name in counters} == counters
    assert again["evictions"]["reasons"] == {"room": sum(k["evictions"] for k in ran["kinds"].values())}
    last = json.loads(path.read_text().splitlines()[-1])
    for kind, counters in last["kinds"].items():
        for name in ("hits", "misses", "evictions", "bytes", "objects", "commits", "unkept"):
            assert again["kinds"][kind][name] == counters[name]
    reused = sum(answer["reused_tokens"] for answer in ran["answers"])
    assert again["saved_prefill_tokens"] == reused  # nothing was cached when the document was read
    assert sum(again["lookups"].values()) == again["requests"] == 1 + len(QUESTIONS)


@pytest.mark.parametrize("family", FAMILIES)
def test_under_other_settings_it_gives_the_figures_of_another_run(
    run: Run, invoke, tmp_path: Path, family: str
) -> None:
    """Replayed as if it had run in the other tier, a recording gives what the run there recorded."""
    large, small = tmp_path / "large.jsonl", tmp_path / "small.jsonl"
    assert run(family, "--device", "2MiB", "--policy", "lru", "--record", large).exit_code == 0
    assert run(family, "--policy", "cost", "--record", small).exit_code == 0
    for path, device, policy, other in ((large, FAMILIES[family], "cost", small), (small, "2MiB", "lru", large)):
        there = printed(invoke("replay", path, "--device", device, "--policy", policy, "--json"))
        then = printed(invoke("replay", other, "--json"))
        assert (there["same_as_recorded"], then["same_as_recorded"]) == (None, True)
        for key in ("kinds", "lookups", "token_hit_rate", "evictions", "requests"):
            assert there[key] == then[key], key
    assert printed(invoke("replay", large, "--json"))["token_hit_rate"] > then["token_hit_rate"] * 0.999


def test_tables_report_and_keys(run: Run, invoke, tmp_path: Path) -> None:
    path, html = tmp_path / "run <b>.jsonl", tmp_path / "report.html"
    assert run("gpt_oss", "--record", path).exit_code == 0
    done = invoke(
        "replay", path, "--policy", "all", "--device", "360KiB,100KiB", "--prefill-speed", "1000", "--html", html
    )
    assert done.exit_code == 0, done.stderr
    assert "recorded under cost in 360.0 KiB" in done.stdout
    assert "cost, 360KiB: same as recorded" in done.stdout
    assert "s3-fifo, 100KiB: other settings than recorded; 5 refused" in done.stdout  # what can never fit
    text = html.read_text(encoding="utf-8")
    assert "same as recorded" in text
    assert "run &lt;b&gt;.jsonl" in text
    assert "<b>.jsonl" not in text
    report = printed(invoke("replay", path, path, "--json"))
    assert report.keys() == {"runs"}
    assert report["runs"][0].keys() | {"runs"} == rows("kvloom replay", "key of a recording")
    assert report["runs"][0]["recording"].keys() == {"name", "policy", "device_bytes", "calls", "finished"}


def test_what_differs_is_named(run: Run, invoke, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    assert run("gpt_oss", "--record", path).exit_code == 0
    lines = path.read_text().splitlines()
    end = json.loads(lines[-1])
    end["kinds"]["window"]["evictions"] += 1
    path.write_text("\n".join([*lines[:-1], json.dumps(end)]) + "\n")
    report = printed(invoke("replay", path, "--json"), code=1)
    count = end["kinds"]["window"]["evictions"]
    assert report["same_as_recorded"] is False
    assert report["difference"] == f"line {len(lines)}: window evictions: recorded {count}, now {count - 1}"
    at = next(i for i, line in enumerate(lines) if '"reused"' in line)
    reused = json.loads(lines[at])["reused"]
    lines[at] = lines[at].replace(f'"reused":{reused}', '"reused":32')
    path.write_text("\n".join(lines) + "\n")
    done = invoke("replay", path)
    assert done.exit_code == 1
    assert f"differs from the recording at line {at + 1}: tokens reused: recorded 32, now {reused}" in done.stdout


def test_existing_files_are_only_replaced_when_asked(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("precious\n")
    done = run("gpt_oss", "--record", path)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "the file exists" in done.stderr
    assert "--force" in done.stderr
    done = run("gpt_oss", "--record", path, "--force", "--device", "90KiB")  # fails before anything was opened
    assert done.exit_code == 2
    assert path.read_text() == "precious\n"
    assert run("gpt_oss", "--record", path, "--force").exit_code == 0
    assert path.read_text().startswith('{"kvloom_recording":1,')
    assert "precious" not in path.read_text()
    fresh = tmp_path / "fresh.jsonl"
    assert run("gpt_oss", "--record", fresh, "--device", "90KiB").exit_code == 2
    assert not fresh.exists()
    assert run("gpt_oss", "--record", fresh).exit_code == 0
    assert fresh.stat().st_mode & 0o777 == 0o600  # it holds what was asked


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("/dev/full", ["/dev/full", "No space left on device after 0 lines", "name another file"]),
        ("/nowhere/run.jsonl", ["/nowhere/run.jsonl", "cannot write there"]),
        (".", ["a directory; name a file"]),
        ("/proc/version", ["the file exists"]),
        ("n" * 300, ["File name too long", "name another file"]),
    ],
)
def test_files_that_cannot_be_written(run: Run, target: str, words: list[str]) -> None:
    done = run("gpt_oss", "--record", target)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.stderr
    for word in words:
        assert word in done.stderr


def test_a_disk_that_fills_up_leaves_whole_lines(
    run: Run, invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers so far are printed, the recording ends with a whole line, and one line says so."""
    path, real = tmp_path / "run.jsonl", os.write

    def write(file: int, raw: Any) -> int:
        room = 20_000 - os.fstat(file).st_size
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, raw[:room])

    monkeypatch.setattr("kvloom.replay.recorder.os.write", write)
    done = run("gpt_oss", "--record", path)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "No space left on device after " in done.stderr
    assert "read in" in done.stdout
    monkeypatch.undo()
    assert path.read_bytes().endswith(b"}\n")
    assert path.stat().st_size <= 20_000
    again = printed(invoke("replay", path, "--json"))
    assert (again["same_as_recorded"], again["recording"]["finished"]) == (None, False)
    assert again["requests"] >= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "gpt-oss-20b"], ["--model is for traces", "leave --model out"]),
        (["--block", "64"], ["--block is for traces"]),
        (["--cache-only"], ["--cache-only is for traces"]),
        (["--device", "5%"], ["device '5%'", "write a size"]),
        (["--device", "1KiB"], ["device: a tier of 1KiB", "at least"]),
        (["--device", "1000TiB"], ["'1000TiB'", "smaller --device"]),
        (["--policy", "best"], ["policy 'best'", "or all"]),
        (["--prefill-speed", "nan"], ["--prefill-speed"]),
        (["--html", "/nowhere/r.html"], ["html /nowhere/r.html"]),
        (["TRACE"], ["is a recording and others are traces"]),
    ],
)
def test_options_that_do_not_apply(recorded: Path, invoke, arguments: list[str], words: list[str]) -> None:
    trace = Path(__file__).parents[1] / "data" / "azure_200.csv"
    done = invoke("replay", recorded, *(trace if word == "TRACE" else word for word in arguments))
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    for word in words:
        assert word in done.stderr


@pytest.fixture
def recorded(run: Run, tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    assert run("gpt_oss", "--record", path).exit_code == 0
    return path


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--policy", "best"], ["policy 'best' is unknown"]),
        (["--policy", "all"], ["policy 'all' is unknown"]),
        (["--force"], ["--record FILE"]),
    ],
)
def test_bad_options_of_the_run(run: Run, more: list[str], words: list[str]) -> None:
    done = run("gpt_oss", *more)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.stderr
    for word in words:
        assert word in done.stderr


def test_ctrl_c_leaves_a_recording_that_replays(model_of, document: Path, tmp_path: Path, invoke) -> None:
    path = tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "kvloom", "run", "--model", model_of("qwen3_next"), "--document", document]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell passes it on as ignored
    process = subprocess.Popen(
        [*map(str, command), *ASKED, "--device", "64MiB", "--max-new-tokens", "3000", "--record", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    assert "tokens of" in process.stdout.readline()  # the document is read, the first answer begins
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1].splitlines()[-1] == "kvloom: error: interrupted"
    assert process.returncode == 130
    assert path.read_bytes().endswith(b"}\n")
    again = printed(invoke("replay", path, "--json"))
    assert (again["same_as_recorded"], again["difference"], again["recording"]["finished"]) == (None, None, False)
    assert again["requests"] in (1, 2)
    assert again["kinds"]["recurrent"]["commits"] > 0
    done = invoke("replay", path)
    assert "the run was interrupted, so there are no final figures to compare" in done.stdout


def test_what_any_engine_does_with_a_watched_model(model_of, tmp_path: Path) -> None:
    """Forks, failing forwards, dropped sessions, salts: through the adapter, as a program uses it."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvloom.adapters.transformers import attach
    from kvloom.adapters.transformers.forward import forward_chunk
    from kvloom.errors import CapacityError
    from kvloom.replay.readers import read_input
    from kvloom.replay.recorder import Recorder
    from kvloom.replay.recording import Recording

    def ids(seed: int, count: int) -> torch.Tensor:
        return torch.randint(0, 96, (1, count), generator=torch.Generator().manual_seed(seed))

    shared = ids(0, 90)
    for family in ("gpt_oss", "deepseek_v4", "qwen3_next"):
        model = AutoModelForCausalLM.from_pretrained(model_of(family)).eval()
        path = tmp_path / f"{family}.jsonl"
        with Recorder(path) as recorder:
            engine = attach(model, device="160KiB", block_size=16, max_sequences=4, watch=recorder)
            for n in range(12):
                prompt = torch.cat([shared[:, : 30 + 5 * (n % 7)], ids(n % 5, 20)], 1)
                session = engine.open(prompt, salt=b"t" * (n % 3 == 2), extra_keys=(("lora", n % 2),) * (n % 4 == 3))
                cache = session.prefill()
                model.generate(prompt, past_key_values=cache, max_new_tokens=5, do_sample=False)
                if n % 3 == 0:
                    with session.fork() as child:
                        forward_chunk(model, ids(n, 3), child.cache, child.length)
                if n % 4 == 1:
                    handle = model.lm_head.register_forward_pre_hook(_fail)
                    with pytest.raises(RuntimeError, match="the forward failed"):
                        model(input_ids=ids(n, 2), past_key_values=session.cache)
                    handle.remove()
                if n % 5 == 4:
                    del session, cache  # dropped without close
                else:
                    session.close()
            with pytest.raises(CapacityError):
                engine.open(ids(1, 4000))
            engine.manager.clear(b"t")
            engine.close()
            recorder.end(engine.manager.stats())
        recording = read_input(path)
        assert isinstance(recording, Recording)
        calls = recording.calls()
        assert set(calls) >= {
            "Open",
            "Append",
            "Commit",
            "Rollback",
            "Checkpoint",
            "Fork",
            "Close",
            "Complete",
            "Clear",
        }
        report = rerun(recording)
        assert (report.same, report.difference, report.refused) == (True, None, 1)
        assert sum(kind.evictions for kind in report.stats.kinds.values()) > 0
        for policy in POLICIES:
            other = rerun(recording, policy=policy)
            assert other.requests == report.requests


def _fail(*_: object) -> None:
    raise RuntimeError("the forward failed")
