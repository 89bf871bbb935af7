"""Peak footprint of one request: the one formula that the sizer and the run-time gate share.

A request is prefilled from ``start`` in appends of ``append`` tokens up to ``tokens``, then may decode
token by token.  All rows of an append are kept until it is committed; blocks that the window has left
are released then.  Nothing here loops over blocks or positions of the request.
"""

from __future__ import annotations

import math

import numpy as np

from kvloom.spec.model_spec import GroupSpec, ModelSpec
from kvloom.types import Kind


def peak_slots(spec: ModelSpec, tokens: int, append: int, start: int = 0) -> tuple[int, ...]:
    """Most slots of each group that one request of ``tokens`` tokens holds at once (in the order of the groups).

    Args:
        spec: the model.
        tokens: length of the request at its end, prompt and answer.
        append: tokens per forward during prefill (usually the segment).
        start: position at which prefill begins (the reused length).
    """
    return tuple(_group_peak(group, tokens, append, start) for group in spec.groups)


def peak_bytes(spec: ModelSpec, tokens: int, append: int, start: int = 0) -> int:
    """Bytes of the slots of :func:`peak_slots`, alignment included."""
    slots = peak_slots(spec, tokens, append, start)
    return sum(n * group.slot_bytes for n, group in zip(slots, spec.groups, strict=True))


def _group_peak(group: GroupSpec, tokens: int, append: int, start: int) -> int:
    if tokens <= 0:
        return 0
    if group.is_snapshot:
        return 1
    if group.kind is not Kind.WINDOW:
        return -(-(tokens // group.ratio) // group.block_entries)
    return max(_prefill_peak(group, tokens, append, start), _decode_peak(group, tokens))


def _prefill_peak(group: GroupSpec, tokens: int, append: int, start: int) -> int:
    """Blocks that intersect [first row needed, P + append), over all P = start + k * append."""
    appends = -(-max(tokens - start, 0) // append)
    # The count repeats once P has moved by a common multiple, and below that only grows with P.
    cycle = math.lcm(group.block_tokens, group.window) if group.chunked else group.block_tokens
    period = cycle // math.gcd(append, cycle) + 1
    at = start + append * np.arange(max(0, appends - period), appends, dtype=np.int64)
    if not at.size:
        return 0
    first = at // group.window * group.window if group.chunked else np.maximum(at - group.window + 1, 0)
    end = np.minimum(at + append, tokens)
    return int((-(-end // group.block_tokens) - first // group.block_tokens).max())


def _decode_peak(group: GroupSpec, tokens: int) -> int:
    """The same for one token at any position: the window itself, in its worst alignment to blocks."""
    everything = -(-tokens // group.block_tokens)
    if group.chunked and group.window % group.block_tokens == 0:
        return min(everything, group.window // group.block_tokens)
    return min(everything, 1 if group.window == 1 else (group.window - 2) // group.block_tokens + 2)
