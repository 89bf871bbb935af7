"""Every way back measured where it could be taken, beside what the planner took: disk speed by context by model.

The models are tiny and random, and of different shapes: short windows (a replay is cheap), many windows (a replay is
long), wide layers (computing is slow).  The disk is a store whose reads sleep until a disk of the given speed would
have been done.  In every cell the planner's own runs and forced runs of each way take turns, computing twice.  A little
work that is not measured goes before each: after waiting for a slow disk a core is slow for a while, and what comes
next would pay for it.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvloom.adapters.transformers import Engine, attach
from kvloom.adapters.transformers.forward import forward_chunk
from kvloom.adapters.transformers.recovering import Recoverer
from kvloom.bench.recovery_cells import Cell, Result
from kvloom.manager.ways import Way
from kvloom.testing.families import random_model, tiny_config
from kvloom.tiers.disk import DiskStore
from kvloom.tiers.disk.files import FileOps
from kvloom.types import Kind

SEGMENT, BLOCK = 64, 16
LATENCY_S, AWAKE_S = 5e-4, 0.03
Report = Callable[[str, int, int], None]

_SLIDING = "sliding_attention"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "short windows": ("gpt_oss", {}),
    "many windows": (
        "gemma3",
        {
            "layer_types": [*["sliding_attention"] * 5, "full_attention", *["sliding_attention"] * 2],
            "sliding_window": 80,
        },
    ),
    "wide layers": (
        "ministral",
        {
            "hidden_size": 384,
            "intermediate_size": 1024,
            "layer_types": [_SLIDING, "full_attention"] * 2,
            "sliding_window": 64,
        },
    ),
}
CONTEXTS = (192, 384, 768, 1536)
SPEEDS = (0.25e6, 1e6, 4e6, 32e6, 256e6)
"""Bytes per second."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is measured.

    Attributes:
        models, contexts, speeds: the cells are all combinations, once with the compressed state on the device and
            the windows lost, once with an empty device.
        rounds: turns of every way in every cell, at least.
        cell_s: seconds of a cell; a short one gets up to ``MOST_ROUNDS`` turns in that time.
    """

    models: tuple[str, ...] = tuple(MODELS)
    contexts: tuple[int, ...] = CONTEXTS
    speeds: tuple[float, ...] = SPEEDS
    rounds: int = 7
    cell_s: float = 3.0


MOST_ROUNDS, MOST_TOKENS = 31, 4096
SHORT = Sweep(("short windows",), (192, 768), (0.25e6, 256e6), 3, 0.0)
"""For a quick check that all of it works."""


class SlowReads(FileOps):
    """Files of a disk that reads ``speed`` bytes per second (None: as it is), one read after the other."""

    def __init__(self) -> None:
        self.speed: float | None = None
        self._lock = threading.Lock()

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """See :class:`FileOps`."""
        if self.speed is None:
            return super().read(fd, into, offset)
        with self._lock:
            until = time.perf_counter() + LATENCY_S + len(into) / self.speed
            count = super().read(fd, into, offset)
            time.sleep(max(0.0, until - time.perf_counter()))
            return count


def run_all(sweep: Sweep, report: Report, directory: Path) -> Result:
    """Measure every cell; the stores lie in ``directory``, an empty folder, and stay there."""
    total = 2 * len(sweep.models) * len(sweep.speeds) * len(sweep.contexts)
    cells: list[Cell] = []
    for name in sweep.models:
        for cell in _of_model(name, sweep, directory / name.replace(" ", "-")):
            cells.append(cell)
            report(f"{cell.model}, {cell.tokens:,} tokens", len(cells), total)
    return Result(tuple(cells))


def _of_model(name: str, sweep: Sweep, place: Path) -> Iterator[Cell]:
    family, settings = MODELS[name]
    model, ops = random_model(tiny_config(family, **settings)), SlowReads()
    prompts = {tokens: _prompt(tokens, seed) for seed, tokens in enumerate(sweep.contexts)}
    teaching = [_prompt(tokens, 100 + tokens) for tokens in (320, 1280)]
    for speed in sweep.speeds:
        ops.speed = None
        store = DiskStore.open(place, 1 << 30, ops=ops)
        options: dict[str, Any] = {"device": "64MiB", "block_size": BLOCK, "segment": SEGMENT}
        with attach(model, store=store, replay="auto", **options) as engine:
            bench = _Bench(engine)
            for ids in (*prompts.values(), *teaching):
                bench.first_token(ids, Way.RECOMPUTE)
                bench.settle()
            ops.speed = speed
            for ids in teaching:
                for way in (Way.RESTORE, Way.EXACT_REPLAY, Way.RECOMPUTE):
                    bench.lose_windows(ids)
                    bench.first_token(ids, way)
            for tokens, ids in prompts.items():
                bench.first_token(ids, Way.RECOMPUTE)
                for device, lose in (("windows lost", bench.lose_windows), ("empty", bench.lose_all)):
                    yield _cell(bench, name, speed, device, tokens, sweep, functools.partial(lose, ids))


def _cell(
    bench: _Bench, model: str, speed: float, device: str, tokens: int, sweep: Sweep, lose: Callable[[], torch.Tensor]
) -> Cell:
    turns = (None, Way.RECOMPUTE, Way.RECOMPUTE, Way.RESTORE, Way.EXACT_REPLAY)
    own, again, openings = list[float](), list[float](), list[float]()
    taken: dict[Way, list[float]] = {way: [] for way in turns if way is not None}
    picked, estimated, replayed = Counter[str](), dict[str, float | None](), 0
    draw, ends, rounds, given_up = np.random.default_rng(), time.perf_counter() + sweep.cell_s, 0, 0
    while rounds < sweep.rounds or (rounds < MOST_ROUNDS and time.perf_counter() < ends):
        rounds += 1
        for turn in draw.permutation(len(turns)):
            way, ids = turns[turn], lose()
            _work(AWAKE_S)
            before = bench.recovery.stats.replayed_tokens
            seconds, opening, went = bench.first_token(ids, way)
            if way is None:
                own.append(seconds)
                picked[went["way"]] += 1
                given_up += went["given_up"]
                estimated = {option["way"]: option["expected_s"] for option in went["options"]}
                if not went["given_up"]:
                    taken[Way(went["way"])].append(seconds)
            elif went["way"] == way.value:  # else it was not possible here
                replayed = max(replayed, bench.recovery.stats.replayed_tokens - before)
                (again if turn == 2 else taken[way]).append(seconds)
                openings += [opening] if way is Way.RECOMPUTE else []
    return Cell(
        model,
        tokens,
        speed,
        device,
        {way.value: statistics.median(times) for way, times in taken.items() if times},
        picked.most_common(1)[0][0],
        statistics.median(own),
        estimated,
        replayed,
        statistics.median(again),
        statistics.median(openings),
        rounds,
        given_up,
    )


class _Bench:
    """One engine, and runs on it."""

    def __init__(self, engine: Engine) -> None:
        assert engine.recoverer is not None
        self.engine, self.recoverer = engine, engine.recoverer
        self.recovery = self.recoverer.recovery

    def first_token(self, ids: torch.Tensor, way: Way | None) -> tuple[float, float, dict[str, Any]]:
        """Seconds to the first token of a prompt, those before its first forward, and what was chosen and expected."""
        recoverer: Recoverer = self.recoverer
        recoverer.forced = way
        began = time.perf_counter()
        with self.engine.open(ids) as session:
            opened = time.perf_counter() - began
            session.prefill()
            forward_chunk(session.model, ids[:, session.length :], session.cache, session.length)
            seconds = time.perf_counter() - began
        self.settle()
        return seconds, opened, self.recovery.to_json()["choices"][-1]

    def settle(self) -> None:
        """What waits to be stored is."""
        if self.engine.cold is not None:
            self.engine.cold.flush()

    def lose_windows(self, ids: torch.Tensor) -> torch.Tensor:
        """The device has the compressed state of a prompt and no window."""
        self.engine.manager.drop(Kind.WINDOW)
        return ids

    def lose_all(self, ids: torch.Tensor) -> torch.Tensor:
        """The device has nothing."""
        self.engine.manager.clear()
        return ids


def _work(seconds: float) -> None:
    """Compute for a while."""
    some, ends = torch.ones(256, 256), time.perf_counter() + seconds
    while time.perf_counter() < ends:
        torch.mm(some, some)


def _prompt(tokens: int, seed: int) -> torch.Tensor:
    """``tokens`` and one more, which is always computed."""
    return torch.randint(0, 320, (1, tokens + 1), generator=torch.Generator().manual_seed(seed))
