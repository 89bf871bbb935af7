"""From disk: fill a store with prefixes, then resume them in a fresh engine, whose device has nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from kvloom.errors import StoreError
from kvloom.tiers.disk import DiskStore
from kvloom.types import Grade
from kvloom.verification.bench import Bench, Resume
from kvloom.verification.cold import canonical_chunks, single_tokens
from kvloom.verification.report import Report, StoreUse
from kvloom.verification.scenarios import hit_elsewhere, resume_anywhere
from kvloom.verification.spread import Spread

SALT = b"kvloom verify-model"
"""What is kept here is found by nobody else, and can be cleared as one namespace."""
TIER = "disk"
_DECODED = 3

Attach = Callable[[], Any]
"""Makes an engine with a store, whose device has nothing yet."""
End = tuple[torch.Tensor, int, Any]
"""Tokens, a position in them that was kept, and transformers' cache there, made by the same calls."""


class DiskBench(Bench):
    """A bench in the namespace of ``SALT``, on an engine with a store."""

    def open(self, ids: torch.Tensor, floor: Grade = Grade.FAITHFUL) -> Any:
        """Open a session."""
        return self.engine.open(ids, salt=SALT, floor=floor)

    def count_restored(self, position: int) -> None:
        """Nothing: what came from the store is counted by the bytes that were read."""


def resume_from_disk(
    model: PreTrainedModel, ids: torch.Tensor, seed: int, spread: Spread, report: Report, attach: Attach
) -> None:
    """Keep prefixes of ``ids`` and ends behind them in the store, or find those of a run before; then resume them all.

    The prompts that are kept follow from ``seed``, so the second run on a store begins with what the first one left.

    Raises StoreError when the store did not take everything.
    """
    bench = DiskBench(model, attach(), ids, seed, spread, report)
    cold, store = bench.engine.cold, _store_of(bench.engine)
    use = report.store = StoreUse(str(store.directory))
    try:
        ends = _keep(bench)
        bench.engine.manager.check_integrity()
        use.found = dict(cold.stats.bytes_loaded)
    finally:
        _close(bench, use)
    if cold.stats.not_stored:
        reasons = ", ".join(f"{reason} {count}" for reason, count in cold.stats.not_stored.items())
        raise StoreError(
            f"{use.directory}: the store did not take everything ({reasons}), so nothing is known about resuming from "
            f"it: {store.activity().reason or 'use a larger --store-size'}"
        )
    # Other tokens than before behind every boundary.
    bench = DiskBench(model, attach(), ids, seed + 1, spread, report)
    try:
        _resume(bench, ends, use)
        bench.engine.manager.check_integrity()
    finally:
        _close(bench, use)


def _store_of(engine: Any) -> DiskStore:
    return next(tier for tier in engine.cold.tiers if isinstance(tier, DiskStore))


def _keep(bench: DiskBench) -> list[End]:
    """Prompts that end shortly behind each boundary, others that end elsewhere in a segment, and a response."""
    for at in _boundaries(bench):
        resume_anywhere(bench, TIER, bench.branch(at, 3))
        bench.engine.cold.flush()  # no end is left out because too many wait
    ends = []
    segment, last = bench.segment, bench.last_boundary
    for at, cut in ((last, 1), (segment, segment // 2 + 1), (last // segment // 2 * segment, segment - 1)):
        if not 0 < cut < segment:
            continue
        end = at + cut
        stem = bench.branch(at, cut + 1)
        _run(bench, stem, end + 1)
        made = bench.cold(stem, [(at, end)], bench.cold_at(at), keep=[end])
        ends.append((stem, end, made.caches[end]))
    begin = last + 5
    stem = bench.branch(last, begin - last + _DECODED)
    _run(bench, stem, begin)
    chunks = [*canonical_chunks(begin, segment, last), *single_tokens(begin + _DECODED, begin)]
    made = bench.cold(stem, chunks, bench.cold_at(last), keep=[begin + _DECODED])
    ends.append((stem, begin + _DECODED, made.caches[begin + _DECODED]))
    return ends


def _run(bench: DiskBench, stem: torch.Tensor, prompt: int) -> None:
    """A session whose prompt is the first ``prompt`` tokens of ``stem``, and whose response are the others."""
    session = bench.open(stem[:, :prompt])
    try:
        bench.run(session, stem[:, :prompt])
        for position in range(prompt, stem.shape[1]):
            bench.step(session, stem[:, position : position + 1])
    finally:
        session.close()
    bench.engine.cold.flush()


def _resume(bench: DiskBench, ends: list[End], use: StoreUse) -> None:
    manager, last = bench.engine.manager, bench.last_boundary
    for at in _boundaries(bench):
        _resume_at(bench, _canonical(bench, at), use)
    for stem, end, cache in ends:
        # One token more: so long a prompt is found at the end that was kept, and at no later one of a run before.
        _resume_at(bench, Resume(TIER, bench.branch(end, 1, stem), end, cache), use)
    bench.engine.cold.flush()  # what is being stored cannot be evicted
    manager.evict(manager.cap)
    _resume_at(bench, _canonical(bench, last), use)


def _canonical(bench: DiskBench, at: int) -> Resume:
    return Resume(TIER, bench.branch(at, max(1, bench.segment // 2)), at, bench.cold_at(at), Grade.CANONICAL)


def _resume_at(bench: DiskBench, plan: Resume, use: StoreUse) -> None:
    """Resume where the end was kept; at a boundary before it only if something was evicted or found damaged."""
    session = bench.open(plan.prompt, plan.floor)
    reused: int = session.reused
    session.close()
    lost = use.evicted or use.failed or bench.engine.cold.stats.failed
    if reused == plan.at:
        bench.resume(plan)
    elif lost and reused % bench.segment == 0:
        resume_anywhere(bench, TIER, plan.prompt)
    else:
        bench.report.boundaries.append(hit_elsewhere(TIER, plan.at, reused))


def _boundaries(bench: DiskBench) -> range:
    return range(bench.segment, bench.last_boundary + 1, bench.segment)


def _close(bench: DiskBench, use: StoreUse) -> None:
    """Close the engine, and report what its store did."""
    cold, store, spec = bench.engine.cold, _store_of(bench.engine), bench.spec
    bench.engine.close()
    use.stored = dict(Counter(use.stored) + cold.stats.bytes_stored)
    use.failed = dict(Counter(use.failed) + cold.stats.failed)
    use.evicted += store.activity().units_evicted
    for name, objects in cold.stats.objects_loaded.items():
        group = spec.groups[spec.group_index(name)]
        for result in bench.report.results(group):
            result.restored(objects, objects * group.slot_bytes, TIER)
