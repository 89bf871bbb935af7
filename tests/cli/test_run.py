"""``kvloom run`` on a tiny model directory: hits, explanations, and every kind of bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from kvloom.cli.run_report import sentence
from kvloom.plan import MEANING
from kvloom.types import Reason

QUESTIONS = ("--question", "What jumps?", "--question", "Over what does it jump?")
SMALL = ("--device", "8MiB", "--block-size", "64", "--max-new-tokens", "8")


def run(invoke, model: Path, document: Path, *more: object):
    return invoke("run", "--model", model, "--document", document, *QUESTIONS, *SMALL, *more)


def test_json(invoke, model_dir: Path, document: Path) -> None:
    done = run(invoke, model_dir, document, "--json", "--explain")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    document_tokens = report["document"]["tokens"]
    assert document_tokens > 3 * 64
    assert report["floor"] == "faithful"
    assert set(report["kinds"]) == {"compressed", "window"}
    for answer in report["answers"]:
        assert answer["reused_tokens"] == document_tokens
        assert answer["grade"] == "faithful"
        assert answer["generated_tokens"] == 8
        found = answer["explanation"]
        assert found["boundary"] == answer["reused_tokens"]
        assert [limit["reason"] for limit in found["limits"]] == ["tokens"]
        assert found["limits"][0]["position"] == document_tokens
        _check_ranges(answer, segment=64)


def _check_ranges(answer: dict[str, Any], segment: int) -> None:
    """Every group's ranges follow each other up to the last token that was computed; windows lack their past."""
    computed = answer["prompt_tokens"] + answer["generated_tokens"] - 1
    for group in {piece["group"] for piece in answer["ranges"]}:
        mine = [piece for piece in answer["ranges"] if piece["group"] == group]
        assert [piece["begin"] for piece in mine] == [0, *(piece["end"] for piece in mine[:-1])]
        assert mine[-1]["end"] == computed
        grades = [piece["grade"] for piece in mine if piece["form"] != "absent"]
        if mine[0]["kind"] == "compressed":
            assert grades == ["canonical", "faithful"]
            assert mine[-1]["begin"] == answer["reused_tokens"] // segment * segment
        else:  # the document's end replaced the last window of its whole segments
            assert mine[0]["form"] == "absent"
            assert grades in (["faithful"], ["canonical", "faithful"])


def test_floor_canonical_reuses_whole_segments(invoke, model_dir: Path, document: Path) -> None:
    report = json.loads(run(invoke, model_dir, document, "--json", "--floor", "canonical").stdout)
    for answer in report["answers"]:
        assert answer["reused_tokens"] == report["document"]["tokens"] // 64 * 64
        assert answer["grade"] == "canonical"
        assert "explanation" not in answer


def test_floors_agree_on_the_answer(invoke, model_dir: Path, document: Path) -> None:
    texts = [
        [a["answer"] for a in json.loads(run(invoke, model_dir, document, "--json", "--floor", f).stdout)["answers"]]
        for f in ("canonical", "faithful")
    ]
    assert texts[0] == texts[1]


def test_text(invoke, model_dir: Path, document: Path) -> None:
    done = run(invoke, model_dir, document, "--explain", "And who rests?")
    assert done.exit_code == 0, done.stderr
    assert "tokens reused" in done.stdout
    assert "stopped at" in done.stdout
    assert "compressed (full), tokens 0 to 512: uncompressed, canonical" in done.stdout
    assert "And who rests?" in done.stdout


def test_every_reason_has_asentence() -> None:
    assert set(MEANING) == set(Reason)
    said = sentence({"reason": "evicted", "position": 640, "tier": "device", "kind": "window", "group": "window.32"})
    assert said == "stopped at 640 in tier device, window (window.32): dropped to make room"


def test_config_file_and_notices(invoke, model_dir: Path, document: Path, tmp_path: Path) -> None:
    config = tmp_path / "cache.yaml"
    config.write_text("kv_cache_config:\n  gpu_watermark: 0.8\n  compression: {enabled: true, method: fp8}\n")
    done = run(invoke, model_dir, document, "--json", "--config", config)
    assert json.loads(done.stdout)["floor"] == "approximate"
    notes = done.stderr.splitlines()
    assert [n.split(":")[0] for n in notes] == ["kvloom"] * 2
    assert all(n.startswith("kvloom: note: ") for n in notes)
    done = run(invoke, model_dir, document, "--config", tmp_path / "none.yaml")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)


def _write(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


BAD_DOCUMENTS = {
    "missing": (None, "No such file"),
    "empty": (b"", "empty"),
    "blank": (b" \n\t\n", "empty"),
    "binary": (b"\x7fELF\x02\xff\xfe", "not UTF-8"),
    "nul": (b"text\0text", "NUL"),
}


@pytest.mark.parametrize("case", BAD_DOCUMENTS)
def test_bad_documents(invoke, model_dir: Path, tmp_path: Path, case: str) -> None:
    raw, words = BAD_DOCUMENTS[case]
    path = tmp_path / "document.txt"
    if raw is not None:
        path.write_bytes(raw)
    done = run(invoke, model_dir, path)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_directory_is_not_a_document(invoke, model_dir: Path, tmp_path: Path) -> None:
    done = run(invoke, model_dir, tmp_path)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)


def test_unicode_documents_work(invoke, model_dir: Path, tmp_path: Path) -> None:
    path = _write(tmp_path / "документ.txt", "\ufeffЁж — naïve 文字 🎉 mixed with words. ".encode() * 20)
    assert run(invoke, model_dir, path).exit_code == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--device", "64KiB"], "KiB or more"),
        (["--device", "lots"], "--device 'lots': "),
        (["--floor", "superb"], "canonical, faithful, approximate"),
        (["--question", "  "], "a question is empty"),
        (["--max-new-tokens", "5000"], "the model allows 4096"),
        (["--segment", "100"], "segment"),
        (["--on", "warp"], "warp"),
        (["--on", "meta"], "meta"),
        (["--device", "9" * 400 + "TiB"], "1024 TiB"),
        (["--block-size", "9" * 30], "--block-size 999"),
        (["--device", "1000TiB"], "use a smaller --device"),
        (["--dtype", "int3"], "int3"),
    ],
)
def test_bad_options(invoke, model_dir: Path, document: Path, more: list[str], words: str) -> None:
    done = run(invoke, model_dir, document, *more, "--json")
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert words in json.loads(done.stdout)["error"]["message"]


def test_a_cap_below_one_request_says_how_much_is_needed(invoke, model_dir: Path, document: Path) -> None:
    done = run(invoke, model_dir, document, "--device", "256KiB", "--max-new-tokens", "2000")
    assert done.exit_code == 2
    assert "needs" in done.stderr
    assert "--device" in done.stderr


def test_bad_model_directories(invoke, model_dir: Path, document: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    cases = [(tmp_path / "none", "no such"), (bare, "config.json")]
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    config = json.loads((model_dir / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "layer_types": ["quantum_attention"] * 4}))
    cases += [(broken, "config.json"), (unknown, "quantum_attention")]
    for path, words in cases:
        done = run(invoke, path, document)
        assert done.exit_code == 2, path
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_ctrl_c(model_dir: Path, document: Path) -> None:
    """SIGINT in the middle of an answer: exit 130, one line, no traceback."""
    command = [sys.executable, "-m", "kvloom", "run", "--model", model_dir, "--document", document, "--question", "?"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell passes it on as ignored
    process = subprocess.Popen(
        [*map(str, command), "--device", "64MiB", "--max-new-tokens", "3000"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    assert "tokens of" in process.stdout.readline()  # the document is read, the answer begins
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "kvloom: error: interrupted"
    assert "reused" not in out
