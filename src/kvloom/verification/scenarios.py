"""What ``verify-model`` tries: every boundary, unaligned checkpoints, decode, forks, and eviction in between."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from kvloom.types import Grade
from kvloom.verification.bench import Bench, Resume, compare_logits
from kvloom.verification.cold import canonical_chunks, single_tokens
from kvloom.verification.report import Boundary, Difference
from kvloom.verification.routing import observing, pinning
from kvloom.verification.state import compare_state

_DECODED = 9
_FORKED = 3


def fill(bench: Bench) -> None:
    """Compute the base prompt through kvloom with nothing to reuse: already this must equal the cold run."""
    bench.resume(Resume("cold", bench.ids, 0, DynamicCache(config=bench.model.config), Grade.CANONICAL))


def every_segment_boundary(bench: Bench) -> None:
    """Resume at each segment end with tokens that nobody has seen: bitwise, in state and logits."""
    for at in range(bench.segment, bench.last_boundary + 1, bench.segment):
        prompt = bench.branch(at, bench.segment + bench.segment // 4 + 3)
        bench.resume(Resume("segment", prompt, at, bench.cold_at(at), Grade.CANONICAL))


def unaligned_checkpoints(bench: Bench) -> None:
    """End prompts inside a segment, and go on from there with other tokens."""
    segment = bench.segment
    cuts = sorted({c for c in (1, 7, segment // 2 + 1, segment - 1) if 0 < c < segment})
    for number, cut in enumerate(cuts):
        at = segment * (1 + number * (bench.last_boundary // segment - 1) // len(cuts))
        checkpoint_resume(bench, at, cut)


def checkpoint_resume(bench: Bench, at: int, cut: int) -> Resume | None:
    """Leave a checkpoint ``cut`` tokens behind the boundary ``at`` and resume there.

    Returns what was tried; None when the prompt that leaves the checkpoint did not resume at ``at``.
    """
    end = at + cut
    first = bench.branch(at, cut + 1)
    prompt = bench.branch(end, bench.segment + 5, first)
    canonical, routes = bench.canonical(prompt, at)
    pins = routes.before(end) if routes else None
    session = bench.open(first)
    try:
        reused = session.reused
        with observing(bench.model, pinning(pins)):
            bench.run(session, first)
    finally:
        session.close()
    if reused != at:
        bench.report.boundaries.append(hit_elsewhere("checkpoint", at, reused))
        return None
    made = bench.cold(first, [(at, end)], bench.cold_at(at), keep=[end], observer=pinning(pins))
    plan = Resume("checkpoint", prompt, end, made.caches[end], Grade.FAITHFUL, canonical, routes)
    bench.resume(plan)
    return plan


def after_decode(bench: Bench) -> None:
    """Decode token by token across a segment end; resume at that end and where the response ended."""
    segment = bench.segment
    at = bench.last_boundary // segment // 2 * segment
    begin, end = at + segment - 4, at + segment - 4 + _DECODED
    stem = bench.branch(at, end - at)
    prompts = {p: bench.branch(p, segment + 5, stem) for p in (at + segment, end)}
    canonical = {p: bench.canonical(prompt, at) for p, prompt in prompts.items()}
    pins = canonical[end][1]
    session = bench.open(stem[:, :begin])
    try:
        reused = session.reused
        with observing(bench.model, pinning(pins)):
            bench.run(session, stem[:, :begin])
            for position in range(begin, end):
                bench.step(session, stem[:, position : position + 1])
    finally:
        session.close()
    if reused != at:
        bench.report.boundaries.append(hit_elsewhere("decode", at, reused))
        return
    chunks = [*canonical_chunks(begin, segment, at), *single_tokens(end, begin)]
    cold = bench.cold(stem, chunks, bench.cold_at(at), keep=list(prompts), observer=pinning(pins))
    for position, prompt in prompts.items():
        logits, routes = canonical[position]
        bench.resume(Resume("decode", prompt, position, cold.caches[position], Grade.FAITHFUL, logits, routes))


def forks(bench: Bench) -> None:
    """Fork inside a segment, let parent and child go on in turn with other tokens; then resume at both ends."""
    at = bench.last_boundary // bench.segment // 2 * bench.segment
    begin = at + 7
    stem = bench.branch(at, 7)
    tails = [bench.tokens(_FORKED), bench.tokens(_FORKED)]
    while torch.equal(tails[0][:, :1], tails[1][:, :1]):
        tails[1] = bench.tokens(_FORKED)
    parent = bench.open(stem)
    sessions = [parent]
    try:
        reused = parent.reused
        bench.run(parent, stem)
        sessions.append(parent.fork())
        warm = [[bench.step(s, t[:, i : i + 1]) for s, t in zip(sessions, tails, strict=True)] for i in range(_FORKED)]
        if reused != at:
            bench.report.boundaries.append(hit_elsewhere("fork", at, reused))
            return
        differences: list[Difference] = []
        cold = []
        for which, tail in enumerate(tails):
            ids = torch.cat([stem, tail], dim=1)
            chunks = [*canonical_chunks(begin, bench.segment, at), *single_tokens(begin + _FORKED, begin)]
            run = bench.cold(ids, chunks, bench.cold_at(at), keep=[begin + _FORKED])
            cold.append((ids, run.caches[begin + _FORKED]))
            pairs = [(run.logits_at(begin + i + 1), warm[i][which], begin + i) for i in range(_FORKED)]
            differences += [d for d in (compare_logits(*pair) for pair in pairs) if d is not None]
            state = compare_state(bench.spec, run.caches[begin + _FORKED], sessions[which].cache, begin + _FORKED)
            differences = [*state, *differences]
        largest = max((d.max_abs_diff for d in differences), default=0.0)
        first = differences[0] if differences else None
        bench.report.boundaries.append(
            Boundary(begin, Grade.FAITHFUL, "fork", first is None, largest, bench.tolerance, first)
        )
    finally:
        for session in sessions:
            session.close()
    for ids, cache in cold:
        end = ids.shape[1]
        bench.resume(Resume("fork", bench.branch(end, bench.segment + 5, ids), end, cache))


def eviction_in_between(bench: Bench) -> None:
    """Evict more and more of what is cached, then clear; after each, the same prompts must still be right."""
    manager = bench.engine.manager
    for share in (0.5, 0.9, 1.0):
        bench.report.evicted_bytes += manager.evict(manager.cap if share == 1.0 else int(share * manager.stats().used))
        resume_anywhere(bench, "eviction", bench.ids)
    manager.clear()
    resume_anywhere(bench, "eviction", bench.ids)
    at = bench.last_boundary
    bench.resume(Resume("eviction", bench.branch(at, bench.segment + 5), at, bench.cold_at(at), Grade.CANONICAL))


def resume_anywhere(bench: Bench, scenario: str, prompt: torch.Tensor) -> int:
    """Resume a prompt of the base stem at whatever canonical boundary is left (0: none); returns the boundary."""
    session = bench.open(prompt, Grade.CANONICAL)
    at: int = session.reused
    session.close()
    bench.resume(Resume(scenario, prompt, at, bench.cold_at(at), Grade.CANONICAL))
    return at


def hit_elsewhere(scenario: str, wanted: int, reused: int) -> Boundary:
    """A resume that failed because its hit ended at another position."""
    difference = Difference(None, "", -1, f"hit ends at {reused}", wanted, "hit")
    return Boundary(wanted, Grade.CANONICAL, scenario, False, float("inf"), 0.0, difference)
