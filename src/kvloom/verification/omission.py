"""Leave each kind out in turn: the hit must become shorter, and the answer must stay right."""

from __future__ import annotations

import copy

import torch
from transformers import DynamicCache

from kvloom.spec.model_spec import GroupSpec
from kvloom.types import Grade
from kvloom.verification.bench import Bench, Resume, restored
from kvloom.verification.cold import canonical_chunks
from kvloom.verification.report import KindResult, Omission
from kvloom.verification.scenarios import checkpoint_resume
from kvloom.verification.state import tensor_of

_CUT = 1
"""Tokens behind a segment end at which state is needed that a segment end can do without (1 divides no ratio but 1)."""
_WORST = (Omission.DETECTED, Omission.HARMLESS, Omission.MISSED)


def leave_each_out(bench: Bench) -> None:
    """Try every group of the model and write the outcome into the report, per group and per kind."""
    for group in bench.spec.groups:
        plan = _place(bench, group)
        if plan is None or restored(group, plan.at)[0] == 0:
            continue
        outcome = _leave_out(bench, group, plan)
        matters = _changes_logits(bench, group, plan)
        for result in bench.report.results(group):
            _note(result, outcome, matters)


def _place(bench: Bench, group: GroupSpec) -> Resume | None:
    """A resume that hits and needs this group: the deepest segment end that does, else behind one."""
    for at in range(bench.last_boundary, 0, -bench.segment):
        if restored(group, at)[0]:
            prompt = bench.branch(at, bench.segment + 5)
            plan = Resume("omission", prompt, at, bench.cold_at(at), Grade.CANONICAL)
            return plan if bench.resume(plan) else None
    return checkpoint_resume(bench, bench.last_boundary, _CUT)


def _leave_out(bench: Bench, group: GroupSpec, plan: Resume) -> Omission:
    """Drop the group's objects, see how far the hit goes now, and check the answer; the objects are made again."""
    if not bench.engine.manager.drop(group.name):
        return Omission.MISSED
    # Other tokens behind the place: the prompt that showed that it hits has left deeper boundaries.
    prompt = bench.branch(plan.at, bench.segment + 5, plan.prompt)
    session = bench.open(prompt, plan.floor)
    reused = session.reused
    session.close()
    if reused < plan.at and reused % bench.segment == 0:
        right = bench.resume(Resume("omission", prompt, reused, bench.cold_at(reused), plan.floor))
        return Omission.DETECTED if right else Omission.MISSED
    canonical, pins = bench.canonical(prompt, plan.at // bench.segment * bench.segment)
    right = bench.resume(Resume("omission", prompt, plan.at, plan.cache, plan.floor, canonical, pins))
    return Omission.HARMLESS if right else Omission.MISSED


def _changes_logits(bench: Bench, group: GroupSpec, plan: Resume) -> bool:
    """Whether a cold cache whose tensors of this group are zeroed gives other logits."""
    count = plan.prompt.shape[1]
    chunks = canonical_chunks(count, bench.segment, plan.at)
    right = bench.cold(plan.prompt, chunks, plan.cache)
    wrong = bench.cold(plan.prompt, chunks, without(plan.cache, group))
    return any(not torch.equal(a, b) for a, b in zip(right.logits, wrong.logits, strict=True))


def without(cache: DynamicCache, group: GroupSpec) -> DynamicCache:
    """A copy of a cold cache in which the state of one group is all zeros."""
    changed = copy.deepcopy(cache)
    for layer in group.layers:
        for tensor in group.tensors:
            state = tensor_of(changed.layers[layer], tensor.name)
            if state is not None:
                state.zero_()
    return changed


def _note(result: KindResult, outcome: Omission, matters: bool) -> None:
    """Keep the worst outcome of a kind's groups."""
    so_far = result.omission or Omission.DETECTED
    result.omission = max(so_far, outcome, key=_WORST.index)
    result.changes_logits = matters and result.changes_logits is not False
