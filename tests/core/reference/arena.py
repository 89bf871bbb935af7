"""Slots and pages: who holds what, where the next slot comes from, what may be evicted and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.plan import ArenaGeometry
from kvloom.types import Grade, ObjectState

if TYPE_CHECKING:
    from tests.core.reference.index import Node

ALLOCS, EVICTIONS, HITS, MISSES, COMMITS, UNKEPT = range(6)


@dataclass(eq=False)
class Slot:
    """One slot.  ``released`` orders evictions: the clock of the last release, then the order of releases."""

    group: int
    index: int
    page: int
    state: ObjectState = ObjectState.FREE
    grade: Grade = Grade.CANONICAL
    generation: int = 0
    holders: int = 0
    owner: Node | None = None
    column: tuple[int, int] = (-1, -1)
    released: tuple[int, int] = (0, 0)

    @property
    def evictable(self) -> bool:
        """Cached, and nobody is using it."""
        return self.state is ObjectState.COMMITTED and self.holders == 0


class Arena:
    """Slots of all groups.  A page belongs to one group while any slot of it is in use."""

    def __init__(self, geometry: ArenaGeometry) -> None:
        self.static = geometry.static_split
        self.clock = 0
        self._releases = 0
        self.slots: list[list[Slot]] = []
        for g, (count, per_page) in enumerate(zip(geometry.num_slots, geometry.slots_per_page, strict=True)):
            self.slots.append([Slot(g, i, g if self.static else i // int(per_page)) for i in range(int(count))])
        groups = len(self.slots)
        pages = groups if self.static else int(geometry.num_slots[0] // geometry.slots_per_page[0])
        self.page_group: list[int | None] = [None] * pages
        self.page_free: list[list[Slot]] = [[] for _ in range(pages)]
        self.open_pages: list[list[int]] = [[] for _ in range(groups)]
        self.free_pages = list(reversed(range(pages)))
        self.counters = [[0] * 6 for _ in range(groups)]
        self.frugal = False
        if self.static:
            self.free_pages = []
            for g in range(groups):
                self.page_group[g] = g
                if self.slots[g]:
                    self._give_page_to(g, g)

    def on_page(self, group: int, page: int) -> list[Slot]:
        """The slots of ``group`` that lie on ``page``."""
        return [slot for slot in self.slots[group] if slot.page == page]

    def _give_page_to(self, group: int, page: int) -> None:
        self.page_group[page] = group
        self.page_free[page] = self.on_page(group, page)[::-1]
        self.open_pages[group].insert(0, page)

    def take(self, group: int) -> Slot | None:
        """A free slot of the page opened last, else of a free page; None when there is neither."""
        if not self.open_pages[group]:
            if not self.free_pages:
                return None
            self._give_page_to(group, self.free_pages.pop())
        page = self.open_pages[group][0]
        slot = self.page_free[page].pop()
        if not self.page_free[page]:
            self.open_pages[group].remove(page)
        slot.state = ObjectState.ALLOCATED
        slot.generation += 1
        slot.holders = 1
        slot.grade = Grade.CANONICAL
        self.counters[group][ALLOCS] += 1
        return slot

    def give(self, slot: Slot) -> None:
        """Back to its page, and the page back to everybody when it is empty."""
        slot.state = ObjectState.FREE
        slot.generation += 1
        slot.owner = None
        page = slot.page
        if not self.page_free[page]:
            self.open_pages[slot.group].insert(0, page)
        self.page_free[page].append(slot)
        if not self.static and all(s.state is ObjectState.FREE for s in self.on_page(slot.group, page)):
            self.open_pages[slot.group].remove(page)
            self.page_group[page] = None
            self.page_free[page] = []
            self.free_pages.append(page)

    def hold(self, slot: Slot) -> None:
        """One more holder."""
        slot.holders += 1

    def release(self, slot: Slot) -> None:
        """One holder less; the last one frees a private slot and makes a cached one evictable."""
        slot.holders -= 1
        if slot.holders == 0:
            if slot.owner is None:
                self.give(slot)
            else:
                self._releases += 1
                slot.released = (self.clock, self._releases)

    def evictable(self, group: int) -> list[Slot]:
        """What may go, least recently released first."""
        return sorted((s for s in self.slots[group] if s.evictable), key=lambda s: s.released)

    def group_with_oldest(self, groups: list[int]) -> int | None:
        """The group whose first evictable slot was released longest ago; the first of them in a tie."""
        heads = [(self.evictable(g)[0].released[0], g) for g in groups if self.evictable(g)]
        return min(heads)[1] if heads else None

    def page_to_empty(self, group: int) -> list[Slot] | None:
        """The used slots of the page that can be emptied whose youngest object is oldest."""
        candidates = []
        for page, owner in enumerate(self.page_group):
            used = [s for s in self.on_page(group, page) if s.state is not ObjectState.FREE] if owner == group else []
            if used and all(s.evictable for s in used):
                candidates.append((max(s.released[0] for s in used), page, used))
        return min(candidates)[2] if candidates else None

    def lacks_room(self, need: dict[int, int]) -> int | None:
        """The first group that cannot get the slots it needs, even if everything went that nobody holds.

        Notes whether pages are scarce: fewer to spare than slots wanted, and two for each group.
        """
        busy = {slot.page for slot in self.held()}  # they serve only their own group
        spare = len(self.page_group) - len(busy)
        self.frugal = not self.static and spare < sum(need.values()) + 2 * len(self.slots)
        for group in range(len(self.slots)):
            on_busy_pages = [
                s for s in self.slots[group] if self.static or (s.page in busy and self.page_group[s.page] == group)
            ]
            lacking = need.get(group, 0) - sum(s.holders == 0 for s in on_busy_pages)
            if lacking > 0 and self.static:
                return group
            if lacking > 0:
                spare -= -(-lacking // len(self.on_page(group, 0)))
                if spare < 0:
                    return group
        return None

    def busy_page_with_room(self, group: int) -> int | None:
        """The first page of ``group`` with something in use on it and something that is not."""
        for page, owner in enumerate(self.page_group):
            slots = self.on_page(group, page) if owner == group else []
            if 0 < sum(s.holders > 0 for s in slots) < len(slots):
                return page
        return None

    def held(self) -> list[Slot]:
        """Every slot that somebody holds."""
        return [s for slots in self.slots for s in slots if s.holders > 0]
