"""Which windows and snapshots the policy ``cost`` keeps: those of ends, of forks and of rests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.core.reference.arena import KEPT, REST, SURPLUS, Slot
from tests.core.reference.index import Node, Place
from tests.core.reference.policies import Cost
from tests.core.reference.rules import Group

from kvloom.core.allocation import rest_interval
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import Kind

if TYPE_CHECKING:
    from tests.core.reference.core import Core

PREFIX_KINDS = (Kind.COMPRESSED, Kind.INDEXER)


class Worth:
    """Says of every auxiliary object which list it is in."""

    def __init__(self, core: Core, spec: ModelSpec) -> None:
        self.core = core
        self.on = isinstance(core.rules, Cost)
        self.every = rest_interval(spec) if self.on else 0
        self.segment = spec.segment_tokens
        self._own = [g for g in core.groups if g.kind not in PREFIX_KINDS]
        self.reach = max([0, *(-(-(g.window - 1) // self.segment) - 1 for g in spec.groups)])

    # ---------------------------------------------------------------- rests

    def rest_at(self, position: int) -> int:
        """The first rest at or after a position, 0 when there are none."""
        if not self.every:
            return 0
        times = sorted({2**i for i in range(40)} | {3 * 2**i for i in range(40)})
        return next(t * self.every for t in times if t * self.every >= position)

    def is_rest(self, position: int) -> bool:
        """Whether a position is a rest."""
        return self.every > 0 and self.rest_at(position) == position

    def for_rest(self, group: Group, block: int) -> bool:
        """Whether a rest needs this block of a window."""
        return (
            self.every > 0
            and group.kind is Kind.WINDOW
            and block in group.needed(self.rest_at(block * group.tokens + 1))
        )

    def base(self, place: Place, node: Node) -> int:
        """What an object is worth that no end and no fork needs."""
        rest = self.rest_at(node.end) if node.is_segment else 0
        group = self.core.groups[place[0]]
        if not rest or (group.snapshot and rest != node.end):
            return SURPLUS
        if not group.snapshot and node.start // group.tokens + place[1] not in group.needed(rest):
            return SURPLUS
        snapshots = any(g.snapshot for g in self._own)
        return REST if not snapshots or self._rest_below(node, rest) else SURPLUS

    def _rest_below(self, node: Node, rest: int) -> bool:
        """Whether something can resume at the rest that the path goes on to; yes if that is a long story."""
        depth = (rest - node.end) // self.segment
        below = self._segments_below(node, depth)
        at = next((i for i, n in enumerate(below) if n.end == rest and self.resumable(n)), len(below))
        return at < len(below) or at > 256

    def snapshot(self, node: Node) -> None:
        """The segment got a snapshot: a rest that is whole stays."""
        if self.on and node.is_segment and self.is_rest(node.end) and self.resumable(node):
            for _, _, slot in self.objects(node):
                if slot.worth == SURPLUS:
                    self.core.arena.revalue(slot, REST)

    # ---------------------------------------------------------------- boundaries

    def objects(self, node: Node) -> list[tuple[Node, Place, Slot]]:
        """The windows and snapshots of segments that resuming there needs, as far as they are there."""
        found = []
        for group in self._own:
            owners = [(node, 0)]
            if not group.snapshot:
                blocks = sorted(group.needed(node.end), reverse=True)
                at = [next(n for n in node.path if n.parent and n.start <= b * group.tokens < n.end) for b in blocks]
                owners = [(n, b - n.start // group.tokens) for n, b in zip(at, blocks, strict=True)]
            for owner, index in owners:
                slot = owner.columns[group.index, index]
                if isinstance(slot, Slot) and owner.is_segment:
                    found.append((owner, (group.index, index), slot))
        return found

    def end(self, node: Node) -> None:
        """A request ends there or at a checkpoint below: what that needs is KEPT and as new, except what rests have."""
        if not self.on:
            return
        if node.parent is not None and self.resumable(node):
            self._keep(node)
        for checkpoint in node.checkpoints[:8]:
            if checkpoint.anchors or self.resumable(checkpoint):
                self._keep(checkpoint)

    def _keep(self, node: Node) -> None:
        for _, _, slot in self.objects(node):
            if slot.worth != REST:
                self.core.arena.revalue(slot, KEPT)

    def resumed(self, node: Node) -> None:
        """A request resumes below this segment or root: a fork, or an end that is left behind.

        What is left behind is what no end or fork further up needs that stays whole.
        """
        if not self.on or node.parent is None:
            return
        if node.children:
            self.end(node)
            return
        above = [n for n in node.path[-2:0:-1][: self.reach] if self._stays(n)]
        floor = above[0].end if above else 0
        for owner, place, slot in self.objects(node):
            if owner.end > floor and slot.worth == KEPT:
                self.core.arena.revalue(slot, self.base(place, owner))

    def _stays(self, node: Node) -> bool:
        worths = [slot.worth for _, _, slot in self.objects(node)]
        whole = len(worths) >= sum(
            g.snapshot_needed(node.end) if g.snapshot else len(g.needed(node.end)) for g in self._own
        )
        return whole and all(w != SURPLUS for w in worths)

    def branched(self, node: Node) -> None:
        """A new segment was put below its parent."""
        parent = node.parent
        assert parent is not None
        if self.on and node.is_segment and len(parent.children) > 1 and parent.parent and self.resumable(parent):
            self._keep(parent)

    # ---------------------------------------------------------------- what was lost

    def lost(self, node: Node, worth: int) -> None:
        """An object of the node, which was worth so much, was evicted by itself."""
        if not self.on:
            return
        if worth == SURPLUS:
            for below in self._segments_below(node, self.reach):
                for checkpoint in below.checkpoints:
                    self._strand(checkpoint)
        else:
            for below in self._segments_below(node, self.reach):
                self._give_up_at(below)

    def gone(self, leaf: Node) -> None:
        """A leaf was evicted."""
        assert leaf.parent is not None
        if self.on and leaf.parent.anchors:
            self._give_up(leaf)

    def reconsider_all(self) -> None:
        """Any object may have been forgotten."""
        for node in sorted(self.core.index.all_nodes(), key=lambda n: n.number) if self.on else []:
            self._give_up_at(node)

    def _segments_below(self, node: Node, depth: int) -> list[Node]:
        found = [node]
        for child in node.children if depth else []:
            found += self._segments_below(child, depth - 1)
        return found

    def _strand(self, node: Node) -> None:
        if node.evictable and not self.resumable(node):
            node.stranded = True

    def _give_up_at(self, node: Node) -> None:
        """The segment, unless it is a root, and its checkpoints."""
        for boundary in [node] * node.is_segment + node.checkpoints:
            if not self.resumable(boundary):
                self._strand(boundary)
                self._give_up(boundary)

    def _give_up(self, boundary: Node) -> None:
        """What serves nothing else is surplus, unless it waits for a rest further down."""
        for owner, place, slot in self.objects(boundary):
            group = self.core.groups[place[0]]
            served = self.resumable(owner) if group.snapshot else self._serves(group, owner, place[1])
            if slot.worth == SURPLUS or served:
                continue
            if self.rest_at(owner.end) == boundary.end:
                self.core.arena.revalue(slot, SURPLUS)
            elif slot.worth == KEPT:
                self.core.arena.revalue(slot, self.base(place, owner))

    def _serves(self, group: Group, owner: Node, index: int) -> bool:
        """Whether anything can resume below that needs this block; yes if that is a long story."""
        block, looked = owner.start // group.tokens + index, 0
        todo = [owner]
        while todo:
            node = todo.pop()
            near = block in group.needed(node.end)
            if near and self.resumable(node):
                return True
            for checkpoint in node.checkpoints:
                if block in group.needed(checkpoint.end) and self.resumable(checkpoint):
                    return True
            looked += 1 + len(node.checkpoints)
            if looked > 256:
                return True
            todo += node.children[::-1] if near else []
        return False

    # ---------------------------------------------------------------- leaves

    def joined(self, node: Node) -> None:
        """The node became a leaf that may be evicted."""
        node.stranded = not self.resumable(node)
        if not node.stranded and self.on and node.is_segment:
            for _, _, slot in self.objects(node):
                self.core.arena.revalue(slot, KEPT)

    def first_stranded(self, leaves: Sequence[Node]) -> Node | None:
        """The oldest stranded leaf at which nothing can resume indeed."""
        for leaf in leaves:
            if leaf.stranded:
                self.joined(leaf)
                if leaf.stranded:
                    return leaf
        return None

    def resumable(self, node: Node) -> bool:
        """Whether everything is there that resuming at the end of the node needs."""
        for group in self.core.groups:
            if group.snapshot:
                if group.snapshot_needed(node.end) and not isinstance(node.columns[group.index, 0], Slot):
                    return False
                continue
            for block in group.needed(node.end):
                owner = next(n for n in node.path if n.parent and n.start <= block * group.tokens < n.end)
                if not isinstance(owner.columns[group.index, block - owner.start // group.tokens], Slot):
                    return False
        return True
