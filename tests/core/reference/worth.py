"""Which windows and snapshots the policy ``cost`` keeps: those of ends, of forks and of rests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.core.reference.arena import KEPT, OF_LEAF, REST, SURPLUS, Slot
from tests.core.reference.index import Node
from tests.core.reference.policies import Cost

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

    def first(self, group: int, node: Node) -> int:
        """Of a new object: only snapshots at rests stay."""
        at_rest = self.every > 0 and node.is_segment and node.end % self.every == 0
        return REST if at_rest and self.core.groups[group].snapshot else SURPLUS

    def boundary(self, node: Node, worth: int) -> None:
        """The objects of the end of a segment are worth this much or more.

        SURPLUS takes back KEPT; OF_LEAF makes all KEPT; that and KEPT make them as new.
        """
        if not self.on or not node.is_segment:
            return
        for group in self.core.groups:
            if group.kind in PREFIX_KINDS:
                continue
            places = [(node, 0)]
            if not group.snapshot:
                blocks = [(b, b * group.tokens) for b in sorted(group.needed(node.end), reverse=True)]
                owners = [(b, next(n for n in node.path if n.parent and n.start <= t < n.end)) for b, t in blocks]
                places = [(n, b - n.start // group.tokens) for b, n in owners]
            for owner, place in places:
                slot = owner.columns[group.index, place]
                if not isinstance(slot, Slot):
                    continue
                if worth == OF_LEAF:
                    self.core.arena.revalue(slot, KEPT)
                elif worth == SURPLUS:
                    if slot.worth == KEPT:
                        self.core.arena.revalue(slot, SURPLUS)
                elif slot.worth < worth or slot.worth == worth == KEPT:
                    self.core.arena.revalue(slot, worth)

    def resumed(self, node: Node) -> None:
        """A request resumes below this segment or root: a fork, or an end that is left behind."""
        self.boundary(node, KEPT if node.children else SURPLUS)

    def published(self, node: Node) -> None:
        """A segment was published."""
        if self.every > 0 and node.end % self.every == 0:
            self.boundary(node, REST)

    def lost(self, node: Node) -> None:
        """An object of the node was evicted by itself: nothing can resume there, nor perhaps at its checkpoints."""
        if self.on:
            self.boundary(node, SURPLUS)
            for checkpoint in node.checkpoints:
                if checkpoint.evictable and not self.resumable(checkpoint):
                    checkpoint.stranded = True

    def joined(self, node: Node) -> None:
        """The node became a leaf that may be evicted."""
        node.stranded = not self.resumable(node)
        if not node.stranded:
            self.boundary(node, OF_LEAF)

    def resumable(self, node: Node) -> bool:
        """Whether every window and snapshot is there that resuming at the end of the node needs."""
        for group in self.core.groups:
            if group.snapshot:
                if group.snapshot_needed(node.end) and not isinstance(node.columns[group.index, 0], Slot):
                    return False
            elif group.kind not in PREFIX_KINDS:
                for block in group.needed(node.end):
                    owner = next(n for n in node.path if n.parent and n.start <= block * group.tokens < n.end)
                    if not isinstance(owner.columns[group.index, block - owner.start // group.tokens], Slot):
                        return False
        return True
