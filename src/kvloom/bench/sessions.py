"""Many sessions in turn on a device that holds a part of their state, with colder tiers behind it.

Every session has a long prompt of its own and comes back for several turns, each with its whole past and a few new
tokens.  With all of it on the device nothing moves; with a quarter or an eighth of that, what a session left must come
back from host memory or disk when its next turn comes.  Answers must be identical, bit for bit of the first logits.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvloom.adapters.transformers import Engine, attach
from kvloom.engine.answers import Answer, answer
from kvloom.spec.footprint import peak_bytes
from kvloom.testing.families import random_model, tiny_config
from kvloom.tiers.disk import DiskStore
from kvloom.transfer.options import Admission, TransferOptions

SHAPES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 128},
    "gemma3": {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]), "sliding_window": 512},
    "qwen3_next": {},
    "deepseek_v4": {},
}
"""Tiny hybrid models that can be measured, and what is not as in ``kvloom.testing.families``."""

PLACES = ("device", "prefetched", "arriving", "host", "disk")
"""Where an object may be when the turn that needs it begins."""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """``sessions`` of ``prompt`` tokens, ``turns`` more of ``new`` tokens each, and answers of ``count`` tokens."""

    family: str = "gpt_oss"
    sessions: int = 16
    prompt: int = 4096
    turns: int = 2
    new: int = 64
    count: int = 16
    hidden: int = 256

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Row:
    """One device cap.

    Attributes:
        device_share: of what all sessions need, 1 for all of it.
        device_bytes, host_bytes: caps.
        prefetch: whether the next session's prefix was asked for ahead.
        ttft_s, latency_s: medians of the later turns.
        latency_ratio: to that of the row without a cap.
        recomputed: tokens of the past that were computed again, over all later turns.
        found: where the objects that the hits needed were when their turn began, shares: ``device`` (left there by an
            earlier turn), ``prefetched`` (brought there ahead), ``arriving`` (on their way), and the tiers by name.
        found_on_device: the first two together.
        prefetches: how many were begun, and how many of these were still there for their request.
        loaded_bytes: by tier, as they were read.
        trouble: what was not kept, not stored, late or did not arrive, by reason.
        identical: whether every answer was that of the row without a cap: tokens, and first logits bit for bit.
    """

    device_share: float
    device_bytes: int
    host_bytes: int
    prefetch: bool
    ttft_s: float
    latency_s: float
    latency_ratio: float
    recomputed: int
    found: dict[str, float]
    found_on_device: float
    prefetches: dict[str, int]
    loaded_bytes: dict[str, int]
    trouble: dict[str, int]
    identical: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(slots=True)
class _Run:
    answers: list[Answer]
    ttft: list[float]
    latency: list[float]
    recomputed: int
    found: Counter[str]
    prefetches: dict[str, int]
    loaded_bytes: dict[str, int]
    trouble: dict[str, int]
    used: int


def build(shape: Shape) -> PreTrainedModel:
    """A model with random weights."""
    longest = shape.prompt + (shape.turns + 1) * (shape.new + shape.count)
    sizes: dict[str, Any] = {"max_position_embeddings": longest + 64}
    if shape.family in {"gpt_oss", "gemma3"}:
        sizes |= {"hidden_size": shape.hidden, "intermediate_size": 2 * shape.hidden, "head_dim": 64}
        sizes |= {"num_attention_heads": max(4, shape.hidden // 64), "num_key_value_heads": 2}
    return random_model(tiny_config(shape.family, **{**sizes, **SHAPES[shape.family]}))


def run_all(
    shape: Shape, directory: Path, shares: tuple[float, ...], host_share: float, progress: Progress
) -> Iterator[Row]:
    """The row without a cap, then each share of it without and with prefetch."""
    model = build(shape)
    with attach(model, device="64MiB") as probe:
        longest = shape.prompt + (shape.turns + 1) * (shape.new + shape.count)
        room = shape.sessions * peak_bytes(probe.spec, longest, probe.spec.segment_tokens)
    with attach(model, device=2 * room) as engine:
        free = _run(engine, shape, False, lambda done, of: progress("all on the device", done, of))
    latency = statistics.median(free.latency)
    yield _row(free, free, 1.0, 2 * room, 0, latency, prefetch=False)
    for share in shares:
        for prefetch in (False, True):
            host = int(host_share * free.used)
            what = f"{share:.3g} of it{', prefetch' if prefetch else ''}"
            place = directory / f"{share:.4f}-{prefetch}"
            options = TransferOptions(admission=Admission.ALWAYS, gpu_watermark=0.5)
            device = int(share * free.used)
            with attach(
                model,
                device=device,
                host=host,
                store=DiskStore.open(place, max(1 << 30, 4 * free.used)),
                transfers=options,
            ) as engine:
                run = _run(engine, shape, prefetch, lambda done, of, what=what: progress(what, done, of))  # type: ignore[misc]
            yield _row(run, free, share, device, host, latency, prefetch=prefetch)


def _run(engine: Engine, shape: Shape, prefetch: bool, progress: Callable[[int, int], None]) -> _Run:
    generator = torch.Generator().manual_seed(7)
    vocabulary = engine.spec.vocab_size

    def draw(count: int) -> list[int]:
        drawn: list[int] = torch.randint(3, vocabulary, (count,), generator=generator).tolist()
        return drawn

    prompts = [draw(shape.prompt) for _ in range(shape.sessions)]
    news = [[draw(shape.new) for _ in range(shape.sessions)] for _ in range(shape.turns)]
    run = _Run([], [], [], 0, Counter(), {}, {}, {}, 0)
    total = (shape.turns + 1) * shape.sessions
    for turn in range(shape.turns + 1):
        for i in range(shape.sessions):
            past = len(prompts[i])
            if turn:
                prompts[i] = [*prompts[i], *news[turn - 1][i]]
            ids = prompts[i]
            after = i + 1 if i + 1 < shape.sessions else 0
            later = turn if after else turn + 1
            if prefetch and 0 < later <= shape.turns:
                engine.prefetch([*prompts[after], *news[later - 1][after]])
            before = _Before.of(engine, ids)
            begun = time.perf_counter()
            with engine.open(ids) as session:
                got = answer(session, count=shape.count, started=begun)
                reused = session.reused
                if turn:
                    run.found += before.found(engine)
            run.answers.append(got)
            if turn:
                run.ttft.append(got.ttft_s)
                run.latency.append(time.perf_counter() - begun)
                # The last token of an answer was never an input: it has no state.
                run.recomputed += past - 1 - reused
            prompts[i] = [*ids, *got.tokens]
            progress(turn * shape.sessions + i + 1, total)
    run.used = engine.manager.stats().used
    if engine.cold is not None:
        stats = engine.cold.stats
        run.prefetches = {"begun": stats.prefetched, "used": stats.prefetch_used}
        run.trouble = dict(stats.not_stored + stats.failed)
        if stats.late:
            run.trouble["late"] = stats.late
        run.loaded_bytes = {name: sum(tier.bytes_loaded.values()) for name, tier in engine.cold.stats.tiers.items()}
    return run


@dataclass(frozen=True, slots=True)
class _Before:
    """What is known right before a prompt is opened.

    Attributes:
        hits: objects of all hits so far.
        loads: objects loaded so far, by tier.
        ahead: by tier, objects that a prefetch for the prompt brings, and how many of them are there.
    """

    hits: int
    loads: Counter[str]
    ahead: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, engine: Engine, ids: list[int]) -> _Before:
        ahead = {}
        if engine.cold is not None:
            ahead = engine.cold.ahead_of(np.array(ids, dtype=np.int32), b"", engine.keys())
        return cls(_hits(engine), _loads(engine), ahead)

    def found(self, engine: Engine) -> Counter[str]:
        """Where the objects of the hit since then were, told once everything of it has arrived."""
        needed, there = _hits(engine) - self.hits, sum(there for _, there in self.ahead.values())
        coming = sum(brings - there for brings, there in self.ahead.values())
        found = Counter({"prefetched": there, "arriving": coming})
        for tier, count in _loads(engine).items():
            found[tier] = max(0, count - self.loads[tier] - self.ahead.get(tier, (0, 0))[0])
        found["device"] = max(0, needed - found.total())
        return found


def _hits(engine: Engine) -> int:
    return sum(kind.hits for kind in engine.manager.stats().kinds.values())


def _loads(engine: Engine) -> Counter[str]:
    tiers = {} if engine.cold is None else engine.cold.stats.tiers
    return Counter({name: sum(tier.objects_loaded.values()) for name, tier in tiers.items()})


def _row(run: _Run, free: _Run, share: float, device: int, host: int, latency: float, *, prefetch: bool) -> Row:
    took, total = statistics.median(run.latency), max(1, run.found.total())
    found = {place: run.found[place] / total for place in PLACES}
    return Row(
        share,
        device,
        host,
        prefetch,
        statistics.median(run.ttft),
        took,
        took / latency,
        run.recomputed,
        found,
        found["device"] + found["prefetched"],
        run.prefetches,
        run.loaded_bytes,
        run.trouble,
        all(mine.same_as(other) for mine, other in zip(run.answers, free.answers, strict=True)),
    )
