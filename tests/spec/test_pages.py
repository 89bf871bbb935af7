"""The page size search against brute force, and its limits."""

from __future__ import annotations

import time
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.spec.pages import (
    LARGEST_FACTOR,
    PAGE_ALIGN,
    SPARE_PAGES,
    layout_for,
    page_ladder,
    search_page,
    spec_ladder,
)
from kvloom.spec.presets import PRESETS, load_preset


def brute_force(slots: list[int]) -> tuple[int, Fraction]:
    """Every page, one by one, in exact arithmetic."""
    best: tuple[Fraction, int] | None = None
    page = -(-max(slots) // PAGE_ALIGN) * PAGE_ALIGN
    while best is None or page <= LARGEST_FACTOR * max(slots):
        worst = max(Fraction(page % slot, page) for slot in slots)
        best = min(best, (worst, page)) if best else (worst, page)
        page += PAGE_ALIGN
    return best[1], best[0]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 4000).map(lambda n: 256 * n), min_size=1, max_size=6))
def test_search_finds_the_least_worst_waste(slots: list[int]) -> None:
    layout = search_page(slots)
    page, worst = brute_force(slots)
    assert layout.worst_waste == pytest.approx(float(worst), abs=1e-12)
    assert layout.page_bytes <= page or layout.worst_waste < float(worst) + 1e-12
    assert layout.page_bytes % PAGE_ALIGN == 0
    assert max(slots) <= layout.page_bytes <= max(LARGEST_FACTOR * max(slots), PAGE_ALIGN)
    for slot, count, waste in zip(slots, layout.slots_per_page, layout.waste, strict=True):
        assert count >= 1
        assert 0 <= layout.page_bytes - count * slot < slot
        assert waste == pytest.approx((layout.page_bytes - count * slot) / layout.page_bytes)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 1000).map(lambda n: 256 * n), min_size=1, max_size=6), st.integers(1, 10**6))
def test_a_tier_uses_the_page_that_loses_least(slots: list[int], factor: int) -> None:
    """Against every page, one by one: waste of full pages, and one part-filled page per group."""
    ladder = page_ladder(slots)
    assert ladder[-1].layout == search_page(slots)
    for lower, upper in pairwise(ladder):
        assert lower.tier_bytes < upper.tier_bytes
        assert lower.layout.page_bytes < upper.layout.page_bytes
        assert lower.layout.worst_waste > upper.layout.worst_waste
    low, high = -(-max(slots) // PAGE_ALIGN) * PAGE_ALIGN, max(LARGEST_FACTOR * max(slots), PAGE_ALIGN)
    assert ladder[0].layout.page_bytes == low
    enough = len(slots) + SPARE_PAGES
    assert all(rung.tier_bytes >= enough * rung.layout.page_bytes for rung in ladder)
    tier = enough * high + 1024 * factor
    used = [rung.layout for rung in ladder if rung.tier_bytes <= tier][-1]
    loss = min(
        max(page % s for s in slots) / page + len(slots) * page / tier for page in range(low, high + 1, PAGE_ALIGN)
    )
    assert used.worst_waste + len(slots) * used.page_bytes / tier == pytest.approx(loss, abs=1e-9)


def test_small_tiers_have_small_pages() -> None:
    mib = 1 << 20
    pages = {
        rung.layout.page_bytes / mib: rung.tier_bytes / mib for rung in spec_ladder(load_preset("deepseek-v4-flash"))
    }
    assert list(pages) == [10, 30.65625, 40]
    assert pages[10] == 90
    assert 2000 < pages[30.65625] < 3000 < pages[40] < 16_000


def test_smallest_page_wins_a_tie() -> None:
    assert search_page([4096]).page_bytes == 4096
    assert search_page([256, 512]).page_bytes == 4096


def test_bad_slots() -> None:
    for bad in ([], [0], [256, -1]):
        with pytest.raises(ValueError, match="slot"):
            search_page(bad)
    with pytest.raises(ValueError, match="does not hold"):
        layout_for(4096, [8192])


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_real_models_are_searched_quickly(name: str) -> None:
    spec = load_preset(name)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        spec_ladder(spec)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05
