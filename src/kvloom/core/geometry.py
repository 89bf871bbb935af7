"""Cutting one tier's bytes into slots: moving pages, or a static split when memory is too small for them.

With moving pages every group can, in principle, use the whole arena, one page at a time.  A static
split gives each group a fixed share in the proportion in which one long request and its snapshots use them.
"""

from __future__ import annotations

import numpy as np

from kvloom.errors import CapacityError
from kvloom.plan import ArenaGeometry
from kvloom.spec.footprint import peak_bytes, peak_slots
from kvloom.spec.model_spec import ModelSpec
from kvloom.spec.pages import spec_page

PAGES_PER_GROUP = 8
"""Below this many pages per group a part-filled page per kind would waste too much: split statically."""

SMALLEST_REQUEST = 2
"""Tokens of the smallest request worth an arena: a prompt of one token, and one generated."""


def plan_geometry(spec: ModelSpec, arena_bytes: int) -> ArenaGeometry:
    """Geometry of an arena of at most ``arena_bytes`` bytes.

    Raises CapacityError when not even a request of two tokens fits.
    """
    needed = peak_bytes(spec, SMALLEST_REQUEST, 1)
    if needed > arena_bytes:
        raise CapacityError(
            f"a device tier of {arena_bytes} bytes cannot hold the smallest request of {spec.name}, "
            f"{needed} bytes; give it at least {needed} bytes",
            needed=needed,
            cap=arena_bytes,
            in_use=0,
            never_fits=True,
        )
    search = spec_page(spec)
    pages = arena_bytes // search.page_bytes
    if pages >= PAGES_PER_GROUP * len(spec.groups):
        per_page = np.array(search.slots_per_page, dtype=np.int64)
        count = len(spec.groups)
        return ArenaGeometry(
            arena_bytes=pages * search.page_bytes,
            base=np.zeros(count, dtype=np.int64),
            page_bytes=np.full(count, search.page_bytes, dtype=np.int64),
            slots_per_page=per_page,
            slot_bytes=np.array([g.slot_bytes for g in spec.groups], dtype=np.int64),
            num_slots=pages * per_page,
            static_split=False,
        )
    return _static_split(spec, arena_bytes)


def fits(spec: ModelSpec, geometry: ArenaGeometry, tokens: int) -> bool:
    """Whether a request of ``tokens`` tokens, at its peak, fits into an empty arena."""
    slots = np.array(peak_slots(spec, tokens, spec.segment_tokens), dtype=np.int64)
    if geometry.static_split:
        return bool((slots <= geometry.num_slots).all())
    pages = -(-slots // geometry.slots_per_page)
    return int(pages.sum()) * int(geometry.page_bytes[0]) <= geometry.arena_bytes


def smallest_arena(spec: ModelSpec, tokens: int) -> int:
    """Bytes of a tier, to within 1 %, into which a request of ``tokens`` tokens fits as arenas are cut here.

    For messages: takes up to a few tenths of a second.
    """
    low = max(peak_bytes(spec, tokens, spec.segment_tokens), peak_bytes(spec, SMALLEST_REQUEST, 1)) - 1
    high = low + 1
    while not fits(spec, plan_geometry(spec, high), tokens):
        low, high = high, 2 * high
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(spec, plan_geometry(spec, middle), tokens) else (middle, high)
    return high


def wanted_slots(spec: ModelSpec, tokens: int) -> list[int]:
    """Slots per group that one request of ``tokens`` tokens and what it leaves in the index would use."""
    peak = peak_slots(spec, tokens, spec.segment_tokens)
    segments = tokens // spec.segment_tokens
    wanted = []
    for group, live in zip(spec.groups, peak, strict=True):
        if group.is_snapshot:
            every = spec.snapshot_interval or spec.segment_tokens
            kept = tokens // every if not group.needed_unless_multiple_of else 0
            wanted.append(live + (kept + 2 if tokens > SMALLEST_REQUEST else 0))
        else:
            spare = 1 if tokens > SMALLEST_REQUEST else 0
            kept_blocks = segments * min(
                spec.segment_tokens // group.block_tokens,
                -(-group.window // group.block_tokens) + 1 if group.window else spec.segment_tokens,
            )
            wanted.append(max(live, kept_blocks if group.window else live) + spare)
    return wanted


def _static_split(spec: ModelSpec, arena_bytes: int) -> ArenaGeometry:
    def total(tokens: int) -> int:
        return sum(n * g.slot_bytes for n, g in zip(wanted_slots(spec, tokens), spec.groups, strict=True))

    low, high = SMALLEST_REQUEST, SMALLEST_REQUEST
    while total(high) <= arena_bytes and high < 1 << 40:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle) <= arena_bytes else (low, middle)
    slots = wanted_slots(spec, low)
    sizes = [g.slot_bytes for g in spec.groups]
    left = arena_bytes - sum(n * size for n, size in zip(slots, sizes, strict=True))
    for g in np.argsort(sizes)[::-1]:
        extra = left // (sizes[g] * len(sizes))
        slots[g] += extra
        left -= extra * sizes[g]
    widths = np.array([n * size for n, size in zip(slots, sizes, strict=True)], dtype=np.int64)
    slot_bytes = np.array(sizes, dtype=np.int64)
    return ArenaGeometry(
        arena_bytes=int(widths.sum()),
        base=np.concatenate([[0], np.cumsum(widths)[:-1]]).astype(np.int64),
        page_bytes=widths,
        slots_per_page=np.array(slots, dtype=np.int64),
        slot_bytes=slot_bytes,
        num_slots=np.array(slots, dtype=np.int64),
        static_split=True,
    )
