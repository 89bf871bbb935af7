"""A running sequence of the reference: its blocks in one dictionary per group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.core.reference.arena import Slot
from tests.core.reference.checkpoints import child_or_new, snapshot_plan
from tests.core.reference.core import PREFIX_KINDS
from tests.core.reference.index import Node
from tests.core.reference.plans import NO_PLAN, Ticket

from kvloom.errors import SequenceError
from kvloom.plan import Explanation
from kvloom.types import SLOT_EVICTED, Grade, ObjectState

if TYPE_CHECKING:
    from tests.core.reference.manager import RefManager


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
        self.priority = 0
        self.parts = 0
        self.stepped = False
        self.broken = self.closed = self.detached = self.forgetful = False
        self.epoch = manager.arena.clock
        self.committed = self.length // manager.spec.segment_tokens
        self.blocks: list[dict[int, Slot]] = [{} for _ in manager.core.groups]
        self.explanation: Explanation | None = None
        self.restore = NO_PLAN

    # ---------------------------------------------------------------- growing

    def append(self, ids: Sequence[int]) -> None:
        """Reserve the blocks that these tokens write."""
        manager = self.usable()
        if self.pending:
            raise SequenceError("pending")
        manager.arena.clock += 1
        if not self._got_room(len(ids)) and (not manager.collect() or not self._got_room(len(ids))):
            raise manager.no_room(self.length + len(ids))
        self.add(ids, stepped=False)

    def _got_room(self, count: int) -> bool:
        possible = not self.too_wide(count) and self.manager.core.lacks_room(self.need(count)) is None
        return possible and self.reserve(count)

    def need(self, count: int) -> Counter[int]:
        """Slots that ``count`` more tokens take, per group."""
        blocks = [g for g in self.manager.core.groups if not g.snapshot]
        return Counter({g.index: g.begun(self.length + count) - g.begun(self.length) for g in blocks})

    def too_wide(self, count: int) -> bool:
        """Whether ``count`` more tokens need more blocks than a block table has places."""
        return any(more and len(self.blocks[g]) + more > self.manager.widths[g] for g, more in self.need(count).items())

    def reserve(self, count: int) -> bool:
        """Take the blocks that ``count`` more tokens write; False, and nothing taken, when that fails after all."""
        for group in self.manager.core.groups:
            if group.snapshot:
                continue
            core = self.manager.core
            blocks = range(group.begun(self.length), group.begun(self.length + count))
            if core.arena.held_on is None:
                core.make_room_for(group.index, len(blocks))
            for block in blocks:
                slot = (core.take_lasting if core.worth.for_rest(group, block) else core.take)(group.index)
                if slot is None:
                    self._shrink_to(self.length, up_to=group.index)
                    return False
                self.blocks[group.index][block] = slot
        return True

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
        return snapshot_plan(self, asked=False) if self.compute(grade) else None

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
        node = child_or_new(self, self.tokens[start:end])
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
        core.rules.passed(node)
        core.release_node(self.node)
        self.node = node
        self.committed += 1

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
        if not self.broken:
            self.republish()
        self.manager.core.worth.end(self.node)
        self.let_go()
        self.manager.core.touch(self.node)
        self.manager.core.rules.ended(self.node, self.priority)
        self.manager.core.release_node(self.node)
        self.manager.running.remove(self)
        self.manager.reap()

    # ---------------------------------------------------------------- parts

    def republish(self) -> None:
        """Give the index blocks of our own where equal ones, which others had published, were evicted."""
        for node in reversed(self.node.path[1:]):
            for (g, place), there in list(node.columns.items()):
                group = self.manager.core.groups[g]
                if group.snapshot or there != SLOT_EVICTED:
                    continue
                own = self.blocks[g].get(node.start // group.tokens + place)
                if own is not None and own.owner is None and own.state is ObjectState.READY:
                    self.manager.core.adopt(node, (g, place), own)

    @property
    def parts_here(self) -> bool:
        """Whether the prompt parts here from what was known when it was opened."""
        return self.parts > 0 and self.length == self.parts * self.manager.spec.segment_tokens

    def usable(self) -> RefManager:
        """SequenceError unless the sequence may go on."""
        if self.closed or self.broken or self.restore in self.manager.tickets:
            raise SequenceError("unusable")
        return self.manager

    def published(self, g: int, block: int) -> bool:
        """Whether a block belongs to the index, and is kept by where the sequence stands."""
        group = self.manager.core.groups[g]
        return group.kind in PREFIX_KINDS and block * group.tokens < self.committed * self.manager.spec.segment_tokens

    def let_go(self) -> None:
        """Release every block that the sequence holds itself."""
        for g, held in enumerate(self.blocks):
            for block in sorted(held, reverse=True):
                slot = held.pop(block)
                if not self.published(g, block):
                    self.manager.arena.release(slot)
