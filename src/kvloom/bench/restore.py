"""Restores that are used layer by layer, and what transfers cost a running decode.

A prefix of some hundred MiB lies on disk.  A prompt that goes on behind it is answered with the device empty: once
everything was read, layer by layer while it is read, and without the store.  Slower disks are made by waiting.
Then another session decodes while loads and stores are under way beside it (``beside.py``).
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from kvloom.adapters.transformers import Engine, attach
from kvloom.bench.beside import Decode, decode_beside
from kvloom.spec.footprint import peak_bytes
from kvloom.testing.families import random_model, tiny_config
from kvloom.tiers.contract import Tier, Usage
from kvloom.tiers.disk import DiskStore
from kvloom.tiers.values import Digests, Found, Outcome, Places, Published, ReadResult, Unit
from kvloom.transfer.hierarchy import Hierarchy
from kvloom.transfer.options import Restoring, TransferOptions
from kvloom.types import IntArray

Progress = Callable[[str, int, int], None]


class Only(enum.StrEnum):
    """What is measured."""

    ALL = "all"
    RESTORE = "restore"
    """The ways to the first token."""
    DECODE = "decode"
    """Decode steps beside transfers."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of ``layers`` layers, every other one with full attention, and a prefix of ``tokens`` tokens.

    ``new`` tokens come behind it; ``speeds`` are those of the disk in MB/s, 0 for as it is; every row is the median of
    ``repeats``.  ``paces``: of the transfers beside a decode, ``steps`` of which are measured at least.
    """

    layers: int = 12
    tokens: int = 8192
    new: int = 129
    speeds: tuple[int, ...] = (0, 1000, 400)
    repeats: int = 3
    hidden: int = 512
    steps: int = 120
    paces: tuple[float, ...] = (1.0, 0.05)
    only: Only = Only.ALL


@dataclass(frozen=True, slots=True)
class Row:
    """One way to come to the first token.

    Attributes:
        mbps: speed of the disk, 0 for as it is.
        way: ``whole``, ``layers`` or ``cold``.
        ttft_s: until the logits of the last prompt token were there.
        read_s: from the begin of the first read to the end of the last.
        first_layer_s: when the first layer had run, and ``last_read_s`` when the last read ended, both from the begin.
        bytes: read.
        reused: tokens that needed no compute.
    """

    mbps: int
    way: str
    ttft_s: float
    read_s: float
    first_layer_s: float
    last_read_s: float
    bytes: int
    reused: int


@dataclass(slots=True)
class Report:
    """Everything.

    Attributes:
        identical: whether the first logits of all ways were equal bit for bit.
        reads, layers: of the last restore by layers at the disk's own speed: (begun, ended, bytes) of every stage and
            (layer, begun, ended) of every layer, in seconds from the begin.
        parameters: of the model.
    """

    parameters: int = 0
    bytes_on_disk: int = 0
    parts: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    decode: list[Decode] = field(default_factory=list)
    identical: bool = True
    reads: list[tuple[float, float, int]] = field(default_factory=list)
    layers: list[tuple[int, float, float]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        found = asdict(self)
        found["decode"] = [each.to_json() for each in self.decode]
        return found


class Throttled:
    """A tier that takes nothing, and reads no faster than ``mbps`` million bytes per second (0: as fast as it is)."""

    def __init__(self, inner: Tier, mbps: int) -> None:
        self._inner, self.mbps = inner, mbps
        self.name, self.durable = inner.name, inner.durable

    def lookup(self, layout: bytes, digests: Digests, *, root: bytes | None = None) -> Found:
        """See ``Tier``."""
        return self._inner.lookup(layout, digests, root=root)

    def read(
        self,
        places: Places,
        into: npt.NDArray[Any],
        offsets: IntArray,
        stop: Callable[[], bool] = lambda: False,
    ) -> ReadResult:
        """See ``Tier``."""
        begun = time.monotonic()
        found = self._inner.read(places, into, offsets, stop)
        if self.mbps:
            time.sleep(max(0.0, begun + places.nbytes / (self.mbps * 1e6) - time.monotonic()))
        return found

    def publish(self, unit: Unit) -> Published:
        """See ``Tier``."""
        return Published(Outcome.UNAVAILABLE, reason="every run is to find the same")

    def touch(self, layout: bytes, digest: bytes) -> None:
        """See ``Tier``."""
        self._inner.touch(layout, digest)

    def clear(self, layout: bytes | None = None, root: bytes | None = None) -> int:
        """See ``Tier``."""
        return self._inner.clear(layout, root)

    def usage(self) -> Usage:
        """See ``Tier``."""
        return self._inner.usage()

    def close(self) -> None:
        """See ``Tier``."""
        self._inner.close()


def build(shape: Shape) -> PreTrainedModel:
    """A model with random weights whose slots have the size of real ones."""
    sizes: dict[str, Any] = {
        "layer_types": ["sliding_attention", "full_attention"] * (shape.layers // 2),
        "sliding_window": 512,
        "max_position_embeddings": shape.tokens + 4096,
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "head_dim": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    return random_model(tiny_config("gemma3", **sizes))


def run(shape: Shape, directory: Path, progress: Progress) -> Report:
    """Measure everything; ``directory`` is empty."""
    model, report = build(shape), Report()
    report.parameters = sum(each.numel() for each in model.parameters())
    generator = torch.Generator().manual_seed(7)
    ids: list[int] = torch.randint(
        3, model.config.vocab_size, (shape.tokens + shape.new,), generator=generator
    ).tolist()
    with attach(model, device="64MiB") as probe:
        room = 3 * peak_bytes(probe.spec, len(ids) + 1024, probe.spec.segment_tokens)
    place, cap = directory / "store", max(1 << 30, 8 * room)
    with (
        attach(model, device=room, store=DiskStore.open(place, cap)) as engine,
        engine.open(ids[: shape.tokens + 1]) as s,
    ):
        progress("filling the store", 0, 1)
        s.prefill()
        report.parts = _cold(engine).links[0].parts.count.tolist()
    if shape.only is not Only.DECODE:
        _restores(shape, model, report, directory, room, ids, progress)
    if shape.only is not Only.RESTORE:
        # Without rests first, so that both are seen on the same machine in the same minute.
        rows = [(what, pace) for what in ("load", "store") for pace in shape.paces]
        for done, (what, pace) in enumerate(rows):
            progress(f"decode beside a {what}, pace {pace:g}", done, len(rows))
            row = decode_beside(model, place, room, ids, shape.tokens, what, pace, shape.steps)
            report.decode.append(row)
    return report


def _restores(
    shape: Shape,
    model: PreTrainedModel,
    report: Report,
    directory: Path,
    room: int,
    ids: list[int],
    progress: Progress,
) -> None:
    """Every way to the first token."""
    place, cap = directory / "store", max(1 << 30, 8 * room)
    logits: list[torch.Tensor] = []
    ways = (Restoring.WHOLE, Restoring.LAYERS)
    total, done = 1 + len(ways) * len(shape.speeds) * shape.repeats, 0
    with _timed_layers(model) as layers:
        progress("cold", done, total)
        with attach(model, device=room, tiers=[Throttled(DiskStore.open(directory / "empty", cap), 0)]) as engine:
            report.rows.append(_answer(engine, ids, 0, "cold", layers, logits))
        for mbps in shape.speeds:
            found: dict[Restoring, list[Row]] = {way: [] for way in ways}
            for _ in range(shape.repeats):
                for way in ways:  # in turn, since a machine is not as fast at one time as at another
                    done += 1
                    progress(f"{way} at {mbps or 'full'} MB/s", done, total)
                    tier = Throttled(DiskStore.open(place, cap), mbps)
                    report.bytes_on_disk = tier.usage().bytes
                    options = TransferOptions(restoring=way, load_deadline_s=600.0)
                    with attach(model, device=room, tiers=[tier], transfers=options) as engine:
                        found[way].append(_answer(engine, ids, mbps, way.value, layers, logits))
                        if way is Restoring.LAYERS and mbps == 0:
                            _note_times(engine, layers, report)
            report.rows += [sorted(rows, key=lambda row: row.ttft_s)[len(rows) // 2] for rows in found.values()]
    report.identical = all(torch.equal(each, logits[0]) for each in logits)


def _cold(engine: Engine) -> Hierarchy:
    assert engine.cold is not None
    return engine.cold


@contextmanager
def _timed_layers(model: PreTrainedModel) -> Iterator[list[tuple[int, float, float]]]:
    """Note when each layer of the model runs.  (Not by hooks, which would make it another model.)"""
    found: list[tuple[int, float, float]] = []

    def timed(number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run_timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.monotonic()
            out = forward(*args, **kwargs)
            found.append((number, begun, time.monotonic()))
            return out

        return run_timed

    modules = list(model.model.layers)
    for number, module in enumerate(modules):
        module.forward = timed(number, module.forward)
    try:
        yield found
    finally:
        for module in modules:
            del module.forward


def _answer(
    engine: Engine,
    ids: list[int],
    mbps: int,
    way: str,
    layers: list[tuple[int, float, float]],
    logits: list[torch.Tensor],
) -> Row:
    """Open a prompt, compute what is missing and the last token."""
    layers.clear()
    engine.keys()  # the weights are read once for each engine, which is no part of a restore
    begun = time.monotonic()
    with engine.open(ids) as session:
        session.prefill()
        last = session.step(len(ids))[0, -1]
        ttft = time.monotonic() - begun
        logits.append(last.clone())
        reused = session.reused
    stats, line = _cold(engine).stats, _cold(engine).timeline
    seconds = sum(tier.load_seconds for tier in stats.tiers.values())
    first = min(ended for number, _, ended in layers if number == 0) - begun
    ended = max(end for _, end, _ in line.reads) - begun if line is not None else seconds
    return Row(mbps, way, ttft, seconds, first, ended, sum(stats.bytes_loaded.values()), reused)


def _note_times(engine: Engine, layers: list[tuple[int, float, float]], report: Report) -> None:
    line = _cold(engine).timeline
    if line is not None:
        count = max(number for number, _, _ in layers) + 1
        report.reads = [(begun - line.begun, ended - line.begun, size) for begun, ended, size in line.reads if size]
        report.layers = [(n, begun - line.begun, ended - line.begun) for n, begun, ended in layers[:count]]
