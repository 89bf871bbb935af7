"""Arena and index together: publishing objects, dropping them, making room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tests.core.reference.arena import COMMITS, EVICTIONS, Arena, Slot
from tests.core.reference.index import Index, Node, Place
from tests.core.reference.rules import Group

from kvloom.plan import ArenaGeometry
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import SLOT_EVICTED, SLOT_QUARANTINED, Kind, ObjectState

PREFIX_KINDS = (Kind.COMPRESSED, Kind.INDEXER)


class Core:
    """What the manager decides with.  No object is ever dropped while somebody holds it."""

    def __init__(self, spec: ModelSpec, geometry: ArenaGeometry, places: int) -> None:
        self.groups = [Group(spec, g) for g in range(len(spec.groups))]
        self.arena = Arena(geometry)
        columns = [(g.index, i) for g in self.groups for i in range(g.columns)]
        self.index = Index(places, spec.segment_tokens, columns)
        self.graveyard: list[tuple[Slot, int]] = []

    def settle(self) -> None:
        """Look again at what the last act changed."""
        self.index.settle()
        self.arena.settle()

    # ---------------------------------------------------------------- objects in the index

    def forget(self, slot: Slot, code: int) -> None:
        """Take an object out of the index.

        Holders keep the slot as a private one.  A prefix block of a segment may be read by whoever runs below, so
        that it waits until all that run now have ended.
        """
        node = slot.owner
        assert node is not None
        read_below = node.is_segment and not slot.auxiliary and node.anchors > 0
        node.columns[slot.column] = code
        slot.owner = None
        if code == SLOT_EVICTED:
            self.arena.counters[slot.group][EVICTIONS] += 1
        if slot.holders or read_below:
            slot.state = ObjectState.QUARANTINED if code == SLOT_QUARANTINED else ObjectState.READY
            if read_below:
                slot.holders += 1
                self.graveyard.append((slot, self.arena.clock))
        else:
            self.arena.give(slot)
        slot.auxiliary = False
        self.settle()

    def reap(self, oldest: int) -> None:
        """Free what was given up before the oldest running sequence began."""
        while self.graveyard and self.graveyard[0][1] < oldest:
            self.arena.release(self.graveyard.pop(0)[0])

    def collect(self, read: Sequence[Slot]) -> bool:
        """Free what was given up and is not among the slots that are read; whether anything went."""
        unread = [slot for slot, _ in self.graveyard if slot not in read]
        self.graveyard = [(slot, when) for slot, when in self.graveyard if slot in read]
        for slot in unread:
            self.arena.release(slot)
        return bool(unread)

    def adopt(self, node: Node, place: Place, slot: Slot) -> None:
        """Publish a READY slot, unless something of the same grade or a better one is there."""
        present = node.columns[place]
        if isinstance(present, Slot):
            if present is slot or present.grade >= slot.grade:
                return
            self.forget(present, -1)
        slot.state = ObjectState.COMMITTED
        slot.owner, slot.column = node, place
        slot.auxiliary = node.is_segment and self.groups[slot.group].kind not in PREFIX_KINDS
        node.columns[place] = slot
        self.arena.counters[slot.group][COMMITS] += 1
        self.settle()

    # ---------------------------------------------------------------- eviction

    def evict_leaf(self, leaf: Node) -> None:
        """Evict everything that a leaf names."""
        assert leaf.evictable
        for place in sorted(leaf.columns):
            slot = leaf.columns[place]
            if isinstance(slot, Slot):
                self.forget(slot, SLOT_EVICTED)

    def evict_oldest(self) -> bool:
        """Evict the window, snapshot or leaf that was used longest ago; single objects before leaves in a tie."""
        leaves = self.index.leaves()
        heads = [self.arena.auxiliary(g.index)[0] for g in self.groups if self.arena.auxiliary(g.index)]
        head = min(heads, key=lambda s: (s.released[0], s.group), default=None)
        if head is not None and (not leaves or head.released[0] <= leaves[0].stamp):
            self.forget(head, SLOT_EVICTED)
        elif leaves:
            self.evict_leaf(leaves[0])
        return head is not None or bool(leaves)

    def _empty_page(self, group: int, page: int) -> None:
        for slot in self.arena.used_on(group, page):
            if slot.owner is not None and slot.auxiliary:
                self.forget(slot, SLOT_EVICTED)
            elif slot.owner is not None:
                self.evict_leaf(slot.owner)

    def _make_room(self, group: int) -> bool:
        """Evict the oldest of: a leaf, an object of this group, a page of another group.

        In a tie the object goes first, then the leaf, then pages in the order of groups.
        """
        others = [] if self.arena.static else [g.index for g in self.groups if g.index != group]
        candidates: list[tuple[int, int, Callable[[], None]]] = [
            *((s.released[0], -2, partial(self.forget, s, SLOT_EVICTED)) for s in self.arena.auxiliary(group)[:1]),
            *((leaf.stamp, -1, partial(self.evict_leaf, leaf)) for leaf in self.index.leaves()[:1]),
            *(
                (self.arena.pages[page].since, g, partial(self._empty_page, g, page))
                for g in others
                for page in self.arena.emptiable[g][:1]
            ),
        ]
        if not candidates:
            return False
        min(candidates, key=lambda c: c[:2])[2]()
        return True

    def take(self, group: int) -> Slot | None:
        """A slot with one holder, evicting as needed; None when everything is in use."""
        while True:
            slot = self.arena.take(group)
            if slot is not None or not self._make_room(group):
                return slot

    # ---------------------------------------------------------------- nodes

    def hold_node(self, node: Node) -> None:
        """One more reason for a node to stay."""
        node.holders += 1
        self.settle()

    def release_node(self, node: Node) -> None:
        """One reason less."""
        node.holders -= 1
        self.settle()

    def touch(self, node: Node) -> None:
        """The node is used now."""
        node.stamp = self.arena.clock

    def make_place(self) -> bool:
        """Evict leaves until the index has a place to give."""
        while not self.index.free and not self.index.ghosts:
            leaves = self.index.leaves()
            if not leaves:
                return False
            self.evict_leaf(leaves[0])
        return True

    def new_node(self, parent: Node, tokens: Sequence[int]) -> Node | None:
        """A child of ``parent``, held by the caller; ``parent`` is held too."""
        node = self.index.new_node(parent, tokens)
        if node is not None:
            self.touch(node)
        self.settle()
        return node
