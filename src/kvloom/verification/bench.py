"""The test bench: one model, its engine, one base prompt, and resumes that are compared with cold runs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvloom.adapters.transformers.forward import forward_chunk
from kvloom.errors import InputError, StaleLeaseError
from kvloom.plan import Explanation
from kvloom.spec.model_spec import GroupSpec, ModelSpec
from kvloom.types import Grade
from kvloom.verification.cold import Chunk, ColdRun, canonical_chunks, run_cold
from kvloom.verification.report import Boundary, Difference, Report
from kvloom.verification.routing import RouteObserver, Routes, observing, pinning
from kvloom.verification.spread import Spread
from kvloom.verification.state import compare_state

LEAST_TOKENS = 16
"""Ordinary ids that a vocabulary must have, so that random prompts do not agree by chance."""


@dataclass(frozen=True, slots=True)
class Resume:
    """One resume to try.

    Attributes:
        scenario: what is tried, for the report.
        prompt: int64 ``[1, n]``.
        at: the position at which the hit must end.
        cache: transformers' cache at ``at``, made by the same calls as the state that is resumed.
        floor: worst grade that the request accepts.
        canonical: logits ``[vocab]`` of the last token in the canonical cold run; None: that of the same calls.
        pins: router picks to pin in both runs.
    """

    scenario: str
    prompt: torch.Tensor
    at: int
    cache: DynamicCache
    floor: Grade = Grade.FAITHFUL
    canonical: torch.Tensor | None = None
    pins: Routes | None = None


class Bench:
    """Runs resumes and writes what they showed into a report.

    Attributes:
        model, engine: the model and the kvloom engine attached to it.
        ids: base prompt, int64 ``[1, n]``.
        segment: tokens per segment.
        report: where boundaries and kinds are counted.
        spread: transformers' own spread.
    """

    def __init__(
        self, model: PreTrainedModel, engine: Any, ids: torch.Tensor, seed: int, spread: Spread, report: Report
    ) -> None:
        self.model, self.engine, self.ids = model, engine, ids
        self.spec: ModelSpec = engine.spec
        self.segment = self.spec.segment_tokens
        self.spread, self.report = spread, report
        self.last_boundary = (ids.shape[1] - 1) // self.segment * self.segment
        self._generator = torch.Generator().manual_seed(seed + 1)
        self._walk: tuple[int, DynamicCache] = (0, DynamicCache(config=model.config))

    @property
    def tolerance(self) -> float:
        """What the logits of a faithful hit may be off by."""
        return self.spread.tolerance

    # ---------------------------------------------------------------- prompts and cold runs

    def tokens(self, count: int, differs_from: int | None = None) -> torch.Tensor:
        """``[1, count]`` random ids of which the first is not ``differs_from``."""
        ids = random_tokens(self.model, count, self._generator)
        while differs_from is not None and int(ids[0, 0]) == differs_from:
            ids[:, :1] = random_tokens(self.model, 1, self._generator)
        return ids.to(self.ids.device)

    def branch(self, at: int, count: int, stem: torch.Tensor | None = None) -> torch.Tensor:
        """The first ``at`` tokens of ``stem`` (the base prompt) and ``count`` others, which differ at once."""
        stem = self.ids if stem is None else stem
        known = int(stem[0, at]) if at < stem.shape[1] else None
        return torch.cat([stem[:, :at], self.tokens(count, known)], dim=1)

    def cold_at(self, position: int) -> DynamicCache:
        """A copy of the cold cache of the base prompt at a segment boundary (cheap when asked in ascending order)."""
        at, cache = self._walk
        if position < at:
            at, cache = 0, DynamicCache(config=self.model.config)
        chunks = [(p, p + self.segment) for p in range(at, position, self.segment)]
        run_cold(self.model, self.ids, chunks, cache=cache)
        self._walk = (position, cache)
        return copy.deepcopy(cache)

    def cold(
        self,
        ids: torch.Tensor,
        chunks: Sequence[Chunk],
        cache: DynamicCache,
        *,
        keep: Sequence[int] = (),
        observer: RouteObserver | None = None,
    ) -> ColdRun:
        """Run ``chunks`` on a copy of ``cache`` with transformers alone."""
        return run_cold(self.model, ids, chunks, cache=copy.deepcopy(cache), keep_caches=keep, observer=observer)

    def canonical(self, ids: torch.Tensor, at: int) -> tuple[torch.Tensor, Routes | None]:
        """Logits of the last token in the canonical cold run of ``ids``, a branch of the base prompt at ``at``.

        Also the picks of its routers behind ``at``, when the model has any.
        """
        observer = RouteObserver() if self.spread.routers else None
        count = ids.shape[1]
        chunks = canonical_chunks(count, self.segment, at)
        run = self.cold(ids, chunks, self.cold_at(at), observer=observer)
        return run.logits_at(count), observer.routes if observer else None

    # ---------------------------------------------------------------- warm runs

    def open(self, ids: torch.Tensor, floor: Grade = Grade.FAITHFUL) -> Any:
        """Open a session."""
        return self.engine.open(ids, floor=floor)

    def run(self, session: Any, ids: torch.Tensor) -> torch.Tensor:
        """Prefill a session and compute its last token; returns the logits ``[vocab]``."""
        session.prefill()
        return self.step(session, ids[:, -1:])

    def step(self, session: Any, ids: torch.Tensor) -> torch.Tensor:
        """One forward of ``ids`` on a session; returns the logits ``[vocab]`` of the last token."""
        return forward_chunk(self.model, ids, session.cache, session.length)[0, -1].clone()

    def resume(self, plan: Resume) -> bool:
        """Try one resume, report it, and say whether it kept its promise."""
        session = self.open(plan.prompt, plan.floor)
        grade = session.grade
        try:
            try:
                boundary = self._resume(plan, session)
            finally:
                session.close()
        except StaleLeaseError as error:
            boundary = self._failed(plan, grade, self._stale(error, plan.at))
        self.report.boundaries.append(boundary)
        return boundary.passed

    def _resume(self, plan: Resume, session: Any) -> Boundary:
        reused, grade, explanation = session.reused, session.grade, session.explanation
        if reused != plan.at:
            return self._failed(plan, grade, _short_hit(plan.at, reused, explanation))
        if plan.floor is Grade.CANONICAL and grade is not Grade.CANONICAL:
            return self._failed(plan, grade, Difference(None, "", -1, f"hit is {grade.name.lower()}", plan.at, "hit"))
        session.sequence.check()
        differences = compare_state(self.spec, plan.cache, session.cache, plan.at)
        self.count_restored(plan.at)
        count = plan.prompt.shape[1]
        with observing(self.model, pinning(plan.pins)):
            warm = self.run(session, plan.prompt)
        cold = self.cold(
            plan.prompt,
            canonical_chunks(count, self.segment, plan.at),
            plan.cache,
            keep=[count],
            observer=pinning(plan.pins),
        )
        differences += compare_state(self.spec, cold.caches[count], session.cache, count)
        same = compare_logits(cold.logits_at(count), warm, count - 1)
        reference = cold.logits_at(count) if plan.canonical is None else plan.canonical
        off = compare_logits(reference, warm, count - 1)
        largest = off.max_abs_diff if off else 0.0
        allowed = 0.0 if grade is Grade.CANONICAL else self.tolerance
        first = next(iter([*differences, *([same] if same else [])]), None)
        if first is None and largest > allowed:
            first = off
        return Boundary(plan.at, grade, plan.scenario, not differences and same is None, largest, allowed, first)

    def _failed(self, plan: Resume, grade: Grade, difference: Difference) -> Boundary:
        return Boundary(plan.at, grade, plan.scenario, False, float("inf"), 0.0, difference)

    def _stale(self, error: StaleLeaseError, at: int) -> Difference:
        group = self.spec.groups[self.spec.group_index(error.group)]
        return Difference(group.kind, group.name, -1, "", at, "stale")

    def count_restored(self, position: int) -> None:
        """Count the objects that a hit at ``position`` reused, per group and kind."""
        for group in self.spec.groups:
            objects, payload = restored(group, position)
            for result in self.report.results(group):
                result.restored(objects, payload)


def restored(group: GroupSpec, position: int) -> tuple[int, int]:
    """(objects, payload bytes) of one group that a resume at ``position`` needs."""
    if group.is_snapshot:
        every = group.needed_unless_multiple_of
        needed = position >= group.first_needed and (every == 0 or position % every != 0)
        return (1, group.entry_bytes) if needed else (0, 0)
    end = position // group.ratio
    first = 0
    if group.window:
        first = position // group.window * group.window if group.chunked else max(0, position - group.window + 1)
    if first >= end:
        return 0, 0
    entries = group.block_entries
    return (end - 1) // entries - first // entries + 1, (end - first) * group.entry_bytes


def random_tokens(model: PreTrainedModel, count: int, generator: torch.Generator) -> torch.Tensor:
    """``[1, count]`` ids that are not special tokens of the model's config."""
    config = model.config.get_text_config(decoder=True)
    special: set[int] = set()
    for source in (model.config, config):
        for name, value in source.to_dict().items():
            if name.endswith(("_token_id", "_token_index")):
                special.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    allowed = torch.tensor([i for i in range(config.vocab_size) if i not in special])
    if len(allowed) < LEAST_TOKENS:
        raise InputError(
            f"the vocabulary has {len(allowed)} ids that are no special tokens; random prompts need {LEAST_TOKENS}"
        )
    return allowed[torch.randint(0, len(allowed), (1, count), generator=generator)]


def compare_logits(cold: torch.Tensor, warm: torch.Tensor, position: int) -> Difference | None:
    """How the logits ``[vocab]`` of the token at ``position`` differ; None when they are equal bit for bit."""
    if cold.dtype == warm.dtype and torch.equal(cold, warm):
        return None
    off = (cold.double() - warm.double()).abs().nan_to_num(nan=float("inf"))
    return Difference(None, "", -1, "logits", position, "logits", int((off > 0).sum()), float(off.max()))


def _short_hit(wanted: int, reused: int, explanation: Explanation) -> Difference:
    """A hit that ended elsewhere, with what the explanation says stopped it."""
    limit = next((x for x in explanation.limits if x.kind is not None), None)
    text = f"hit ends at {reused}"
    if limit is None:
        return Difference(None, "", -1, text, wanted, "hit")
    return Difference(limit.kind, limit.group or "", -1, f"{text} ({limit.reason.value})", wanted, "hit")
