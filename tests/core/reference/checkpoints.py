"""What a sequence keeps for later: snapshots at segment ends, and sealed copies at checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.core.reference.arena import UNKEPT, Slot
from tests.core.reference.index import Node, Place
from tests.core.reference.plans import Copy, Ticket

from kvloom.errors import SequenceError

if TYPE_CHECKING:
    from tests.core.reference.sequence import RefSequence


def child_or_new(sequence: RefSequence, tokens: Sequence[int]) -> Node | None:
    """The node below this sequence's deepest one with these tokens, held once more; None when none can be had.

    In a full index leaves make room, then namespaces that nothing hangs on; for a checkpoint the other way round.
    """
    core = sequence.manager.core
    node = sequence.node.child(tokens)
    if node is not None:
        core.hold_node(node)
        return node
    node = core.new_node(sequence.node, tokens)
    if node is None and len(tokens) == sequence.manager.spec.segment_tokens and core.make_place():
        node = core.new_node(sequence.node, tokens)
    if node is None and sequence.manager.make_place():
        node = core.new_node(sequence.node, tokens)
    if node is not None:
        core.worth.branched(node)
    return node


def _snapshots_wanted(sequence: RefSequence, node: Node, *, asked: bool) -> dict[int, int]:
    """One slot for each group whose snapshot ``node`` keeps and does not have as good already."""
    wanted = {}
    asked = asked or sequence.parts_here
    for group in sequence.manager.core.groups:
        present = node.columns[(group.index, 0)]
        kept = group.snapshot_needed(sequence.length) if asked else group.snapshot_kept(sequence.length)
        if group.snapshot and kept and not (isinstance(present, Slot) and present.grade >= sequence.grade):
            wanted[group.index] = 1
    return wanted


def _snapshots(
    sequence: RefSequence, node: Node, *, asked: bool
) -> tuple[list[Copy], list[tuple[Node, Place, Slot]]] | None:
    """Slots for the snapshots that ``node`` lacks; None when there is no room."""
    core, arena = sequence.manager.core, sequence.manager.arena
    copies = []
    wanted = _snapshots_wanted(sequence, node, asked=asked)
    asked = asked or sequence.parts_here
    full = core.lacks_room(wanted)
    if full is not None:
        arena.counters[full][UNKEPT] += 1
        return None
    for group in core.groups:
        if group.index not in wanted:
            continue
        lasting = asked or core.worth.is_rest(sequence.length)
        slot = core.take_lasting(group.index) if lasting else core.take(group.index)
        if slot is None:
            for copy in copies:
                arena.release(copy.dst)
            arena.counters[group.index][UNKEPT] += 1
            return None
        slot.grade = sequence.grade
        copies.append(Copy(group.index, sequence.blocks[group.index][0], slot))
    return copies, [(node, (c.group, 0), c.dst) for c in copies]


def snapshot_plan(sequence: RefSequence, *, asked: bool) -> Ticket | None:
    """The copies of the snapshots that this segment end keeps."""
    found = _snapshots(sequence, sequence.node, asked=asked)
    if not found or not found[0]:
        return None
    sequence.manager.core.hold_node(sequence.node)
    return sequence.manager.issue(found[0], publish=found[1], node=sequence.node)


def checkpoint(sequence: RefSequence) -> Ticket | None:
    """Keep the present end: snapshots at a segment end, else sealed copies of the begun segment as well."""
    manager = sequence.usable()
    if sequence.pending:
        raise SequenceError("pending")
    if sequence.detached or sequence.length == 0:
        return None
    manager.arena.clock += 1
    sequence.republish()
    manager.core.worth.end(sequence.node)
    if sequence.length == sequence.committed * manager.spec.segment_tokens:
        return snapshot_plan(sequence, asked=True)
    tail = sequence.tokens[sequence.committed * manager.spec.segment_tokens : sequence.length]
    known = sequence.node.child(tail)
    if known is not None and _sealed_already(sequence, known):
        return None
    node = child_or_new(sequence, tail)
    if node is None:
        return None
    manager.core.rules.noted(node, sequence.priority)
    need = _snapshots_wanted(sequence, node, asked=True)
    for group in manager.core.groups:
        if not group.snapshot:
            own = [b for b in group.needed(sequence.length) if b * group.tokens >= node.start]
            need[group.index] = len(own)
    full = manager.core.lacks_room(need)
    if full is not None:
        manager.arena.counters[full][UNKEPT] += 1
        manager.core.release_node(node)
        return None
    sealed = _sealed_blocks(sequence, node)
    found = None if sealed is None else _snapshots(sequence, node, asked=True)
    if sealed is None or found is None:
        for _, copy in sealed or []:
            manager.arena.release(copy.dst)
        manager.core.release_node(node)
        return None
    copies = found[0] + [copy for _, copy in sealed]
    publish = found[1] + [(node, place, copy.dst) for place, copy in sealed]
    return manager.issue(copies, publish=publish, node=node)


def _sealed_already(sequence: RefSequence, node: Node) -> bool:
    needed = [(n, place) for _, _, n, place in sequence.manager.objects_needed(node) if n is node]
    have = [n.columns[place] for n, place in needed]
    return all(isinstance(slot, Slot) and slot.grade >= sequence.grade for slot in have)


def _sealed_blocks(sequence: RefSequence, node: Node) -> list[tuple[Place, Copy]] | None:
    core, arena = sequence.manager.core, sequence.manager.arena
    sealed: list[tuple[Place, Copy]] = []
    for group in core.groups:
        for block in [] if group.snapshot else group.needed(sequence.length):
            if block * group.tokens < node.start:
                continue
            slot = core.take_lasting(group.index)
            if slot is None:
                for _, copy in sealed:
                    arena.release(copy.dst)
                arena.counters[group.index][UNKEPT] += 1
                return None
            source = sequence.blocks[group.index][block]
            slot.grade = source.grade
            place = (group.index, block - node.start // group.tokens)
            sealed.append((place, Copy(group.index, source, slot, group.entries_in(block, sequence.length))))
    return sealed
