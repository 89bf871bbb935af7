"""What transfers cost a running decode: its steps alone, and while a prefix is loaded or stored beside it, in turn."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvloom.adapters.transformers import Engine, Session, attach
from kvloom.adapters.transformers.forward import forward_chunk
from kvloom.tiers.disk import DiskStore
from kvloom.transfer.hierarchy import Hierarchy
from kvloom.transfer.options import TransferOptions

CONTEXT = 513
"""Tokens of the prompt of the session that decodes."""
ROUNDS, MOST_ROUNDS = 5, 150
ROUND_S = 30.0
"""Seconds that one transfer may take."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of ``steps`` steps: quartiles, the slowest of a hundred, and the mean."""

    steps: int
    first: float
    median: float
    third: float
    p99: float
    mean: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """NaN where there are none."""
        if len(seconds) < 2:
            return cls(len(seconds), *[float("nan")] * 5)
        first, median, third = statistics.quantiles(seconds, n=4)
        p99 = sorted(seconds)[len(seconds) * 99 // 100]
        return cls(len(seconds), first, median, third, p99, statistics.fmean(seconds))


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode steps beside transfers.

    Attributes:
        beside: ``load`` or ``store``.
        pace: ``TransferOptions.pace``; 1: the transfers do not rest.
        rounds: steps alone and beside one transfer, in turn.
        alone, step: steps with nothing else going on, and those all through which a transfer was under way.
        bytes, seconds: that the transfers moved beside steps, and took for it.
        context: tokens of the session before its first step.
    """

    beside: str
    pace: float
    rounds: int
    alone: Times
    step: Times
    bytes: int
    seconds: float
    context: int = CONTEXT

    @property
    def ratio(self) -> float:
        """How much longer a step takes: of the medians."""
        return self.step.median / self.alone.median

    @property
    def mean_ratio(self) -> float:
        """The same of the means, in which a few slow steps count."""
        return self.step.mean / self.alone.mean

    @property
    def mbps(self) -> float:
        """Million bytes per second of the transfers."""
        return self.bytes / self.seconds / 1e6 if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values; None for what no step says."""
        found = {**asdict(self), "ratio": self.ratio, "mean_ratio": self.mean_ratio, "mbps": self.mbps}
        for part in (found, found["alone"], found["step"]):
            part.update({key: None for key, value in part.items() if isinstance(value, float) and math.isnan(value)})
        return found


def decode_beside(
    model: PreTrainedModel, place: Path, room: int, ids: list[int], prefix: int, what: str, pace: float, steps: int
) -> Decode:
    """Measure one row.

    Args:
        model: what decodes.
        place: a store that has the first ``prefix`` tokens of ``ids``; ``load`` reads them, ``store`` writes them anew.
        room: bytes of device memory that hold the prefix and the session.
        ids: a prompt.
        prefix: tokens of it that move.
        what: ``load`` or ``store``.
        pace: see ``Decode``.
        steps: alone and beside transfers, at least (fewer beside them when ``MOST_ROUNDS`` give no more).
    """
    options = TransferOptions(load_deadline_s=600.0, pace=pace)
    tokens = ids[: prefix + 1]
    alone: list[float] = []
    beside: list[float] = []
    rounds, n_bytes, seconds = 0, 0, 0.0
    with (
        attach(model, device=2 * room, store=DiskStore.open(place, 8 * room), transfers=options) as engine,
        engine.open(tokens if what == "store" else ids[-2:]) as moved,
        engine.open(ids[-CONTEXT:]) as session,
    ):
        if what == "store":
            moved.prefill()
        session.prefill()
        stepper, cold = _Stepper(session), _cold(engine)

        def begin() -> None:
            if what == "load":
                engine.manager.drop("full")
                if not engine.prefetch(tokens):
                    raise RuntimeError("the store has nothing of the prefix that is to be loaded")
            else:
                cold.tiers[0].clear()
                cold.keep(moved.sequence, b"", engine.keys())

        def end() -> int:
            engine.cancel_prefetch(tokens)
            cold.flush()
            return sum((cold.stats.bytes_loaded if what == "load" else cold.stats.bytes_stored).values())

        each = -(-steps // ROUNDS)
        _round(stepper, cold, each, begin)  # a rehearsal: threads and buffers are made
        before = end()
        while rounds < ROUNDS or (len(beside) < steps and rounds < MOST_ROUNDS):
            quiet, busy, took = _round(stepper, cold, each, begin)
            after = end()
            alone, beside = alone + quiet, beside + busy
            if len(busy) < each:  # short transfers: many rounds, and as many steps alone as beside them
                each = max(3, len(busy))
            rounds, n_bytes, seconds, before = rounds + 1, n_bytes + after - before, seconds + took, after
    return Decode(what, pace, rounds, Times.of(alone), Times.of(beside), n_bytes, seconds)


def _round(
    stepper: _Stepper, cold: Hierarchy, steps: int, begin: Callable[[], None]
) -> tuple[list[float], list[float], float]:
    """Steps alone, steps beside a transfer that ``begin`` begins, and how long that took."""
    quiet = [stepper.step() for _ in range(steps)]
    busy: list[float] = []
    begin()
    begun = time.perf_counter()
    while cold.moving and time.perf_counter() - begun < ROUND_S:
        took = stepper.step()
        if cold.moving:  # all of the step was beside it
            busy.append(took)
    return quiet, busy, time.perf_counter() - begun


class _Stepper:
    """One session that decodes."""

    def __init__(self, session: Session) -> None:
        self._session, self._position = session, len(session.tokens) - 1
        self.step()

    def step(self) -> float:
        """Seconds of the next step."""
        ids = torch.tensor([[5 + self._position % 200]], device=self._session.model.device)
        if self._position < len(self._session.tokens):
            ids[0, 0] = int(self._session.tokens[self._position])
        begun = time.perf_counter()
        forward_chunk(self._session.model, ids, self._session.cache, self._position)
        self._position += 1
        return time.perf_counter() - begun


def _cold(engine: Engine) -> Hierarchy:
    assert engine.cold is not None
    return engine.cold
