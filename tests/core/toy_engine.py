"""A toy engine that really computes: every row of every slot says which tokens it was made from.

Entries are digests of the whole prefix, so a slot that is wrong, stale, torn or somebody else's shows up as soon as
a forward reads it.  Each entry also knows with which grade it was made, which checks what the manager calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.core.reference.rules import Group

from kvloom.core.fields import GRADE, OWNER, SLOT_BASE, STATE
from kvloom.core.lifecycle import COMMITTED
from kvloom.core.page_table import FIRST, LAST, place
from kvloom.manager import CachedSequence, Manager
from kvloom.plan import CopyPlan
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import Grade

Entry = tuple[int, int] | None
"""(digest of the tokens up to and including this one, the grade that it was made with), or None for zeros."""


class WrongStateError(AssertionError):
    """A forward would have read something else than a cold run computes."""


def digest(tokens: Sequence[int]) -> int:
    """Identity of a prefix."""
    return hash(tuple(tokens))


@dataclass
class ToyArena:
    """Contents of slots: (group, slot) -> entries."""

    spec: ModelSpec
    slots: dict[tuple[int, int], list[Entry]] = field(default_factory=dict)

    def read(self, group: int, slot: int) -> list[Entry]:
        """The entries of a slot, zeros when it was never written."""
        return self.slots.setdefault((group, slot), [None] * self.spec.groups[group].block_entries)

    def run(self, plan: CopyPlan) -> None:
        """Execute the copies of a plan in order."""
        columns = (plan.group.tolist(), plan.src.tolist(), plan.dst.tolist(), plan.entries.tolist())
        for group, source, target, entries in zip(*columns, strict=True):
            content = list(self.read(group, source)) if source >= 0 else [None] * len(self.read(group, target))
            if entries >= 0:
                content[entries:] = [None] * (len(content) - entries)
            self.slots[(group, target)] = content


class ToyEngine:
    """Drives a manager the way an engine does, checking every read."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.spec = manager.spec
        self.arena = ToyArena(manager.spec)
        self.groups = [Group(manager.spec, g) for g in range(len(manager.spec.groups))]

    # ---------------------------------------------------------------- the life of a request

    def open(self, tokens: Sequence[int], **options: Any) -> CachedSequence:
        """Open and restore."""
        sequence = self.manager.open(np.array(tokens, dtype=np.int32), **options)
        assert list(sequence.tokens) == list(tokens[: sequence.reused])
        self.finish(sequence.restore)
        self.check(sequence)
        return sequence

    def finish(self, plan: CopyPlan) -> None:
        """Execute a plan and report it."""
        self.arena.run(plan)
        if plan.ticket:
            self.manager.complete(plan)

    def forward(self, sequence: CachedSequence, tokens: Sequence[int], grade: Grade = Grade.CANONICAL) -> CopyPlan:
        """Append, compute, commit; the plan of the commit is executed but not reported."""
        sequence.append(np.array(tokens, dtype=np.int32))
        self.compute(sequence, tokens, grade)
        plan = sequence.commit(grade)
        self.arena.run(plan)
        return plan

    def step(self, sequence: CachedSequence, tokens: Sequence[int], grade: Grade = Grade.CANONICAL) -> None:
        """A forward with everything that belongs to it."""
        plan = self.forward(sequence, tokens, grade)
        if plan.ticket:
            self.manager.complete(plan)

    def prefill(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Compute ``tokens`` from where the sequence is: up to the next segment end, then segment by segment."""
        segment = self.spec.segment_tokens
        while sequence.length < len(tokens):
            end = min(len(tokens), (sequence.length // segment + 1) * segment)
            self.step(sequence, tokens[sequence.length : end])

    def request(
        self, prompt: Sequence[int], answer: Sequence[int] = (), *, keep: bool = True, **options: Any
    ) -> CachedSequence:
        """A whole request up to just before its last token: prefill, checkpoint, answer, checkpoint, close."""
        sequence = self.open(prompt, **options)
        self.prefill(sequence, prompt[:-1])
        if keep:
            self.finish(sequence.checkpoint())
        for token in [*prompt[-1:], *answer][: len(answer)]:
            self.step(sequence, [token])
        if keep and answer:
            self.finish(sequence.checkpoint())
        sequence.close()
        return sequence

    # ---------------------------------------------------------------- computing and checking

    def compute(self, sequence: CachedSequence, new: Sequence[int], claim: Grade = Grade.CANONICAL) -> None:
        """Write the state of ``new`` tokens after checking everything that their forward reads."""
        self.check(sequence)
        tokens = [*sequence.tokens.tolist(), *new]
        start, segment = sequence.length, self.spec.segment_tokens
        whole = start % segment == 0 and len(new) == segment
        grade = min(int(claim), self.worst(sequence), int(Grade.CANONICAL if whole else Grade.FAITHFUL))
        for group in self.groups:
            table = sequence.block_table(group.index)
            if group.snapshot:
                self.arena.slots[(group.index, int(table[0]))] = [(digest(tokens), grade)]
                continue
            entries, ratio = self.spec.groups[group.index].block_entries, self.spec.groups[group.index].ratio
            for entry in range(start // ratio, len(tokens) // ratio):
                slot = int(table[entry // entries % len(table)])
                self._check_private(group.index, slot)
                made = (digest(tokens[: (entry + 1) * ratio]), grade)
                self.arena.read(group.index, slot)[entry % entries] = made

    def _check_private(self, group: int, slot: int) -> None:
        """A forward writes only into slots that are not cached and that no other sequence reads."""
        arrays, rows = self.manager.arrays, self.manager.rows
        readers = 0
        for row in [s.row for s in self.manager.running()]:
            first, last = rows.span[row, group, [FIRST, LAST]].tolist()
            readers += sum(int(rows.table[row, place(rows, group, block)]) == slot for block in range(first, last))
        if arrays.slot[int(arrays.group[group, SLOT_BASE]) + slot, OWNER] >= 0 or readers != 1:
            raise WrongStateError(f"group {group} slot {slot}: a forward writes into a shared object")

    def rows(self, sequence: CachedSequence) -> list[tuple[int, Entry, int]]:
        """(group, entry, digest that it must have) of all state that resuming at the present end reads."""
        found: list[tuple[int, Entry, int]] = []
        tokens, length = sequence.tokens.tolist(), sequence.length
        for group in self.groups:
            table = sequence.block_table(group.index)
            if group.snapshot:
                if group.snapshot_needed(length):
                    found.append((group.index, self.arena.read(group.index, int(table[0]))[0], digest(tokens)))
                continue
            spec = self.spec.groups[group.index]
            for entry in range(self._first_entry(group, length), length // spec.ratio):
                block, within = divmod(entry, spec.block_entries)
                content = self.arena.read(group.index, int(table[block % len(table)]))[within]
                found.append((group.index, content, digest(tokens[: (entry + 1) * spec.ratio])))
        return found

    def _first_entry(self, group: Group, length: int) -> int:
        spec = self.spec.groups[group.index]
        if not spec.window:
            return 0
        return length // spec.window * spec.window if spec.chunked else max(0, length - spec.window + 1)

    def check(self, sequence: CachedSequence) -> None:
        """WrongStateError unless everything that the next forward reads is what a cold run would have."""
        sequence.check()
        for group, content, wanted in self.rows(sequence):
            if content is None or content[0] != wanted:
                raise WrongStateError(f"group {group} at {sequence.length}: {content} instead of {wanted}")
        if sequence.grade > self.worst(sequence):
            raise WrongStateError(f"the state at {sequence.length} is called {sequence.grade} and is worse")

    def worst(self, sequence: CachedSequence) -> int:
        """The worst grade of all state at the present end; an entry that is missing has none, -1."""
        grades = (-1 if content is None else content[1] for _, content, _ in self.rows(sequence))
        return min(grades, default=int(Grade.CANONICAL))

    def check_grades(self) -> None:
        """WrongStateError when something that can be hit is called better than it was made."""
        a = self.manager.arrays
        for group, spec in enumerate(self.spec.groups):
            first = int(a.group[group, SLOT_BASE])
            for slot in range(int(self.manager.geometry.num_slots[group])):
                if a.slot[first + slot, STATE] != COMMITTED:
                    continue
                for content in self.arena.read(group, slot):
                    if content is not None and a.slot[first + slot, GRADE] > content[1]:
                        raise WrongStateError(f"{spec.name} slot {slot} is called better than it was made")
