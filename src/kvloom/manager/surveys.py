"""From where a prompt could go on, and what that would take: the facts that recovery is chosen by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvloom.core import candidates
from kvloom.core.arrays import Arrays
from kvloom.core.candidates import PLAN_COLUMNS, POSITION, REPLAYED, RESTORED, WORST
from kvloom.manager.transfers import Prompt
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import AnyArray, Grade, Kind


@dataclass(frozen=True, slots=True)
class Reach:
    """A boundary that can be reached, and what is missing there on the device.

    Attributes:
        position: tokens that need no compute.
        tiers: how many of the colder tiers are asked, the nearest first.
        tier_bytes, tier_objects: what each tier brings, ``[tiers that there are]``.
        kind_bytes: the same bytes by the name of the kind.
        missing: indices of the groups of which nobody has something that is needed; empty for a boundary that
            needs no replay.
        grade: the worst grade of the kept or stored prefix that a replay would build on.
    """

    position: int
    tiers: int
    tier_bytes: tuple[int, ...]
    tier_objects: tuple[int, ...]
    kind_bytes: dict[str, int]
    missing: tuple[int, ...]
    grade: Grade


@dataclass(frozen=True, slots=True)
class Survey:
    """From where a prompt could go on.

    Attributes:
        tokens: how far it may resume at most: all but the last token of the prompt.
        reused: tokens that the device alone gives.
        floor: the worst grade that the request accepts.
        restored: boundaries behind ``reused`` that colder tiers reach; each needs more tiers than the one before and
            is deeper.
        replayed: boundaries behind ``reused`` at which the prefix groups alone can be reached, in the same order.
    """

    tokens: int
    reused: int
    floor: Grade
    restored: tuple[Reach, ...]
    replayed: tuple[Reach, ...]


def survey(a: Arrays, spec: ModelSpec, prompt: Prompt, colds: Sequence[AnyArray], reused: int, floor: Grade) -> Survey:
    """See ``ColderTiers.survey``; ``colds``: grades by tier, as ``Transfers.cold`` makes them."""
    tiers, rows, columns = len(colds), -(-len(prompt.tokens) // spec.segment_tokens), a.columns.shape[1]
    cold = np.full((tiers + 1, rows, columns), -1, dtype=np.int8)
    for tier, one in enumerate(colds, start=1):
        cold[tier] = one
    found = np.zeros((tiers + 1, 2, PLAN_COLUMNS), dtype=np.int64)
    counts = np.zeros((tiers + 1, 2, tiers + 1, len(spec.groups)), dtype=np.int64)
    tail = len(prompt.tokens) % spec.segment_tokens
    candidates.survey(a, prompt.path, prompt.checkpoint, cold, tail, int(floor), found, counts)

    # Windows alone could be made for tokens that nobody ever computed: that is no recovery of something lost.
    known = len(prompt.tokens) if prompt.checkpoint >= 0 else prompt.known * spec.segment_tokens
    most = len(prompt.tokens) if any(spec.of_kind(Kind.COMPRESSED, Kind.INDEXER)) else known

    def reaches(kind: int) -> tuple[Reach, ...]:
        best, made = reused, []
        for level in range(tiers + 1):
            position, worst = int(found[level, kind, POSITION]), int(found[level, kind, WORST])
            lost = tuple(np.flatnonzero(counts[level, kind, -1]).tolist())
            if position <= best or (kind == REPLAYED and (not lost or position > most)):
                continue
            best = position
            made.append(_reach(spec, position, level, counts[level, kind, :-1], lost, worst))
        return tuple(made)

    return Survey(len(prompt.tokens), reused, floor, reaches(RESTORED), reaches(REPLAYED))


def _reach(spec: ModelSpec, position: int, level: int, objects: AnyArray, lost: tuple[int, ...], worst: int) -> Reach:
    sizes = np.array([group.slot_bytes for group in spec.groups], dtype=np.int64)
    kinds: dict[str, int] = {}
    for group, n_bytes in zip(spec.groups, (objects.sum(axis=0) * sizes).tolist(), strict=True):
        if n_bytes:
            name = group.kind.name.lower()
            kinds[name] = kinds.get(name, 0) + n_bytes
    return Reach(
        position,
        level,
        tuple((objects @ sizes).tolist()),
        tuple(objects.sum(axis=1).tolist()),
        kinds,
        lost,
        Grade.CANONICAL if worst < 0 else Grade(worst),
    )
