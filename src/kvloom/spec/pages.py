"""One page size per tier for groups whose slots differ: a search instead of an absurd common multiple.

A page belongs to one group at a time and holds a whole number of its slots; what is left over is waste.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvloom.spec.model_spec import ModelSpec, round_up

PAGE_ALIGN = 4096
LARGEST_FACTOR = 4
_MOST_TRIED = 1 << 20


@dataclass(frozen=True, slots=True)
class PageLayout:
    """A page size and how each group fills it (tuples in the order of the groups).

    Attributes:
        page_bytes: a multiple of 4096.
        slots_per_page: whole slots of each group in one page.
        waste: part of a full page that each group leaves empty, in [0, 1).
    """

    page_bytes: int
    slots_per_page: tuple[int, ...]
    waste: tuple[float, ...]

    @property
    def worst_waste(self) -> float:
        """The largest of ``waste``."""
        return max(self.waste)


def search_page(slot_bytes: Sequence[int]) -> PageLayout:
    """The page size between the largest slot and four times it whose worst waste over the groups is least.

    The smallest such page wins a tie.  Takes about 10 ms for the largest real slots (100 MB); of slots above 1 GiB
    not every page size is tried.

    Args:
        slot_bytes: bytes of one slot of each group, each >= 1; at least one.
    """
    slots = np.asarray(slot_bytes, dtype=np.int64)
    if slots.size == 0 or slots.min() < 1:
        raise ValueError("every group needs a slot of at least one byte, and there must be a group")
    largest = int(slots.max())
    low = round_up(largest, PAGE_ALIGN)
    high = max(largest * LARGEST_FACTOR, low)
    step = PAGE_ALIGN * max(1, -(-(high - low) // (PAGE_ALIGN * _MOST_TRIED)))
    pages = np.arange(low, high + 1, step, dtype=np.int64)
    worst = np.zeros(pages.size)
    for slot in np.unique(slots):
        np.maximum(worst, (pages % slot) / pages, out=worst)
    page = int(pages[int(worst.argmin())])
    return layout_for(page, slot_bytes)


def layout_for(page_bytes: int, slot_bytes: Sequence[int]) -> PageLayout:
    """How groups fill pages of a given size, which must hold the largest slot."""
    counts = tuple(page_bytes // slot for slot in slot_bytes)
    if min(counts) < 1:
        raise ValueError(f"a page of {page_bytes} bytes does not hold the largest slot of {max(slot_bytes)} bytes")
    return PageLayout(page_bytes, counts, tuple((page_bytes % slot) / page_bytes for slot in slot_bytes))


def spec_page(spec: ModelSpec) -> PageLayout:
    """:func:`search_page` over the groups of a model."""
    return search_page([group.slot_bytes for group in spec.groups])
