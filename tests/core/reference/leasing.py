"""Opening and forking: what a new sequence shares, and what it gets of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.core.reference.arena import HITS, Slot
from tests.core.reference.index import Node
from tests.core.reference.plans import Copy, number
from tests.core.reference.sequence import RefSequence

from kvloom.errors import SequenceError
from kvloom.plan import Explanation
from kvloom.types import Grade

if TYPE_CHECKING:
    from tests.core.reference.manager import RefManager


def lease(
    manager: RefManager, hit: Node, prompt: tuple[int, ...], floor: Grade, explanation: Explanation, priority: int
) -> RefSequence:
    """Stand on the last segment of ``hit``; own live slots and copies of the blocks of a checkpoint.

    Standing there keeps the prefix blocks of the segments above; windows and snapshots are held one by one.
    """
    core, arena = manager.core, manager.arena
    leased = [(g, position, n, n.columns[place]) for g, position, n, place in manager.objects_needed(hit)]
    at_segment = hit.is_segment or hit.parent is None
    grades = [slot.grade for _, _, _, slot in leased if isinstance(slot, Slot)]
    grade = Grade(min(grades, default=Grade.CANONICAL))
    sequence = RefSequence(manager, prompt[: hit.end], hit if at_segment else hit.parent or hit, grade, floor)
    sequence.priority = priority
    for stand in dict.fromkeys((sequence.node, hit)):
        core.hold_node(stand)
        core.touch(stand)
    core.rules.opened(sequence.node)
    core.worth.resumed(sequence.node)
    if hit is not sequence.node:
        core.rules.resumed(hit)
    sources: dict[int, Slot] = {}
    for g, position, _, slot in leased:
        assert isinstance(slot, Slot)
        arena.counters[g][HITS] += 1
        if core.groups[g].snapshot:
            sources[g] = slot
            arena.hold(slot)
            continue
        block = position // core.groups[g].tokens
        sequence.blocks[g][block] = slot
        if not sequence.published(g, block):
            arena.hold(slot)
    originals: list[Slot] = []
    possible = not manager.lacks_room(_private_need(sequence, None if at_segment else hit.start))
    copies = _live_slots(sequence, sources) if possible else None
    ready: list[Slot] = []
    if copies is not None and not at_segment:
        private = _private_blocks(sequence, hit, originals, ready)
        copies = None if private is None else copies + private
    if copies is not None:
        sequence.restore = number(manager.issue(copies, ready))
    for slot in originals:
        arena.release(slot)
    if copies is None:
        sequence.let_go()
    for slot in sources.values():
        arena.release(slot)
    if not at_segment:
        core.release_node(hit)
    if copies is None:
        core.release_node(sequence.node)
        raise manager.no_room(len(prompt))
    known = explanation
    sequence.explanation = Explanation(
        hit.end, grade if hit.end else None, known.prompt_tokens, known.known_tokens, known.limits
    )
    return sequence


def _private_need(sequence: RefSequence, start: int | None) -> dict[int, int]:
    """Live slots, and copies of the blocks from ``start`` on."""
    need = {}
    for group in sequence.manager.core.groups:
        own = [b for b in sequence.blocks[group.index] if start is not None and b * group.tokens >= start]
        need[group.index] = 1 if group.snapshot else len(own)
    return need


def _live_slots(sequence: RefSequence, sources: dict[int, Slot]) -> list[Copy] | None:
    copies = []
    for group in sequence.manager.core.groups:
        if not group.snapshot:
            continue
        live = sequence.manager.core.take(group.index)
        if live is None:
            return None
        sequence.blocks[group.index][0] = live
        source = sources.get(group.index)
        if source is not None:
            live.grade = source.grade
        copies.append(Copy(group.index, source, live))
    return copies


def _private_blocks(sequence: RefSequence, hit: Node, originals: list[Slot], ready: list[Slot]) -> list[Copy] | None:
    copies = []
    for group in sequence.manager.core.groups:
        if group.snapshot:
            continue
        for block in sorted(sequence.blocks[group.index]):
            if block * group.tokens < hit.start:
                continue
            own = sequence.manager.core.take(group.index)
            if own is None:
                return None
            original = sequence.blocks[group.index][block]
            originals.append(original)
            sequence.blocks[group.index][block] = own
            own.grade = original.grade
            copies.append(Copy(group.index, original, own))
            if (block + 1) * group.tokens <= hit.end:
                ready.append(own)
    return copies


def fork(sequence: RefSequence) -> RefSequence:
    """Share the blocks of published segments; copy the rest and the live state."""
    manager = sequence.usable()
    if sequence.pending:
        raise SequenceError("pending")
    manager.arena.clock += 1
    manager.need_row()
    shared_end = sequence.length if sequence.detached else sequence.committed * manager.spec.segment_tokens
    child = RefSequence(manager, sequence.tokens[: sequence.length], sequence.node, sequence.grade, sequence.floor)
    child.committed, child.detached, child.forgetful = sequence.committed, sequence.detached, sequence.forgetful
    child.epoch = sequence.epoch
    child.priority, child.parts = sequence.priority, sequence.parts
    for group in manager.core.groups:
        for block, slot in [] if group.snapshot else sorted(sequence.blocks[group.index].items()):
            if block < group.full(shared_end):
                if not sequence.published(group.index, block):
                    manager.arena.hold(slot)
                child.blocks[group.index][block] = slot
    need = {g: len(sequence.blocks[g]) - len(child.blocks[g]) for g in range(len(sequence.blocks))}
    if manager.lacks_room(need):
        child.let_go()
        raise manager.no_room(sequence.length)
    copies: list[Copy] = []
    ready: list[Slot] = []
    for group in manager.core.groups:
        for block, slot in sorted(sequence.blocks[group.index].items()):
            if block in child.blocks[group.index]:
                continue
            own = manager.core.take(group.index)
            if own is None:
                child.let_go()
                raise manager.no_room(sequence.length)
            child.blocks[group.index][block] = own
            own.grade = slot.grade
            copies.append(Copy(group.index, slot, own))
            if not group.snapshot and block < group.full(sequence.length):
                ready.append(own)
    manager.core.hold_node(child.node)
    child.restore = number(manager.issue(copies, ready))
    explanation = sequence.explanation
    if explanation is not None and sequence.length:
        explanation = Explanation(
            explanation.boundary,
            sequence.grade,
            explanation.prompt_tokens,
            explanation.known_tokens,
            explanation.limits,
        )
    child.explanation = explanation
    manager.running.append(child)
    return child
