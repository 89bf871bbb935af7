"""Which windows and snapshots the policy ``cost`` keeps: those of ends, of forks and of rests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.core.reference.arena import KEPT, OF_LEAF, REST, SURPLUS, Slot
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
        if group.snapshot:
            return REST
        return REST if node.start // group.tokens + place[1] in group.needed(rest) else SURPLUS

    # ---------------------------------------------------------------- boundaries

    def objects(self, node: Node) -> list[tuple[Node, Place, Slot]]:
        """The windows and snapshots that resuming at the end of a segment needs, as far as they are there."""
        found = []
        for group in self.core.groups:
            if group.kind in PREFIX_KINDS:
                continue
            owners = [(node, 0)]
            if not group.snapshot:
                blocks = sorted(group.needed(node.end), reverse=True)
                at = [next(n for n in node.path if n.parent and n.start <= b * group.tokens < n.end) for b in blocks]
                owners = [(n, b - n.start // group.tokens) for n, b in zip(at, blocks, strict=True)]
            for owner, index in owners:
                slot = owner.columns[group.index, index]
                if isinstance(slot, Slot):
                    found.append((owner, (group.index, index), slot))
        return found

    def boundary(self, node: Node, worth: int) -> None:
        """What the end of a segment needs is KEPT and as new, but for what rests have; OF_LEAF makes all KEPT."""
        if not self.on or not node.is_segment:
            return
        for _, _, slot in self.objects(node):
            if worth == OF_LEAF or slot.worth != REST:
                self.core.arena.revalue(slot, KEPT)

    def resumed(self, node: Node) -> None:
        """A request resumes below this segment or root: a fork, or an end that is left behind.

        What is left behind is what no end or fork further up needs that stays whole.
        """
        if node.children:
            self.boundary(node, KEPT)
        elif self.on and node.parent is not None:
            above = [n for n in node.path[-2:0:-1][: self.reach] if self._stays(n)]
            floor = above[0].end if above else 0
            self._lower([found for found in self.objects(node) if found[0].end > floor])

    def _stays(self, node: Node) -> bool:
        worths = [slot.worth for _, _, slot in self.objects(node)]
        whole = len(worths) >= sum(
            g.snapshot_needed(node.end) if g.snapshot else len(g.needed(node.end)) for g in self._own
        )
        return whole and all(w != SURPLUS for w in worths)

    def _lower(self, found: list[tuple[Node, Place, Slot]]) -> None:
        for owner, place, slot in found:
            if slot.worth == KEPT:
                self.core.arena.revalue(slot, self.base(place, owner))

    def branched(self, node: Node) -> None:
        """A new segment was put below its parent."""
        assert node.parent is not None
        if node.is_segment and len(node.parent.children) > 1:
            self.boundary(node.parent, KEPT)

    # ---------------------------------------------------------------- what was lost

    def lost(self, node: Node, worth: int, when: int) -> None:
        """An object of the node was evicted by itself: it was worth so much and had been released then."""
        if not self.on:
            return
        if worth == SURPLUS:
            self._strand_checkpoints(node)
        else:
            for below in self._segments_below(node, self.reach):
                self._give_up(below, when)

    def reconsider_all(self) -> None:
        """Any object may have been forgotten."""
        if not self.on:
            return
        nodes = sorted(self.core.index.all_nodes(), key=lambda n: n.number)
        for node in nodes:
            self._give_up(node, self.core.arena.clock)
        for node in nodes:
            if node.evictable and not node.stranded:
                assert node.parent is not None
                self.boundary(node if node.is_segment else node.parent, OF_LEAF if node.is_segment else KEPT)

    def _segments_below(self, node: Node, depth: int) -> list[Node]:
        found = [node]
        for child in node.children if depth else []:
            found += self._segments_below(child, depth - 1)
        return found

    def _strand(self, node: Node) -> None:
        if node.evictable and not self.resumable(node):
            node.stranded = True

    def _strand_checkpoints(self, node: Node) -> None:
        for checkpoint in node.checkpoints:
            self._strand(checkpoint)

    def _give_up(self, node: Node, when: int) -> None:
        if node.is_segment and not self.resumable(node):
            self._strand(node)
            self._lower([f for f in self.objects(node) if not f[2].holders and f[2].released[0] <= when])
            if self.is_rest(node.end):
                self._give_up_rest(node)
        self._strand_checkpoints(node)

    def _give_up_rest(self, node: Node) -> None:
        after = self.rest_at(node.end + 1)
        for owner, (g, index), slot in self.objects(node):
            group = self.core.groups[g]
            if slot.worth != REST:
                continue
            if not group.snapshot:
                block = owner.start // group.tokens + index
                if self.rest_at(owner.end) != node.end or block in group.needed(after):
                    continue
            self.core.arena.revalue(slot, SURPLUS)

    # ---------------------------------------------------------------- leaves

    def joined(self, node: Node) -> None:
        """The node became a leaf that may be evicted."""
        node.stranded = not self.resumable(node)
        if not node.stranded:
            self.boundary(node, OF_LEAF)

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
