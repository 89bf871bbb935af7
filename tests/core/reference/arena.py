"""Slots and pages: who holds what, where the next slot comes from, what may be evicted and in which order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvloom.plan import ArenaGeometry
from kvloom.types import Grade, ObjectState

if TYPE_CHECKING:
    from tests.core.reference.index import Node

SURPLUS, KEPT, REST, OF_LEAF = range(4)
ALLOCS, EVICTIONS, HITS, MISSES, COMMITS, UNKEPT = range(6)


@dataclass(eq=False)
class Slot:
    """One slot.  ``released``: the clock of the last release, then the order of releases."""

    group: int
    index: int
    page: int
    state: ObjectState = ObjectState.FREE
    grade: Grade = Grade.CANONICAL
    generation: int = 0
    holders: int = 0
    owner: Node | None = None
    column: tuple[int, int] = (-1, -1)
    auxiliary: bool = False
    released: tuple[int, int] = (0, 0)
    worth: int = SURPLUS

    @property
    def evictable(self) -> bool:
        """Cached, nobody is using it, and nothing needs it: by itself, or with the leaf that it belongs to."""
        if self.state is not ObjectState.COMMITTED or self.holders or self.owner is None:
            return False
        return self.auxiliary or self.owner.anchors == 0


@dataclass
class Page:
    """``since``: the clock at which everything on it became evictable, if it is so."""

    group: int | None = None
    free: list[Slot] = field(default_factory=list)
    since: int = 0


class Arena:
    """Slots of all groups.  A page belongs to one group while any slot of it is in use.

    ``emptiable[g]``: pages of group ``g`` whose used slots can all be evicted now, in the order in which they became
    so.
    ``held_on``: while pages are scarce, how many slots are held on each page that somebody holds a slot on.
    """

    def __init__(self, geometry: ArenaGeometry) -> None:
        self.static = geometry.static_split
        self.clock = 0
        self._releases = 0
        self.slots: list[list[Slot]] = []
        for g, (count, per_page) in enumerate(zip(geometry.num_slots, geometry.slots_per_page, strict=True)):
            self.slots.append([Slot(g, i, g if self.static else i // int(per_page)) for i in range(int(count))])
        groups = len(self.slots)
        count = groups if self.static else int(geometry.num_slots[0] // geometry.slots_per_page[0])
        self.pages = [Page() for _ in range(count)]
        self.open_pages: list[list[int]] = [[] for _ in range(groups)]
        self.emptiable: list[list[int]] = [[] for _ in range(groups)]
        self.free_pages = list(reversed(range(count)))
        self._loose: set[Slot] = set()
        self._on_page = {
            (g, page): [s for s in self.slots[g] if s.page == page] for g in range(groups) for page in range(count)
        }
        self.counters = [[0] * 6 for _ in range(groups)]
        self.held_on: dict[int, int] | None = None
        if self.static:
            self.free_pages = []
            for g in range(groups):
                self.pages[g].group = g
                if self.slots[g]:
                    self._give_page_to(g, g)

    def on_page(self, group: int, page: int) -> list[Slot]:
        """The slots of ``group`` that lie on ``page``."""
        return self._on_page[group, page]

    def used_on(self, group: int, page: int) -> list[Slot]:
        """Those in use."""
        return [slot for slot in self.on_page(group, page) if slot.state is not ObjectState.FREE]

    def _give_page_to(self, group: int, page: int) -> None:
        self.pages[page] = Page(group, self.on_page(group, page)[::-1])
        self.open_pages[group].insert(0, page)

    def room(self, group: int) -> int:
        """Slots of the group that are free, and those of free pages."""
        free = sum(len(self.pages[page].free) for page in self.open_pages[group])
        return free + sum(len(self.on_page(group, page)) for page in self.free_pages)

    def take(self, group: int) -> Slot | None:
        """A free slot of the page opened last, else of a free page; None when there is neither."""
        if not self.open_pages[group]:
            if not self.free_pages:
                return None
            self._give_page_to(group, self.free_pages.pop())
        page = self.open_pages[group][0]
        slot = min(self.pages[page].free, key=lambda s: s.index)
        self.pages[page].free.remove(slot)
        if not self.pages[page].free:
            self.open_pages[group].remove(page)
        slot.state = ObjectState.ALLOCATED
        slot.generation += 1
        slot.holders = 1
        slot.grade = Grade.CANONICAL
        self.counters[group][ALLOCS] += 1
        self._leave_emptiable(slot)
        return slot

    def give(self, slot: Slot) -> None:
        """Back to its page, and the page back to everybody when it is empty."""
        slot.state = ObjectState.FREE
        slot.generation += 1
        slot.owner = None
        slot.auxiliary = False
        page = slot.page
        if not self.pages[page].free:
            self.open_pages[slot.group].insert(0, page)
        self.pages[page].free.append(slot)
        self._leave_emptiable(slot)
        if not self.static and not self.used_on(slot.group, page):
            self.open_pages[slot.group].remove(page)
            self.pages[page] = Page()
            self.free_pages.append(page)
        else:
            self._join_emptiable(slot)
        self.settle()

    def hold(self, slot: Slot) -> None:
        """One more holder."""
        slot.holders += 1
        self.settle()

    def release(self, slot: Slot) -> None:
        """One holder less; the last one frees a private slot and makes a cached one evictable."""
        slot.holders -= 1
        if slot.holders == 0:
            if slot.owner is None:
                self.give(slot)
            else:
                self._releases += 1
                slot.released = (self.clock, self._releases)
        self.settle()

    def settle(self) -> None:
        """Look again at what is evictable, slot by slot; pages that can be emptied now join the end of their line."""
        loose = {s for slots in self.slots for s in slots if s.evictable}
        for slot in self._loose - loose:
            self._leave_emptiable(slot)
        added = sorted(loose - self._loose, key=lambda s: s.column)
        self._loose &= loose
        for slot in added:
            self._loose.add(slot)
            self._join_emptiable(slot)

    def _leave_emptiable(self, slot: Slot) -> None:
        self._loose.discard(slot)
        if slot.page in self.emptiable[slot.group]:
            self.emptiable[slot.group].remove(slot.page)

    def _join_emptiable(self, slot: Slot) -> None:
        used = self.used_on(slot.group, slot.page)
        if used and all(s in self._loose for s in used):
            self.emptiable[slot.group].append(slot.page)
            self.pages[slot.page].since = self.clock

    def auxiliary(self, group: int, worth: int) -> list[Slot]:
        """Windows or snapshots of segments that may go one by one, least recently released first."""
        listed = (s for s in self.slots[group] if s.auxiliary and s.evictable and s.worth == worth)
        return sorted(listed, key=lambda s: s.released)

    def revalue(self, slot: Slot, worth: int) -> None:
        """An auxiliary object goes to the end of another list."""
        slot.worth = worth
        if not slot.holders:
            self._releases += 1
            slot.released = (self.clock, self._releases)
            self._leave_emptiable(slot)
            self.settle()
