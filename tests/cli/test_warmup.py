"""``kvloom warmup``: afterwards no process compiles anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.replay.plain import CONVERSATION

PROGRAM = """
import sys
from pathlib import Path
from kvloom.core import compiled
from kvloom.manager.warmup import warm_up
assert compiled.complete()
warm_up()
known = {f: set(f.signatures) for f in compiled.functions()}
from kvloom.replay.runs import ReplayOptions, replay
from kvloom.replay.readers import read_trace
from kvloom.replay.sizes import DeviceSize
trace = read_trace(Path(sys.argv[1]))
for model in ("gpt-oss-20b", "kimi-linear-48b"):
    for cache_only in (False, True):
        replay(trace, ReplayOptions(model, (DeviceSize.parse("3%"),), cache_only=cache_only))
try:
    import torch
except ImportError:
    pass
else:
    from kvloom.adapters.transformers import attach
    from kvloom.testing.families import random_model, tiny_config
    for family in ("gpt_oss", "deepseek_v4", "lfm2"):
        model = random_model(tiny_config(family), seed=0)
        with attach(model, device="1MiB", block_size=16) as engine:
            for start in (0, 0, 1, 2):
                prompt = [*range(start, start + 75)]
                with engine.open(prompt) as session, session.fork():
                    cache = session.prefill()
                    model.generate(torch.tensor([prompt]), past_key_values=cache, max_new_tokens=4)
print(compiled.compilations(), [f.py_func.__name__ for f in compiled.functions() if set(f.signatures) - known[f]])
"""


def test_a_second_process_compiles_nothing() -> None:
    """Not in the warm-up, and nothing that serving goes through is unknown to the warm-up."""

    def process(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=500).stdout

    process("-m", "kvloom", "warmup")
    report = json.loads(process("-m", "kvloom", "warmup", "--json"))
    assert report["compiled"] == 0
    assert report["cache"]
    assert process("-c", PROGRAM, str(CONVERSATION)) == "0 []\n"


def _machine_code(folder: str) -> dict[str, tuple[int, int]]:
    """What is kept on disk of the core: size and time of every file."""
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in Path(folder).glob("*.nb[ic]")}


def test_replays_of_a_hybrid_model_write_no_machine_code(tmp_path: Path) -> None:
    """Every policy and both ways of it, in processes of their own: everything was on disk before."""

    def command(*arguments: object) -> str:
        asked = [sys.executable, "-m", "kvloom", *map(str, arguments), "--json"]
        done = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=500)
        assert "compiling" not in done.stderr
        return done.stdout

    subprocess.run([sys.executable, "-m", "kvloom", "warmup"], check=True, capture_output=True, timeout=500)
    folder = json.loads(command("warmup"))["cache"]
    before = _machine_code(folder)
    assert len(before) > 100
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(CONVERSATION.read_text().splitlines(keepends=True)[:40]))
    for model in ("gpt-oss-20b", "qwen3-next-80b", "deepseek-v4-flash"):
        for more in ((), ("--cache-only",)):
            command("replay", trace, "--model", model, "--device", "10%", "--policy", "all", *more)
    assert _machine_code(folder) == before


def test_the_first_compilation_is_announced_and_can_be_interrupted(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell passes it on as ignored
    process = subprocess.Popen(
        [sys.executable, "-m", "kvloom", "replay", CONVERSATION, "--model", "llama-3.1-8b", "--device", "5%", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
    )
    signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("kvloom: note: compiling the core, once per installation")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2)  # in the middle of it
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "kvloom: error: interrupted\n")
    assert process.returncode == 130
