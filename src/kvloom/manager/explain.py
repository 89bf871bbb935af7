"""Explaining a lookup: which kind, at which position, in which tier, and why the hit was not longer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvloom.core.arrays import Arrays
from kvloom.core.calls import known_tokens
from kvloom.core.fields import FIRST_CHECKPOINT, FIRST_CHILD, NTOKENS
from kvloom.core.hybrid_match import FAULT_GRADE, diagnose
from kvloom.manager.books import Books
from kvloom.plan import Explanation, Limit
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import REASON_OF_COLUMN, Grade, Int32Array, Reason


@dataclass(frozen=True, slots=True)
class Findings:
    """What a lookup found, before it is known at which grade.

    ``parts``: the segments after which the prompt parts from others that went on, beyond the hit; 0 if it does not.
    """

    known_tokens: int
    limits: tuple[Limit, ...]
    parts: int = 0

    def explanation(self, reused: int, prompt_tokens: int, grade: Grade) -> Explanation:
        """With the grade of the lease."""
        return Explanation(reused, grade if reused else None, prompt_tokens, self.known_tokens, self.limits)


def explain(books: Books, path: Int32Array, depth: int, prompt: Int32Array, reused: int, floor: Grade) -> Findings:
    """Explain the hit of ``reused`` tokens on ``path`` (``depth`` known segments)."""
    spec, arrays = books.spec, books.arrays
    limit = len(prompt) - 1
    if reused == limit:
        return Findings(reused, (Limit(Reason.LAST_TOKEN, limit),))
    known, checkpoint = known_tokens(books.handle, path, depth, prompt)
    limits: list[Limit] = []
    end = depth * spec.segment_tokens
    candidate = end if checkpoint < 0 else end + int(arrays.trunk[checkpoint, NTOKENS])
    if candidate > reused:
        limits += _faults(spec, arrays, path, depth, checkpoint, floor)
    if known == 0 and arrays.trunk[path[0], FIRST_CHILD] < 0 and arrays.node[path[0], FIRST_CHECKPOINT] < 0:
        limits.append(Limit(Reason.EMPTY, 0))
    elif known < limit:
        limits.append(Limit(Reason.TOKENS, known))
    elif candidate <= reused:
        limits.append(Limit(Reason.NOT_KEPT, limit))
    return Findings(known, tuple(limits), depth if end > reused and arrays.trunk[path[depth], FIRST_CHILD] >= 0 else 0)


def _faults(
    spec: ModelSpec, arrays: Arrays, path: Int32Array, depth: int, checkpoint: int, floor: Grade
) -> list[Limit]:
    """What is missing at the deepest boundary that the tokens would have allowed."""
    faults = np.zeros((len(spec.groups), 2), dtype=np.int64)
    diagnose(arrays, path, depth, int(floor), checkpoint, faults)
    found = []
    for group, (position, code) in zip(spec.groups, faults.tolist(), strict=True):
        if code:
            reason = Reason.GRADE if code == FAULT_GRADE else REASON_OF_COLUMN[code]
            found.append(Limit(reason, position, kind=group.kind, group=group.name))
    return found
