"""Arena and index together: publishing objects, dropping them, making room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from tests.core.reference.arena import COMMITS, EVICTIONS, KEPT, REST, SURPLUS, Arena, Slot
from tests.core.reference.index import Index, Node, Place
from tests.core.reference.policies import Cost, make_rules
from tests.core.reference.rules import Group
from tests.core.reference.worth import Worth

from kvloom.eviction import EvictionPolicy
from kvloom.plan import ArenaGeometry
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import SLOT_EVICTED, SLOT_QUARANTINED, Kind, ObjectState

PREFIX_KINDS = (Kind.COMPRESSED, Kind.INDEXER)


class Core:
    """What the manager decides with.  No object is ever dropped while somebody holds it."""

    def __init__(self, spec: ModelSpec, geometry: ArenaGeometry, places: int, policy: EvictionPolicy) -> None:
        self.groups = [Group(spec, g) for g in range(len(spec.groups))]
        self.arena = Arena(geometry)
        columns = [(g.index, i) for g in self.groups for i in range(g.columns)]
        self.index = Index(places, spec.segment_tokens, columns)
        self.rules = make_rules(policy, lambda: self.arena.clock)
        self.index.rules = self.rules
        self.worth = Worth(self, spec)
        if isinstance(self.rules, Cost):
            self.rules.leaf = self.worth.joined
            self.rules.first_stranded = self.worth.first_stranded
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
        worth = self.worth.base(place, node)
        if isinstance(present, Slot):
            if present is slot or present.grade >= slot.grade:
                return
            worth = max(worth, present.worth)
            self.forget(present, -1)
        slot.worth = worth
        slot.state = ObjectState.COMMITTED
        slot.owner, slot.column = node, place
        slot.auxiliary = node.is_segment and self.groups[slot.group].kind not in PREFIX_KINDS
        node.columns[place] = slot
        self.arena.counters[slot.group][COMMITS] += 1
        self.settle()
        if self.groups[slot.group].snapshot:
            self.worth.snapshot(node)

    # ---------------------------------------------------------------- eviction

    def evict_leaf(self, leaf: Node) -> None:
        """Evict everything that a leaf names."""
        assert leaf.evictable
        for place in sorted(leaf.columns):
            slot = leaf.columns[place]
            if isinstance(slot, Slot):
                self.forget(slot, SLOT_EVICTED)
        self.worth.gone(leaf)

    def _evict_auxiliary(self, slot: Slot) -> None:
        node, worth = slot.owner, slot.worth
        assert node is not None
        self.forget(slot, SLOT_EVICTED)
        self.worth.lost(node, worth)

    def _evict_useless(self, group: int | None) -> bool:
        """What ``cost`` gives first: stranded leaves, surplus, badly used pages; of one group where it has some.

        In a static split a group gives its own rests before leaves, which have room of other groups too.
        """
        if not self.worth.on:
            return False
        stranded = self.worth.first_stranded(self.index.leaves())
        if stranded is not None:
            self.evict_leaf(stranded)
            return True
        if self._evict_listed(group, SURPLUS):
            return True
        if self.arena.static:
            return group is not None and self._evict_listed(group, REST)
        return self._evacuate(group)

    def _evict_listed(self, group: int | None, worth: int) -> bool:
        own = [] if group is None else self.arena.auxiliary(group, worth)
        slot = own[0] if own else None
        if slot is None and (group is None or not self.arena.static):
            slot = self._oldest_head(worth)
        if slot is not None:
            self._evict_auxiliary(slot)
        return slot is not None

    def _evacuate(self, group: int | None) -> bool:
        """Empty the emptiest page, half used or less and by rests only, of a group that uses half of its pages."""
        arena = self.arena
        for g in self.groups:
            per_page = len(arena.on_page(g.index, 0))
            own = [p for p in arena.pages if p.group == g.index]
            spare = sum(len(p.free) for p in own)
            least = max(2 * per_page, len(own) * per_page - spare)
            if g.index == group or not arena.auxiliary(g.index, REST) or spare < least:
                continue
            pages = [
                page
                for page in arena.emptiable[g.index][:64]
                if 2 * len(arena.used_on(g.index, page)) <= per_page
                and all(s.auxiliary and s.worth != KEPT for s in arena.used_on(g.index, page))
            ]
            if pages:
                self._empty_page(g.index, min(pages, key=lambda page: len(arena.used_on(g.index, page))))
                return True
        return False

    def evict_oldest(self) -> bool:
        """Evict what is useless, else the window or snapshot used longest ago or the leaf that the policy picks."""
        if self._evict_useless(None):
            return True
        leaves = self.index.leaves()
        leaf, when = self.rules.pick(leaves) if leaves else (None, 0)
        head = self._oldest_head(KEPT if self.worth.on else SURPLUS)
        if head is not None and (leaf is None or head.released[0] <= when):
            self._evict_auxiliary(head)
        elif leaf is not None:
            self.evict_leaf(leaf)
        return head is not None or leaf is not None or (self.worth.on and self._evict_listed(None, REST))

    def _oldest_head(self, worth: int) -> Slot | None:
        lists = [self.arena.auxiliary(g.index, worth) for g in self.groups]
        return min((listed[0] for listed in lists if listed), key=lambda s: (s.released[0], s.group), default=None)

    def _empty_page(self, group: int, page: int) -> None:
        for slot in self.arena.used_on(group, page):
            if slot.owner is not None and slot.auxiliary:
                self._evict_auxiliary(slot)
            elif slot.owner is not None:
                self.evict_leaf(slot.owner)

    def _make_room(self, group: int) -> bool:
        """Evict the oldest of: the leaf that the policy picks, an object of this group, a page of another group.

        In a tie the object goes first, then the leaf, then pages in the order of groups.  Under ``cost`` what is
        useless goes before all of these, and pages only when there is nothing else.
        """
        arena = self.arena
        if self._evict_useless(group):
            return True
        leaves = self.index.leaves()
        candidates: list[tuple[int, int, Callable[[], None]]] = []
        if leaves:
            leaf, when = self.rules.pick(leaves)
            candidates.append((when, -1, partial(self.evict_leaf, leaf)))
        own = arena.auxiliary(group, KEPT if self.worth.on else SURPLUS)[:1]
        candidates += [(slot.released[0], -2, partial(self._evict_auxiliary, slot)) for slot in own]
        if not arena.static and not (self.worth.on and candidates):
            candidates += [
                (arena.pages[page].since, g.index, partial(self._empty_page, g.index, page))
                for g in self.groups
                if g.index != group
                for page in arena.emptiable[g.index][:1]
            ]
        if not candidates:
            return self.worth.on and self._evict_listed(group, REST)
        min(candidates, key=lambda c: c[:2])[2]()
        return True

    def make_room_for(self, group: int, count: int) -> None:
        """Evict until the group has room for so many slots."""
        while self.arena.room(group) < count and self._make_room(group):
            pass

    def take(self, group: int) -> Slot | None:
        """A slot with one holder, evicting as needed; None when everything is in use.

        When pages are scarce it comes from a page that the group keeps anyway, if one has room.
        """
        arena = self.arena
        page = self._busy_page_with_room(group)
        if page is not None:
            while not arena.pages[page].free and self._make_room(group):
                pass
            if arena.pages[page].free:
                arena.open_pages[group].remove(page)
                arena.open_pages[group].insert(0, page)
        slot = arena.take(group)
        while slot is None and self._make_room(group):
            slot = arena.take(group)
        if slot is not None and arena.held_on is not None:
            arena.held_on[slot.page] = arena.held_on.get(slot.page, 0) + 1
        return slot

    def take_lasting(self, group: int) -> Slot | None:
        """A slot for what will stay for long: under ``cost`` on the open page with most of what does."""
        arena = self.arena
        if self.worth.on and not arena.static and arena.held_on is None:
            opened = arena.open_pages[group]
            pages = [(-self._lasting(group, page), i) for i, page in enumerate(opened[:64])]
            most, at = min(pages, default=(0, 0))
            if most < 0:
                opened.insert(0, opened.pop(at))
        return self.take(group)

    def _lasting(self, group: int, page: int) -> int:
        cached = [s for s in self.arena.used_on(group, page) if s.state is ObjectState.COMMITTED]
        return sum(not s.auxiliary or s.worth != SURPLUS for s in cached)

    def _busy_page_with_room(self, group: int) -> int | None:
        for page, held in sorted((self.arena.held_on or {}).items()):
            if self.arena.pages[page].group == group and held < len(self.arena.on_page(group, page)):
                return page
        return None

    # ---------------------------------------------------------------- room

    def held(self) -> list[Slot]:
        """What cannot be evicted, now or after others: held, or part of a path that somebody stands on."""
        stood_on = {above for node in self.index.all_nodes() if node.holders for above in node.path}
        used = [s for slots in self.arena.slots for s in slots if s.state is not ObjectState.FREE]
        return [s for s in used if s.holders or (s.owner in stood_on and not s.auxiliary)]

    def lacks_room(self, need: dict[int, int]) -> int | None:
        """The first group that cannot get the slots it needs, even if everything went that nobody holds.

        Pages are scarce when fewer are to spare than slots wanted, and two for each group, unless enough are free.
        """
        arena = self.arena
        arena.held_on = None
        free: Counter[int] = Counter()
        for page in arena.pages:
            if page.group is not None:
                free[page.group] += len(page.free)
        if self._short_group(need, free, 0 if arena.static else len(arena.free_pages)) is None:
            return None
        held = self.held()
        held_on = Counter(s.page for s in held)
        room: Counter[int] = Counter()
        for g, slots in enumerate(arena.slots):
            mine = [s for s in slots if arena.static or (s.page in held_on and arena.pages[s.page].group == g)]
            room[g] = len(mine) - sum(s.group == g for s in held)
        spare = 0 if arena.static else len(arena.pages) - len(held_on)
        full = self._short_group(need, room, spare)
        if full is None and not arena.static and spare < sum(need.values()) + 2 * len(arena.slots):
            arena.held_on = dict(held_on)
        return full

    def _short_group(self, need: dict[int, int], room: Counter[int], spare: int) -> int | None:
        """The first group for which there is neither room of its own nor a page; None when all have enough."""
        for g in range(len(self.groups)):
            lacking = need.get(g, 0) - room[g]
            if lacking > 0:
                spare -= 1 if self.arena.static else -(-lacking // len(self.arena.on_page(g, 0)))
                if spare < 0:
                    return g
        return None

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
            self.evict_leaf(self.rules.pick(leaves)[0])
        return True

    def new_node(self, parent: Node, tokens: Sequence[int]) -> Node | None:
        """A child of ``parent``, held by the caller; ``parent`` is held too."""
        node = self.index.new_node(parent, tokens)
        if node is not None:
            self.touch(node)
        self.settle()
        return node
