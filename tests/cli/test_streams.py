"""Outputs that cannot be written, cannot say everything, or are not read; inputs that never end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

KVLOOM = [sys.executable, "-m", "kvloom"]


def shell(line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which $K is the command."""
    return subprocess.run(
        ["bash", "-c", line.replace("$K", f'"{sys.executable}" -m kvloom')],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **variables},
    )


@pytest.mark.parametrize("arguments", ["spec gpt-oss-20b", "spec gpt-oss-20b --json", "--version", "spec --help"])
def test_a_full_disk(arguments: str) -> None:
    done = shell(f"$K {arguments} > /dev/full")
    assert done.returncode == 74
    assert done.stderr.startswith("kvloom: error: cannot write the output: No space left on device")
    assert done.stderr.count("\n") == 1


def test_nobody_hears_errors_either() -> None:
    assert shell("$K spec nonsense 2> /dev/full").returncode == 2
    assert shell("$K spec nonsense 2>&-; test $? = 2").returncode == 0
    assert shell("$K spec gpt-oss-20b >&-").stderr == ""


def test_a_reader_that_goes_away() -> None:
    """However much it wrote before: nothing is said, and the exit code is that of SIGPIPE."""
    gone = "(exec 3>&1; sleep 0.01) "
    for arguments in ("spec deepseek-v4-pro", "spec deepseek-v4-pro --json", "spec --help"):
        done = shell(f"set -o pipefail; (sleep 1; $K {arguments}) | {gone}; exit $?")
        assert (done.returncode, done.stderr) == (141, "")
    done = shell("(sleep 1; $K spec nonsense 2>&1; echo $? >&3) 3>&2 | true")
    assert done.stderr == "2\n"


def test_an_encoding_that_lacks_characters(tmp_path: Path) -> None:
    done = shell("$K spec deepseek-v4-flash", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "32 x 4" in done.stdout
    assert "csa.indexer" in done.stdout
    path = tmp_path / "модель.json"
    path.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": "×"}))
    done = shell(f"$K spec '{path}' --json", PYTHONIOENCODING="ascii")
    assert done.returncode == 2
    assert "×" in json.loads(done.stdout)["error"]["message"]
    assert "it is 'x'" in done.stderr


def test_a_pipe_is_not_cut_and_columns_are_obeyed() -> None:
    done = shell("$K spec deepseek-v4-flash; COLUMNS=40 $K spec deepseek-v4-flash | wc -L")
    lines = done.stdout.splitlines()
    assert any("128 tokens = 32 × 4" in line and "compressed" in line and "383.25 KiB" in line for line in lines)
    assert int(lines[-1]) <= 40


@pytest.mark.timeout(120)
def test_inputs_without_end(invoke, tmp_path: Path) -> None:
    pipe, huge = tmp_path / "pipe", tmp_path / "huge.json"
    os.mkfifo(pipe)
    with huge.open("wb") as file:
        file.truncate(3 << 30)
    replay = ["--model", "llama-3.1-8b", "--device", "5%"]
    asked = ["--model", tmp_path, "--question", "?", "--document"]
    cases = [
        (["spec", "/dev/zero"], "a device"),
        (["spec", pipe], "a pipe"),
        (["spec", huge], "larger than"),
        (["spec", tmp_path], "no config.json"),
        (["replay", "/dev/zero", *replay], "a device"),
        (["replay", huge, *replay], "line 1: longer than"),
        (["run", *asked, "/dev/zero"], "a device"),
        (["run", *asked, huge], "use a smaller file"),
        (["run", *asked, pipe], "it is empty"),
        (["run", *asked, huge, "--config", huge], "config"),
        (["verify-model", "/dev/zero"], "a device"),
        (["verify-model", pipe, "--random-init"], "a pipe"),
    ]
    for arguments, words in cases:
        done = invoke(*arguments)
        assert done.exit_code == 2, arguments
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_pipes_with_an_end_are_read(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 64}))
    trace = Path(__file__).parents[1] / "data" / "azure_200.csv"
    done = shell(
        f"$K spec <(cat '{config}') --json && $K replay <(cat '{trace}') --model llama-3.1-8b --device 5% --json"
    )
    assert done.returncode == 0, done.stderr
    assert '"layers": 2' in done.stdout
    assert '"requests": 200' in done.stdout


@pytest.mark.parametrize("delay", [0.1, 0.4, 1.0, 1.6])
def test_ctrl_c_while_importing(delay: float) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell passes it on as ignored
    probe = "import kvloom.cli.interrupts as i; i.install(); print(flush=True); import transformers.models.auto, time"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{probe}; import transformers.modeling_utils; time.sleep(60)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "kvloom: error: interrupted\n")
    assert process.returncode == 130


def test_ctrl_c_removes_what_is_to_be_removed(tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.mkdir()
    probe = (
        "import shutil, sys, time, kvloom.cli.interrupts as i\ni.install()\n"
        "with i.cleaning(lambda: shutil.rmtree(sys.argv[1])):\n    print(flush=True); time.sleep(60)"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell passes it on as ignored
    process = subprocess.Popen(
        [sys.executable, "-c", probe, left], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "kvloom: error: interrupted\n")
    assert process.returncode == 130
    assert not left.exists()
