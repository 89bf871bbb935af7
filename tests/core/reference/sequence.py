"""A running sequence of the reference: its blocks in one dictionary per group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.core.reference.arena import HITS, UNKEPT, Slot
from tests.core.reference.core import PREFIX_KINDS
from tests.core.reference.index import Node, Place

from kvloom.errors import SequenceError
from kvloom.plan import Explanation
from kvloom.types import Grade, ObjectState

if TYPE_CHECKING:
    from tests.core.reference.manager import Copy, RefManager, Ticket

NO_PLAN = 0


class RefSequence:
    """``blocks[g]`` maps logical blocks to slots; snapshot groups have their live slot at block 0."""

    def __init__(self, manager: RefManager, tokens: Sequence[int], node: Node, grade: Grade, floor: Grade) -> None:
        self.manager = manager
        self.tokens = list(tokens)
        self.reused = self.length = len(self.tokens)
        self.node = node
        self.grade = grade
        self.floor = floor
        self.pending = 0
        self.stepped = False
        self.broken = self.closed = self.detached = self.forgetful = False
        self.epoch = manager.arena.clock
        self.committed = self.length // manager.spec.segment_tokens
        self.blocks: list[dict[int, Slot]] = [{} for _ in manager.core.groups]
        self.explanation: Explanation | None = None
        self.restore = NO_PLAN

    # ---------------------------------------------------------------- opening

    @classmethod
    def lease(
        cls, manager: RefManager, hit: Node, prompt: tuple[int, ...], floor: Grade, explanation: Explanation
    ) -> RefSequence:
        """Stand on the last segment of ``hit``; own live slots and copies of the blocks of a checkpoint.

        Standing there keeps the prefix blocks of the segments above; windows and snapshots are held one by one.
        """
        core, arena = manager.core, manager.arena
        leased = [(g, position, n, n.columns[place]) for g, position, n, place in manager.objects_needed(hit)]
        at_segment = hit.is_segment or hit.parent is None
        grades = [slot.grade for _, _, _, slot in leased if isinstance(slot, Slot)]
        grade = Grade(min(grades, default=Grade.CANONICAL))
        sequence = cls(manager, prompt[: hit.end], hit if at_segment else hit.parent or hit, grade, floor)
        for stand in dict.fromkeys((sequence.node, hit)):
            core.hold_node(stand)
            core.touch(stand)
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
        copies = sequence._live_slots(sources)
        ready: list[Slot] = []
        if copies is not None and not at_segment:
            private = sequence._private_blocks(hit, originals, ready)
            copies = None if private is None else copies + private
        if copies is not None:
            sequence.restore = number(manager.issue(copies, ready))
        for slot in originals:
            arena.release(slot)
        if copies is None:
            sequence._let_go()
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

    def published(self, g: int, block: int) -> bool:
        """Whether a block belongs to the index, and is kept by where the sequence stands."""
        group = self.manager.core.groups[g]
        return group.kind in PREFIX_KINDS and block * group.tokens < self.committed * self.manager.spec.segment_tokens

    def _live_slots(self, sources: dict[int, Slot]) -> list[Copy] | None:
        from tests.core.reference.manager import Copy

        copies = []
        for group in self.manager.core.groups:
            if not group.snapshot:
                continue
            live = self.manager.take(group.index)
            if live is None:
                return None
            self.blocks[group.index][0] = live
            source = sources.get(group.index)
            if source is not None:
                live.grade = source.grade
            copies.append(Copy(group.index, source, live))
        return copies

    def _private_blocks(self, hit: Node, originals: list[Slot], ready: list[Slot]) -> list[Copy] | None:
        from tests.core.reference.manager import Copy

        copies = []
        for group in self.manager.core.groups:
            if group.snapshot:
                continue
            for block in sorted(self.blocks[group.index]):
                if block * group.tokens < hit.start:
                    continue
                own = self.manager.take(group.index)
                if own is None:
                    return None
                original = self.blocks[group.index][block]
                originals.append(original)
                self.blocks[group.index][block] = own
                own.grade = original.grade
                copies.append(Copy(group.index, original, own))
                if (block + 1) * group.tokens <= hit.end:
                    ready.append(own)
        return copies

    # ---------------------------------------------------------------- growing

    def append(self, ids: Sequence[int]) -> None:
        """Reserve the blocks that these tokens write."""
        manager = self.usable()
        if self.pending:
            raise SequenceError("pending")
        manager.arena.clock += 1
        if self.reserve(len(ids)) is not None and (not manager.collect() or self.reserve(len(ids)) is not None):
            raise manager.no_room(self.length + len(ids))
        self.add(ids, stepped=False)

    def reserve(self, count: int) -> int | None:
        """Take the blocks that ``count`` more tokens write; the group without room, and nothing changed, or None."""
        end = self.length + count
        for group in self.manager.core.groups:
            if group.snapshot:
                continue
            for block in range(group.begun(self.length), group.begun(end)):
                slot = self._block_or_none(group.index, block, group.begun(end))
                if slot is None:
                    self._shrink_to(self.length, up_to=group.index)
                    return group.index
                self.blocks[group.index][block] = slot
        return None

    def add(self, ids: Sequence[int], *, stepped: bool) -> None:
        """The tokens of the next forward."""
        del self.tokens[self.length :]
        self.tokens += ids
        self.pending = len(ids)
        self.stepped = stepped

    def take_back(self) -> None:
        """Those tokens will not be computed."""
        self.pending = 0
        self.stepped = False
        self._shrink_to(self.length, up_to=len(self.blocks))

    def _block_or_none(self, group: int, block: int, wanted: int) -> Slot | None:
        held = self.blocks[group]
        first = min(held, default=block)
        return self.manager.core.take(group) if wanted - first <= self.manager.widths[group] else None

    def _shrink_to(self, position: int, up_to: int) -> None:
        """Give back the blocks that begin after ``position``, deepest first."""
        for group in self.manager.core.groups[: up_to + 1]:
            held = self.blocks[group.index]
            for block in sorted(held, reverse=True):
                if not group.snapshot and block >= group.begun(position):
                    self.manager.arena.release(held.pop(block))

    def commit(self, grade: Grade) -> Ticket | None:
        """The pending tokens were computed: publish the segments that they complete, and their snapshots."""
        manager = self.usable()
        if not self.pending or self.stepped:
            raise SequenceError("nothing pending, or a batch has to finish it")
        manager.arena.clock += 1
        return self.snapshot_plan() if self.compute(grade) else None

    def compute(self, grade: Grade) -> bool:
        """The pending tokens were computed; whether a published segment ends with them."""
        manager = self.manager
        segment = manager.spec.segment_tokens
        canonical = self.pending == segment and self.length % segment == 0
        self.grade = min(grade, self.grade, Grade.CANONICAL if canonical else Grade.FAITHFUL)
        self.forgetful = self.forgetful or (self.detached and self.stepped)
        self._mark_computed()
        self.length += self.pending
        self.pending = 0
        self.stepped = False
        while not self.detached and (self.committed + 1) * segment <= self.length:
            self._publish_segment()
        for group in manager.core.groups:
            held = self.blocks[group.index]
            for block in sorted(held, reverse=True):
                if not group.snapshot and block not in group.needed(self.length):
                    manager.arena.release(held.pop(block))
        return not self.detached and self.length == self.committed * segment

    def _mark_computed(self) -> None:
        for group in self.manager.core.groups:
            for block, slot in self.blocks[group.index].items():
                if group.snapshot:
                    slot.grade = min(slot.grade, self.grade)
                elif (block + 1) * group.tokens > self.length:
                    slot.grade = min(slot.grade, self.grade)
                    complete = (block + 1) * group.tokens <= self.length + self.pending
                    if complete and slot.state is ObjectState.ALLOCATED:
                        slot.state = ObjectState.READY

    def _publish_segment(self) -> None:
        """Hand the segment's blocks to the index; where it has prefix blocks as good, go on with those."""
        core = self.manager.core
        segment = self.manager.spec.segment_tokens
        start = self.committed * segment
        end = start + segment
        node = self._child_or_new(self.tokens[start:end])
        if node is None:
            self.detached = True
            return
        for group in core.groups:
            for block, slot in sorted(self.blocks[group.index].items()):
                if group.snapshot or not start <= block * group.tokens < end:
                    continue
                place = (group.index, block - start // group.tokens)
                private = slot.owner is None and slot.state is ObjectState.READY
                if private and block in group.needed(end):
                    core.adopt(node, place, slot)
                if group.kind in PREFIX_KINDS:
                    kept = node.columns[place]
                    assert isinstance(kept, Slot)
                    self.blocks[group.index][block] = kept
                    self.manager.arena.release(slot)
        core.touch(node)
        core.release_node(self.node)
        self.node = node
        self.committed += 1

    def _child_or_new(self, tokens: Sequence[int]) -> Node | None:
        """The node below this sequence's deepest one with these tokens, held once more; None when none can be had.

        In a full index leaves make room, then namespaces that nothing hangs on; for a checkpoint the other way round.
        """
        core = self.manager.core
        node = self.node.child(tokens)
        if node is not None:
            core.hold_node(node)
            return node
        node = core.new_node(self.node, tokens)
        if node is None and len(tokens) == self.manager.spec.segment_tokens and core.make_place():
            node = core.new_node(self.node, tokens)
        if node is None and self.manager.make_place():
            node = core.new_node(self.node, tokens)
        return node

    def _snapshots(self, node: Node, *, asked: bool) -> tuple[list[Copy], list[tuple[Node, Place, Slot]]] | None:
        """Slots for the snapshots that ``node`` lacks; None when there is no room."""
        from tests.core.reference.manager import Copy

        core, arena = self.manager.core, self.manager.arena
        copies = []
        for group in core.groups:
            if not group.snapshot:
                continue
            wanted = group.snapshot_needed(self.length) if asked else group.snapshot_kept(self.length)
            present = node.columns[(group.index, 0)]
            if not wanted or (isinstance(present, Slot) and present.grade >= self.grade):
                continue
            slot = core.take(group.index)
            if slot is None:
                for copy in copies:
                    arena.release(copy.dst)
                arena.counters[group.index][UNKEPT] += 1
                return None
            slot.grade = self.grade
            copies.append(Copy(group.index, self.blocks[group.index][0], slot))
        return copies, [(node, (c.group, 0), c.dst) for c in copies]

    def snapshot_plan(self, *, asked: bool = False) -> Ticket | None:
        """The copies of the snapshots that this segment end keeps."""
        found = self._snapshots(self.node, asked=asked)
        if not found or not found[0]:
            return None
        self.manager.core.hold_node(self.node)
        return self.manager.issue(found[0], publish=found[1], node=self.node)

    def checkpoint(self) -> Ticket | None:
        """Keep the present end: snapshots at a segment end, else sealed copies of the begun segment as well."""
        manager = self.usable()
        if self.pending:
            raise SequenceError("pending")
        if self.detached or self.length == 0:
            return None
        manager.arena.clock += 1
        if self.length == self.committed * manager.spec.segment_tokens:
            return self.snapshot_plan(asked=True)
        tail = self.tokens[self.committed * manager.spec.segment_tokens : self.length]
        known = self.node.child(tail)
        if known is not None and self._sealed_already(known):
            return None
        node = self._child_or_new(tail)
        if node is None:
            return None
        sealed = self._sealed_blocks(node)
        found = None if sealed is None else self._snapshots(node, asked=True)
        if sealed is None or found is None:
            for _, copy in sealed or []:
                manager.arena.release(copy.dst)
            manager.core.release_node(node)
            return None
        copies = found[0] + [copy for _, copy in sealed]
        publish = found[1] + [(node, place, copy.dst) for place, copy in sealed]
        return manager.issue(copies, publish=publish, node=node)

    def _sealed_already(self, node: Node) -> bool:
        needed = [(n, place) for _, _, n, place in self.manager.objects_needed(node) if n is node]
        have = [n.columns[place] for n, place in needed]
        return all(isinstance(slot, Slot) and slot.grade >= self.grade for slot in have)

    def _sealed_blocks(self, node: Node) -> list[tuple[Place, Copy]] | None:
        from tests.core.reference.manager import Copy

        core, arena = self.manager.core, self.manager.arena
        sealed: list[tuple[Place, Copy]] = []
        for group in core.groups:
            for block in [] if group.snapshot else group.needed(self.length):
                if block * group.tokens < node.start:
                    continue
                slot = core.take(group.index)
                if slot is None:
                    for _, copy in sealed:
                        arena.release(copy.dst)
                    arena.counters[group.index][UNKEPT] += 1
                    return None
                source = self.blocks[group.index][block]
                slot.grade = source.grade
                place = (group.index, block - node.start // group.tokens)
                sealed.append((place, Copy(group.index, source, slot, group.entries_in(block, self.length))))
        return sealed

    def fork(self) -> RefSequence:
        """Share the blocks of published segments; copy the rest and the live state."""
        from tests.core.reference.manager import Copy

        manager = self.usable()
        if self.pending:
            raise SequenceError("pending")
        manager.arena.clock += 1
        manager.need_row()
        shared_end = self.length if self.detached else self.committed * manager.spec.segment_tokens
        child = RefSequence(manager, self.tokens[: self.length], self.node, self.grade, self.floor)
        child.committed, child.detached, child.forgetful = self.committed, self.detached, self.forgetful
        child.epoch = self.epoch
        for group in manager.core.groups:
            for block, slot in [] if group.snapshot else sorted(self.blocks[group.index].items()):
                if block < group.full(shared_end):
                    if not self.published(group.index, block):
                        manager.arena.hold(slot)
                    child.blocks[group.index][block] = slot
        copies: list[Copy] = []
        ready: list[Slot] = []
        for group in manager.core.groups:
            for block, slot in sorted(self.blocks[group.index].items()):
                if block in child.blocks[group.index]:
                    continue
                own = manager.take(group.index)
                if own is None:
                    child._let_go()
                    raise manager.no_room(self.length)
                child.blocks[group.index][block] = own
                own.grade = slot.grade
                copies.append(Copy(group.index, slot, own))
                if not group.snapshot and block < group.full(self.length):
                    ready.append(own)
        manager.core.hold_node(child.node)
        child.restore = number(manager.issue(copies, ready))
        explanation = self.explanation
        if explanation is not None and self.length:
            explanation = Explanation(
                explanation.boundary,
                self.grade,
                explanation.prompt_tokens,
                explanation.known_tokens,
                explanation.limits,
            )
        child.explanation = explanation
        manager.running.append(child)
        return child

    def rollback(self) -> None:
        """The pending tokens were not computed."""
        manager = self.usable()
        if not self.pending:
            raise SequenceError("nothing pending")
        self.broken = any(group.snapshot for group in manager.core.groups)
        self.take_back()

    def close(self) -> None:
        """Release everything, group by group, deepest block first."""
        if self.closed:
            return
        self.manager.arena.clock += 1
        self.closed = True
        self._let_go()
        self.manager.core.touch(self.node)
        self.manager.core.release_node(self.node)
        self.manager.running.remove(self)
        self.manager.reap()

    # ---------------------------------------------------------------- parts

    def usable(self) -> RefManager:
        """SequenceError unless the sequence may go on."""
        if self.closed or self.broken or self.restore in self.manager.tickets:
            raise SequenceError("unusable")
        return self.manager

    def _let_go(self) -> None:
        for g, held in enumerate(self.blocks):
            for block in sorted(held, reverse=True):
                slot = held.pop(block)
                if not self.published(g, block):
                    self.manager.arena.release(slot)


def number(ticket: Ticket | None) -> int:
    """The number of a plan; 0 for an empty one."""
    return NO_PLAN if ticket is None else ticket.number
