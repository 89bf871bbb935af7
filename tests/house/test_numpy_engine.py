"""examples/numpy_engine.py runs, and its arena holds what the tokens say, token for token, whatever is done with it."""

from __future__ import annotations

import importlib.util
import random
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kvloom import CachedSequence, CapacityError, Grade, SequenceError, WrongThreadError

FILE = Path(__file__).parents[2] / "examples" / "numpy_engine.py"
GUIDE = Path(__file__).parents[2] / "docs" / "engine.md"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("numpy_engine", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load()
FULL, POOLED, WINDOW = example.FULL, example.POOLED, example.WINDOW


def check(engine, sequence: CachedSequence, tokens: list[int]) -> None:
    """Everything that attention and the live state of ``tokens`` must hold, computed from the tokens alone."""
    n = len(tokens)
    assert sequence.length == n
    assert sequence.tokens.tolist() == tokens
    state = 0
    for position, token in enumerate(tokens):
        state = (state * 31 + token + 1) % 1_000_003
        for layer in (0, 1):
            assert engine.entry(sequence, FULL, position, layer).tolist() == [[token + layer], [position]]
        if position >= n - 11:
            assert engine.entry(sequence, WINDOW, position, which=0).tolist() == [token * 7]
            assert engine.entry(sequence, WINDOW, position, which=1).tolist() == [token * 11]
    for i in range(n // 4):
        a, b, c, d = tokens[4 * i : 4 * i + 4]
        assert engine.entry(sequence, POOLED, i).tolist() == [a + 50 * b + 2500 * c + 125_000 * d]
    assert engine.view(example.RECURRENT, sequence.live_slot(example.RECURRENT)).tolist() == [state]
    pending = tokens[n // 4 * 4 :]
    assert engine.view(example.PENDING, sequence.live_slot(example.PENDING))[: n % 4].tolist() == pending


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("device", ["24KiB", "96KiB"])
def test_contents_token_for_token(device: str, seed: int) -> None:
    rng = random.Random(seed)
    engine = example.Engine(device)
    stems = [[rng.randrange(50) for _ in range(60)] for _ in range(3)]
    running: list[tuple[CachedSequence, list[int]]] = []
    hits = done = 0
    for _ in range(120):
        step = rng.random()
        try:
            if step < 0.3 or not running:
                prompt = [*rng.choice(stems)[: rng.randrange(1, 60)], *(rng.randrange(50) for _ in range(5))]
                sequence = engine.open(np.array(prompt), salt=rng.choice([b"", b"a"]), floor=rng.choice(list(Grade)))
                running.append((sequence, prompt[: sequence.reused]))
                check(engine, *running[-1])
                hits += sequence.reused > 0
                engine.prefill(sequence, np.array(prompt))
                running[-1] = (sequence, prompt)
            elif step < 0.45:
                sequence, tokens = rng.choice(running)
                child, plan = sequence.fork()
                engine.run(plan)
                running.append((child, list(tokens)))
            elif step < 0.7:
                chosen = rng.sample(running, rng.randrange(1, len(running) + 1))
                first = [rng.randrange(50) for _ in chosen]
                answers = engine.decode([s for s, _ in chosen], first, count := rng.randrange(1, 20))
                for (_, tokens), token, answer in zip(chosen, first, answers, strict=True):
                    tokens += [token, *answer[: count - 1]]
            elif step < 0.8:
                sequence, _ = rng.choice(running)
                plan = sequence.checkpoint()
                engine.manager.abandon(plan) if rng.random() < 0.5 else engine.run(plan)
            else:
                sequence, tokens = running.pop(rng.randrange(len(running)))
                check(engine, sequence, tokens)
                engine.close(sequence)
            for sequence, tokens in running:
                check(engine, sequence, tokens)
            done += 1
        except CapacityError:  # a decode may have got some steps further, so start again
            while running:
                running.pop()[0].close()
        engine.manager.check_integrity()
    assert done > 60
    assert hits > 5
    assert sum(kind.evictions for kind in engine.manager.stats().kinds.values()) > 10 * (device == "24KiB")


def test_what_errors_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = example.Engine()
    prompt = np.arange(40)
    sequence = engine.manager.open(prompt)
    with pytest.raises(SequenceError, match="restore plan was not completed"):
        sequence.append(prompt[:16])
    engine.run(sequence.restore)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "forward", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.extend(sequence, prompt[:16])
    assert sequence.broken  # a live state may be half written
    with pytest.raises(SequenceError, match="close the sequence"):
        sequence.append(prompt[:16])
    sequence.close()

    sequence = engine.open(prompt)
    assert sequence.reused == 0
    engine.prefill(sequence, prompt)
    child, plan = sequence.fork()
    engine.manager.abandon(plan)
    assert child.broken
    child.close()
    check(engine, sequence, prompt.tolist())
    with pytest.raises(CapacityError, match="no room to append") as caught:
        engine.run(sequence.append(np.arange(2000) % 50))
    assert not caught.value.never_fits or caught.value.needed > caught.value.cap
    check(engine, sequence, prompt.tolist())
    assert engine.decode([sequence], [7], 3)
    engine.close(sequence)
    engine.manager.check_integrity()


def test_another_thread_is_refused() -> None:
    from concurrent.futures import ThreadPoolExecutor

    engine = example.Engine()
    with ThreadPoolExecutor(1) as pool, pytest.raises(WrongThreadError):
        pool.submit(engine.open, np.arange(5)).result()


def test_it_runs_as_it_stands() -> None:
    code = f"import runpy, sys; runpy.run_path({str(FILE)!r}, run_name='__main__'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=590)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "False"
    assert [line for line in lines if "same" in line] == [lines[1], lines[3], lines[5]]
    assert all("the same as cold" in lines[i] for i in (1, 3, 5))
    assert "canonical hit: 96 of 102" in lines[2]
    assert "faithful hit: 101 of 102" in lines[4]
    shown = re.search(r"```\n(first: .*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    assert shown.group(1).splitlines() == lines[:-1]
