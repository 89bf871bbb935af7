"""``--store DIR`` of ``run`` and ``verify-model``, in processes that come after each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from kvloom.engine.stores import CAPACITY
from kvloom.tiers.disk import DiskStore

SMALL = ("--device", "8MiB", "--block-size", "64", "--max-new-tokens", "8")
QUESTION = ("--question", "What jumps?")


def again(*arguments: object) -> dict[str, Any]:
    """The JSON of a command in a process of its own."""
    command = [sys.executable, "-m", "kvloom", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def printed(done: Any) -> dict[str, Any]:
    assert done.exit_code == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_new_process_resumes_from_disk(invoke, model_of, document: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    asked = ["run", "--model", model_of("qwen3_next"), "--document", document, *QUESTION, *SMALL, "--store", store]
    first = printed(invoke(*asked, "--json"))
    second = again(*asked)
    tokens = first["document"]["tokens"]
    kinds = {"compressed", "recurrent"}
    assert first["document"]["reused_tokens"] == first["document"]["restored_bytes"] == 0
    assert first["store"]["kinds"].keys() == second["store"]["kinds"].keys() == kinds
    for kind in kinds:
        assert first["store"]["kinds"][kind]["bytes_loaded"] == second["store"]["kinds"][kind]["bytes_stored"] == 0
        assert first["store"]["kinds"][kind]["bytes_stored"] > 0
        assert second["store"]["kinds"][kind]["bytes_loaded"] > 0
    assert (first["store"]["directory"], first["store"]["capacity_bytes"]) == (str(store), CAPACITY)
    assert second["document"]["reused_tokens"] == (tokens - 1) // 64 * 64
    assert second["document"]["restored_bytes"] > 0
    (one,), (other,) = first["answers"], second["answers"]
    assert (one["answer"], one["generated_tokens"]) == (other["answer"], other["generated_tokens"])
    assert (one["reused_tokens"], one["restored_bytes"]) == (tokens, 0)
    assert (other["reused_tokens"], other["grade"]) == (other["prompt_tokens"] - 1, "faithful")
    assert other["restored_bytes"] > 0
    restored = second["document"]["restored_bytes"] + other["restored_bytes"]
    assert restored == sum(kind["bytes_loaded"] for kind in second["store"]["kinds"].values())
    assert second["store"]["failed"] == second["store"]["not_stored"] == {}
    assert (second["store"]["loads"], second["store"]["stores"], second["store"]["problem"]) == (2, 0, None)

    done = invoke(*asked, "--store-size", "64MiB")
    assert done.exit_code == 0, done.stderr
    assert f"{second['document']['reused_tokens']:,} of them restored (" in done.stdout
    assert " KiB restored)" in done.stdout
    lines = done.stdout.splitlines()
    at = lines.index(f"store {store}, cap 64.0 MiB:")
    assert lines[at + 1].startswith("  loaded ")
    assert "recurrent " in lines[at + 1]
    assert lines[at + 2] == "  stored 0 B"
    assert (done.stdout.count("  loaded "), done.stdout.count("  stored ")) == (1, 1)
    assert lines[-1].startswith("ways to the state of a prompt: ")
    with DiskStore.open(store) as opened:
        assert opened.contents().capacity == 64 << 20
    printed(invoke(*asked, "--json"))
    with DiskStore.open(store) as opened:
        assert opened.contents().capacity == 64 << 20  # it keeps the cap that it has


def test_what_the_document_lacks_only_for_its_grade_is_said(
    invoke, model_dir: Path, document: Path, tmp_path: Path
) -> None:
    config, store = tmp_path / "cache.yaml", tmp_path / "store"
    config.write_text("kv_cache_config: {compression: {enabled: true, method: fp8}}\n")
    asked = ["run", "--model", model_dir, "--document", document, *QUESTION, *SMALL, "--store", store]
    first = printed(invoke(*asked, "--config", config, "--json"))
    assert first["floor"] == "approximate"
    assert {form["form"] for form in first["forms"]} == {"fp8"}
    slots = sum(kind["bytes_stored"] for kind in first["store"]["kinds"].values())
    done = invoke(*asked, "--explain")
    assert done.exit_code == 0, done.stderr
    head, *limits = done.stdout.partition("\n\n")[0].splitlines()
    assert "read in" in head
    assert "  stopped at 0 in tier disk, compressed (full): its grade is below the floor" in limits
    done = invoke(*asked, "--explain", "--config", config, "--floor", "faithful")
    assert "would never reuse it, so state is kept in exact forms" in done.stderr
    lines = done.stdout.splitlines()
    assert "restored (" in lines[0], "the run before kept exact state in place of fp8"
    forms = [line for line in lines if line.startswith("forms of cold objects: ")]
    assert len(forms) == 1
    assert "fp8" not in forms[0]
    again = printed(invoke(*asked, "--json"))
    assert again["forms"] == []
    assert sum(kind["bytes_loaded"] for kind in again["store"]["kinds"].values()) > slots / 2
    assert "explanation" not in again["document"]


def test_verify_model_in_two_processes(invoke, model_of, tmp_path: Path) -> None:
    store = tmp_path / "store"
    asked = ["verify-model", model_of("qwen3_next") / "config.json", "--random-init", "--tokens", "110"]
    asked += ["--block-size", "32", "--segment", "32", "--store", store]
    first, second = printed(invoke(*asked, "--store-size", "32MiB", "--json")), again(*asked)
    assert (first["verdict"], second["verdict"]) == ("exact", "exact")
    assert first["store"].keys() == second["store"].keys() == {"directory", "found", "stored", "failed", "evicted"}
    assert (first["store"]["directory"], first["store"]["found"]) == (str(store), {})
    assert second["store"]["found"].keys() == second["kinds"].keys() == {"compressed", "recurrent"}
    for kind in second["kinds"].values():
        assert kind["bytes_restored"]["disk"] > 0
    assert {b["scenario"] for b in second["boundaries"]} >= {"omission", "disk"}
    with DiskStore.open(store) as opened:
        assert opened.capacity == 32 << 20
        assert len({unit.root for unit in opened.units()}) == 1  # a namespace of its own


def test_bad_stores(invoke, model_dir: Path, document: Path, tmp_path: Path) -> None:
    file, full = tmp_path / "file", tmp_path / "full"
    file.write_text("words")
    full.mkdir()
    (full / "letters").write_text("words")
    cases = [
        (["--store", file], "is not a directory"),
        (["--store", full], "holds 'letters'"),
        (["--store", "/proc/nowhere"], "cannot be used as a store"),
        (["--store", tmp_path / "new", "--store-size", "lots"], "--store-size 'lots': size 'lots'"),
        (["--store", tmp_path / "new", "--store-size", "1KiB"], "use at least"),
        (["--store-size", "1GiB"], "--store DIR, which is not given"),
    ]
    run = ["run", "--model", model_dir, "--document", document, *QUESTION, *SMALL]
    verify = ["verify-model", model_dir, "--block-size", "32", "--segment", "32"]
    for arguments in (run, verify):
        for more, words in cases:
            done = invoke(*arguments, *more, "--json")
            report = json.loads(done.stdout)
            assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.stderr
            assert words in done.stderr
            assert words in report["error"]["message"]
            assert ("verdict" in report) is (arguments is verify)
    assert not (tmp_path / "new").exists()
    assert sorted(path.name for path in full.iterdir()) == ["letters"]


def test_a_recording_does_not_cover_a_store(invoke, model_dir: Path, document: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from kvloom.adapters.transformers import attach
    from kvloom.errors import UnsupportedError
    from kvloom.replay.recorder import Recorder

    file, store = tmp_path / "run.jsonl", tmp_path / "store"
    asked = ["run", "--model", model_dir, "--document", document, *QUESTION, "--record", file, "--store", store]
    done = invoke(*asked)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "cannot be recorded; give --record, or --host and --store" in done.stderr
    assert not file.exists()
    assert not store.exists()
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    with (
        DiskStore.open(store, 16 << 20) as opened,
        Recorder(file) as recorder,
        pytest.raises(UnsupportedError, match="either tiers or a watch"),
    ):
        attach(model, store=opened, watch=recorder)
