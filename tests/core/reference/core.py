"""Arena and index together: publishing objects, dropping them, making room."""

from __future__ import annotations

from collections.abc import Sequence

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

    # ---------------------------------------------------------------- objects in the index

    def forget(self, slot: Slot, code: int) -> None:
        """Take an object out of the index.  Holders keep the slot as a private one."""
        self._unname(slot, code)
        self.index.settle()

    def _unname(self, slot: Slot, code: int) -> None:
        assert slot.owner is not None
        slot.owner.columns[slot.column] = code
        slot.owner = None
        if code == SLOT_EVICTED:
            self.arena.counters[slot.group][EVICTIONS] += 1
        if slot.holders == 0:
            self.arena.give(slot)
        else:
            slot.state = ObjectState.QUARANTINED if code == SLOT_QUARANTINED else ObjectState.READY

    def adopt(self, node: Node, place: Place, slot: Slot) -> None:
        """Publish a READY slot, unless something of the same grade or a better one is there."""
        present = node.columns[place]
        if isinstance(present, Slot):
            if present is slot or present.grade >= slot.grade:
                return
            self._unname(present, -1)
        slot.state = ObjectState.COMMITTED
        slot.owner, slot.column = node, place
        node.columns[place] = slot
        self.arena.counters[slot.group][COMMITS] += 1
        self.index.settle()

    def _drop_unused(self, node: Node) -> None:
        for place in sorted(node.columns):
            slot = node.columns[place]
            if isinstance(slot, Slot) and slot.holders == 0:
                self._unname(slot, SLOT_EVICTED)

    # ---------------------------------------------------------------- eviction

    def evict(self, slot: Slot) -> None:
        """Evict one object and what is useless without it.

        A checkpoint goes as a whole; a block of a prefix group takes everything of its node and below with it;
        a window block or a snapshot goes alone.
        """
        node = slot.owner
        assert node is not None
        assert slot.evictable
        if not node.is_segment:
            self._drop_unused(node)
        elif self.groups[slot.group].kind in PREFIX_KINDS:
            for below in node.below():
                self._drop_unused(below)
        else:
            self._unname(slot, SLOT_EVICTED)
        self.index.settle()

    def evict_oldest(self) -> bool:
        """Evict the object that was released longest ago, of any group."""
        group = self.arena.group_with_oldest([g.index for g in self.groups])
        if group is None:
            return False
        self.evict(self.arena.evictable(group)[0])
        return True

    def _empty_a_page(self, group: int) -> bool:
        used = self.arena.page_to_empty(group)
        if used is None:
            return False
        for slot in used:
            if slot.owner is not None:
                self.evict(slot)
        return True

    def _make_room(self, group: int) -> bool:
        """Evict the oldest of the group's own objects, or a page of another group if that is older."""
        own = self.arena.evictable(group)
        others = [g.index for g in self.groups if g.index != group]
        other = None if self.arena.static else self.arena.group_with_oldest(others)
        prefer_other = other is not None and (
            not own or self.arena.evictable(other)[0].released[0] < own[0].released[0]
        )
        if prefer_other and other is not None and self._empty_a_page(other):
            return True
        if own:
            self.evict(own[0])
            return True
        if self.arena.static:
            return False
        return any(self._empty_a_page(g) for g in others if g != other)

    def take(self, group: int) -> Slot | None:
        """A slot with one holder, evicting as needed; None when everything is in use.

        When pages are scarce it comes from a page that the group keeps anyway, if one has room: there the oldest
        object goes, whatever is older elsewhere.
        """
        page = self.arena.busy_page_with_room(group) if self.arena.frugal else None
        if page is not None:
            if not self.arena.page_free[page]:
                idle = [s for s in self.arena.on_page(group, page) if s.evictable]
                self.evict(min(idle, key=lambda s: (s.released[0], s.index)))
            self.arena.open_pages[group].remove(page)
            self.arena.open_pages[group].insert(0, page)
        while True:
            slot = self.arena.take(group)
            if slot is not None or not self._make_room(group):
                return slot

    # ---------------------------------------------------------------- nodes

    def hold_node(self, node: Node) -> None:
        """One more reason for a node to stay."""
        node.holders += 1
        self.index.settle()

    def release_node(self, node: Node) -> None:
        """One reason less."""
        node.holders -= 1
        self.index.settle()

    def make_place(self) -> bool:
        """Evict until the index has a place to give: prefix objects first, since they take their node with them."""
        prefix = [g.index for g in self.groups if g.kind in PREFIX_KINDS]
        while not self.index.free and not self.index.ghosts:
            group = self.arena.group_with_oldest(prefix)
            if group is not None:
                self.evict(self.arena.evictable(group)[0])
            elif not self.evict_oldest():
                return False
        return True

    def new_node(self, parent: Node, tokens: Sequence[int]) -> Node | None:
        """A child of ``parent``, held by the caller; ``parent`` is held too."""
        node = self.index.new_node(parent, tokens)
        self.index.settle()
        return node
