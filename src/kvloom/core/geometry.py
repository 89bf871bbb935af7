"""Cutting one tier's bytes into slots: moving pages, or a static split when memory is too small for them.

With moving pages every group can, in principle, use the whole arena, one page at a time.  A static split gives
each group a fixed share: that of one request, and then of more sequences and checkpoints beside it.

Here more bytes are never worse: a request that fits into a tier of ``smallest_arena`` bytes fits into every larger one.
"""

from __future__ import annotations

import numpy as np

from kvloom.config import exact_size
from kvloom.errors import CapacityError
from kvloom.plan import ArenaGeometry
from kvloom.spec.footprint import peak_bytes, peak_slots
from kvloom.spec.model_spec import ModelSpec
from kvloom.spec.pages import PageLayout, spec_ladder
from kvloom.types import IntArray, Kind

SMALLEST_REQUEST = 2
"""Tokens of the smallest request worth an arena: a prompt of one token, and one generated."""


def plan_geometry(spec: ModelSpec, arena_bytes: int) -> ArenaGeometry:
    """Geometry of an arena of at most ``arena_bytes`` bytes.

    Raises CapacityError when not even a request of two tokens fits.
    """
    ladder = spec_ladder(spec)
    for rung in reversed(ladder):
        if arena_bytes >= rung.tier_bytes:
            return _moving_pages(spec, arena_bytes, rung.layout)
    return split_statically(spec, arena_bytes)


def split_statically(spec: ModelSpec, arena_bytes: int) -> ArenaGeometry:
    """Geometry of an arena of at most ``arena_bytes`` bytes in which every group has a fixed share.

    A larger arena gives no group less.  Raises CapacityError when not even a request of two tokens fits.
    """
    needed = peak_bytes(spec, SMALLEST_REQUEST, 1)
    if needed > arena_bytes:
        raise CapacityError(
            f"device: a tier of {exact_size(arena_bytes)} cannot hold the smallest request of {spec.name}; "
            f"give it at least {exact_size(needed)}",
            needed=needed,
            cap=arena_bytes,
            in_use=0,
            never_fits=True,
        )
    sizes = _slot_bytes(spec)
    slots = _shares(spec, arena_bytes)
    widths = slots * sizes
    return ArenaGeometry(
        arena_bytes=int(widths.sum()),
        base=np.concatenate([[0], np.cumsum(widths)[:-1]]).astype(np.int64),
        page_bytes=widths,
        slots_per_page=slots,
        slot_bytes=sizes,
        num_slots=slots.copy(),
        static_split=True,
    )


def split_note(spec: ModelSpec, geometry: ArenaGeometry) -> str:
    """What a message about too little room adds when shares are fixed, and where that ends; else nothing."""
    if not geometry.static_split:
        return ""
    moving = spec_ladder(spec)[0].tier_bytes
    return f" (so small a tier is split into fixed shares; from {moving} bytes on, groups give each other pages)"


def fits(spec: ModelSpec, geometry: ArenaGeometry, tokens: int) -> bool:
    """Whether a request of ``tokens`` tokens, at its peak, fits into an empty arena."""
    slots = np.array(peak_slots(spec, tokens, spec.segment_tokens), dtype=np.int64)
    if geometry.static_split:
        return bool((slots <= geometry.num_slots).all())
    pages = -(-slots // geometry.slots_per_page)
    return int(pages.sum()) * int(geometry.page_bytes[0]) <= geometry.arena_bytes


def smallest_arena(spec: ModelSpec, tokens: int) -> int:
    """Bytes of the smallest tier such that a request of ``tokens`` tokens fits into it and into every larger one.

    For messages: takes some 10 ms.
    """
    slots = peak_slots(spec, tokens, spec.segment_tokens)
    ladder = spec_ladder(spec)
    best = 0
    for rung in reversed(ladder):
        layout = rung.layout
        pages = sum(-(-n // per) for n, per in zip(slots, layout.slots_per_page, strict=True))
        needed = pages * layout.page_bytes
        if best and needed >= best:
            return best
        best = max(needed, rung.tier_bytes)
        if needed > rung.tier_bytes:
            return best
    low = peak_bytes(spec, max(tokens, SMALLEST_REQUEST), spec.segment_tokens) - 1
    while best - low > 1:
        middle = (low + best) // 2
        low, best = (low, middle) if fits(spec, split_statically(spec, middle), tokens) else (middle, best)
    return best


def _moving_pages(spec: ModelSpec, arena_bytes: int, layout: PageLayout) -> ArenaGeometry:
    per_page = np.array(layout.slots_per_page, dtype=np.int64)
    pages = arena_bytes // layout.page_bytes
    return ArenaGeometry(
        arena_bytes=pages * layout.page_bytes,
        base=np.zeros(len(spec.groups), dtype=np.int64),
        page_bytes=np.full(len(spec.groups), layout.page_bytes, dtype=np.int64),
        slots_per_page=per_page,
        slot_bytes=_slot_bytes(spec),
        num_slots=pages * per_page,
        static_split=False,
    )


def _slot_bytes(spec: ModelSpec) -> IntArray:
    return np.array([group.slot_bytes for group in spec.groups], dtype=np.int64)


def _shares(spec: ModelSpec, arena_bytes: int) -> IntArray:
    """Slots of every group: the largest mix that fits, and then the next one as far as it fits, small slots first."""
    sizes = _slot_bytes(spec)
    lasting = np.array([g.is_snapshot or g.kind is Kind.WINDOW for g in spec.groups])
    longest = 2 * (spec.segment_tokens + max(g.window for g in spec.groups))
    one = np.array(peak_slots(spec, longest, spec.segment_tokens), dtype=np.int64)
    per_token = sum(g.slot_bytes / g.block_tokens for g, stays in zip(spec.groups, lasting, strict=True) if not stays)
    weight = int((one * sizes)[lasting].sum())
    per_sequence = max(weight / per_token, 1.0) if weight and per_token else float(spec.segment_tokens)

    def mix(tokens: int) -> IntArray:
        """One request of so many tokens; the longer it is, the more windows and snapshots for others beside it.

        They are given as much memory as the blocks that grow with the tokens.
        """
        peak = np.array(peak_slots(spec, tokens, spec.segment_tokens), dtype=np.int64)
        others = np.floor(one * (tokens / per_sequence) + 0.5).astype(np.int64)
        return np.where(lasting, peak + others, peak)

    low, high = SMALLEST_REQUEST, 2 * SMALLEST_REQUEST
    while int(mix(high) @ sizes) <= arena_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if int(mix(middle) @ sizes) <= arena_bytes else (low, middle)
    slots, more = np.array(peak_slots(spec, low, 1)) if low == SMALLEST_REQUEST else mix(low), mix(high)
    left = arena_bytes - int(slots @ sizes)
    for g in np.argsort(sizes, kind="stable"):
        extra = min(int(more[g] - slots[g]), left // int(sizes[g]))
        slots[g] += extra
        left -= extra * int(sizes[g])
        if slots[g] < more[g]:
            break
    return slots
