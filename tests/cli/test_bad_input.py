"""What is wrong with a command line is said in one line that names the option and says how to mend it; exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

TRACE = {"timestamp": 0, "input_length": 1000, "output_length": 10, "hash_ids": [1, 2]}


def refused(done, *words: str) -> None:
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("kvloom: error: ")
    for word in words:
        assert word in done.stderr, done.stderr


RUN = [
    (["--device", "lots"], ["--device 'lots': ", "such as '512MiB'", "default: 512MiB"]),
    (["--device", "-5"], ["--device '-5': ", "such as '512MiB'"]),
    (["--device", "1KiB"], ["device: a tier of 1KiB cannot hold", "give it at least", "KiB"]),
    (["--host", "0"], ["--host '0': ", "such as '512MiB'"]),
    (["--host", "5"], ["host: a tier of 5B is too small; use at least 256KiB"]),
    (["--host", "900TiB"], ["host: ", "use a smaller size"]),
    (["--store", "new", "--store-size", "1KiB"], ["--store-size '1KiB': ", "use at least 8MiB"]),
    (["--store", "new", "--store-size", "lots"], ["--store-size 'lots': "]),
    (["--floor", "great"], ["--floor 'great': ", "canonical, faithful, approximate"]),
    (["--policy", "nope"], ["policy 'nope'", "use one of"]),
    (["--block-size", "0"], ["--block-size 0: ", "greater than or equal to 1"]),
    (["--segment", "7"], ["segment: 7", "use 64 or 128"]),
    (["--dtype", "int8"], ["--dtype 'int8'", "use one of"]),
    (["--on", "mars"], ["--on 'mars'", "use cpu"]),
    (["--on", "cuda:99"], ["--on 'cuda:99'", "use cpu"]),
    (["--config", "nowhere.yaml"], ["config nowhere.yaml: ", "name a text file"]),
    (["--record", "no/where.jsonl"], ["--record no/where.jsonl: ", "name a file"]),
]


@pytest.mark.parametrize(("options", "words"), RUN, ids=[" ".join(options) for options, _ in RUN])
def test_run(invoke, model_dir: Path, document: Path, tmp_path: Path, monkeypatch, options, words) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["--model", model_dir, "--document", document, "--question", "Why?"]
    small = [] if "--block-size" in options else ["--block-size", "64"]
    refused(invoke("run", *asked, *small, *options), *words)
    assert not (tmp_path / "new").exists()


def test_settings_that_are_no_options(invoke, model_dir: Path, document: Path, tmp_path: Path, monkeypatch) -> None:
    asked = ["run", "--model", model_dir, "--document", document, "--question", "Why?"]
    config = tmp_path / "cache.yaml"
    for text, words in (
        ("host: 5", ["host: a tier of 5B is too small; use at least 256KiB"]),
        ("host: lots", [f"{config}: host = 'lots'", "such as '512MiB'"]),
        ("floor: 3", [f"{config}: floor = 3", "canonical, faithful, approximate"]),
    ):
        config.write_text(f"kv_cache_config: {{{text}}}\n")
        refused(invoke(*asked, "--config", config), *words)
    monkeypatch.setenv("KVLOOM_HOST", "lots")
    refused(invoke(*asked), "environment variable KVLOOM_HOST: host = 'lots'", "such as '512MiB'")


REPLAY = [
    (["--device", "lots"], ["--device 'lots': "]),
    (["--device", "0"], ["--device '0': "]),
    (["--device", "0%"], ["--device '0%'", "such as 10%"]),
    (["--device", "5%,,6%"], ["--device '': "]),
    (["--device", "1KiB"], ["device: a tier of 1KiB cannot hold", "give it at least 64MiB"]),
    (["--device", "1GiB", "--host", "0"], ["--host '0': "]),
    (["--device", "1GiB", "--host", "1KiB"], ["--host 1KiB: too small; a host tier needs at least 256KiB"]),
    (["--device", "1GiB", "--disk", "lots"], ["--disk 'lots': "]),
    (["--device", "1GiB", "--disk", "1KiB"], ["--disk 1KiB: too small; a disk tier needs at least 8MiB"]),
    (["--device", "1GiB", "--host", "1GiB", "--host-speed", "0"], ["--host-speed 0 is not above 0"]),
    (["--device", "1GiB", "--prefill-speed", "0"], ["--prefill-speed 0 is not above 0"]),
    (["--device", "1GiB", "--html", "no/where.html"], ["--html no/where.html: ", "name a file"]),
]


@pytest.mark.parametrize(("options", "words"), REPLAY, ids=[" ".join(options) for options, _ in REPLAY])
def test_replay(invoke, tmp_path: Path, options: list[str], words: list[str]) -> None:
    if "--html" in options:
        pytest.importorskip("plotly")
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(TRACE) + "\n")
    refused(invoke("replay", trace, "--model", "llama-3.1-8b", *options), *words)


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "gc", "clear", "export", "import"])
def test_stores_that_are_not_there(invoke, tmp_path: Path, command: str) -> None:
    more = {"export": [tmp_path / "a"], "import": [tmp_path / "a", "--capacity", "16MiB"], "clear": ["--yes"]}
    done = invoke("store", command, tmp_path / "nope", *more.get(command, []))
    if command == "import":
        refused(done, f"{tmp_path / 'a'} cannot be read", "name an archive")
    else:
        refused(done, f"store {tmp_path / 'nope'}: there is no such directory; name one")


def test_store_import(invoke, tmp_path: Path) -> None:
    for size, words in (("lots", "--capacity 'lots': "), ("1KiB", "use at least 8MiB")):
        refused(invoke("store", "import", tmp_path / "new", tmp_path / "a", "--capacity", size), words)
    assert not (tmp_path / "new").exists()


BENCH = [
    (["tables", "--device", "lots"], ["--device 'lots': "]),
    (["tables", "--device", "5"], ["device: a tier of 5B cannot hold"]),
    (["data", "--size", "lots"], ["--size 'lots': "]),
    (["data", "--size", "100MiB"], ["--size 100MiB: use a multiple of 128MiB"]),
    (["data", "--output", "."], ["--output .: a directory; name a file"]),
    (["core", "--output", "."], ["--output .: a directory; name a file"]),
    (
        ["core", "--output", "/proc/nope/core.json"],
        ["--output /proc/nope/core.json: cannot write there", "name a file"],
    ),
    (["sessions", "--family", "llama"], ["--family 'llama'", "use one of"]),
    (["sessions", "--share", "nan"], ["--share 'nan'", "such as 0.25,0.125"]),
    (["sessions", "--host", "inf"], ["'--host'"]),
]


@pytest.mark.parametrize(("arguments", "words"), BENCH, ids=[" ".join(arguments) for arguments, _ in BENCH])
def test_bench(invoke, arguments: list[str], words: list[str]) -> None:
    """Before anything is measured."""
    refused(invoke("bench", *arguments), *words)


def test_verify_model(invoke, model_dir: Path, tmp_path: Path) -> None:
    for options, words in (
        (["--device", "mars"], ["--device 'mars'", "use cpu"]),
        (["--dtype", "int8"], ["--dtype 'int8'", "use one of"]),
        (["--seed", "-1"], ["--seed", "0 to 4294967295"]),
        (["--store", tmp_path / "new", "--store-size", "1KiB"], ["--store-size '1KiB'", "use at least 8MiB"]),
    ):
        done = invoke("verify-model", model_dir, *options)
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
        for word in words:
            assert word in done.stderr
    assert not (tmp_path / "new").exists()
