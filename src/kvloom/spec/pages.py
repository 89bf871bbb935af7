"""One page size per tier for groups whose slots differ: a search instead of an absurd common multiple.

A page belongs to one group at a time and holds a whole number of its slots; what is left over is waste.  Large
pages waste less, small pages leave more of them to move between the groups: the larger the tier, the larger its page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvloom.spec.model_spec import ModelSpec, round_up
from kvloom.types import IntArray

PAGE_ALIGN = 4096
LARGEST_FACTOR = 4
_MOST_TRIED = 1 << 20

SPARE_PAGES = 2
"""Pages that a tier has at least beside one per group, which may be part-filled: they go where they are needed."""


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


@dataclass(frozen=True, slots=True)
class Rung:
    """A page size, and ``tier_bytes``: the smallest tier that uses it."""

    tier_bytes: int
    layout: PageLayout


def search_page(slot_bytes: Sequence[int]) -> PageLayout:
    """The page size between the largest slot and four times it whose worst waste over the groups is least.

    The smallest such page wins a tie.  Takes about 10 ms for the largest real slots (100 MB); of slots above 1 GiB
    not every page size is tried.

    Args:
        slot_bytes: bytes of one slot of each group, each >= 1; at least one.
    """
    pages, worst = _candidates(slot_bytes)
    return layout_for(int(pages[int(worst.argmin())]), slot_bytes)


def page_ladder(slot_bytes: Sequence[int]) -> tuple[Rung, ...]:
    """The page sizes that some tier uses, smallest first; the last is that of :func:`search_page`.

    A tier of B bytes loses at most the worst waste of its full pages and one part-filled page per group.  It uses
    the page between the largest slot and four times it that makes the sum of both least, but none of which it has
    fewer than one per group and ``SPARE_PAGES``; a tier below the first rung has too little memory for moving pages.
    Takes about as long as the search.
    """
    groups = len(slot_bytes)
    pages, worst = _candidates(slot_bytes)
    least = np.minimum.accumulate(worst)
    better = np.flatnonzero(np.concatenate([[True], least[1:] < least[:-1]]))

    def worth_it(smaller: int, larger: int) -> float:
        """Tier size from which the larger page loses less."""
        return float(groups * (pages[larger] - pages[smaller]) / (worst[smaller] - worst[larger]))

    rungs: list[int] = []
    for page in better.tolist():
        while len(rungs) > 1 and worth_it(rungs[-2], rungs[-1]) >= worth_it(rungs[-1], page):
            rungs.pop()
        rungs.append(page)
    begins = [0, *(math.ceil(worth_it(*pair)) for pair in pairwise(rungs))]
    sizes = [int(pages[rung]) for rung in rungs]
    return tuple(
        Rung(max(begin, (groups + SPARE_PAGES) * size), layout_for(size, slot_bytes))
        for begin, size in zip(begins, sizes, strict=True)
    )


def layout_for(page_bytes: int, slot_bytes: Sequence[int]) -> PageLayout:
    """How groups fill pages of a given size, which must hold the largest slot."""
    counts = tuple(page_bytes // slot for slot in slot_bytes)
    if min(counts) < 1:
        raise ValueError(f"a page of {page_bytes} bytes does not hold the largest slot of {max(slot_bytes)} bytes")
    return PageLayout(page_bytes, counts, tuple((page_bytes % slot) / page_bytes for slot in slot_bytes))


def spec_page(spec: ModelSpec) -> PageLayout:
    """:func:`search_page` over the groups of a model: the page of large tiers."""
    return search_page([group.slot_bytes for group in spec.groups])


def spec_ladder(spec: ModelSpec) -> tuple[Rung, ...]:
    """:func:`page_ladder` over the groups of a model."""
    return page_ladder([group.slot_bytes for group in spec.groups])


def _candidates(slot_bytes: Sequence[int]) -> tuple[IntArray, npt.NDArray[np.float64]]:
    """Every page from the largest slot to four times it, and its worst waste over the groups."""
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
    return pages, worst
