"""What ``kvloom spec`` prints as JSON: a report of a model's cached state."""

from __future__ import annotations

from typing import Any

from kvloom.errors import ConfigError
from kvloom.spec.footprint import peak_slots
from kvloom.spec.from_config import MOST_POSITIONS
from kvloom.spec.model_spec import GroupSpec, ModelSpec
from kvloom.spec.pages import PageLayout, spec_ladder
from kvloom.types import Kind

DEFAULT_CONTEXT = 131_072
_SHOWN_KINDS = (Kind.COMPRESSED, Kind.INDEXER, Kind.WINDOW, Kind.TAIL, Kind.RECURRENT)


def spec_report(spec: ModelSpec, context: int | None = None) -> dict[str, Any]:
    """Everything worth knowing about a model's cache, ready for ``json.dumps``.

    ``bytes_per_request`` counts payload; ``slot_bytes_per_request`` the slots that one request holds at its
    peak when it is prefilled in segments, alignment and part-filled blocks included.  ``page`` and what the groups say
    about pages hold for large tiers; ``pages_by_tier`` lists the smaller pages of smaller tiers (a tier below the
    first is split into fixed shares).

    Args:
        spec: the model.
        context: tokens of the request that is counted; by default 131,072, or the model's limit if that is less.
    """
    context = _context(spec, context)
    ladder = spec_ladder(spec)
    page = ladder[-1].layout
    peaks = peak_slots(spec, context, spec.segment_tokens)
    groups = [
        _group_report(group, context, page, index, peak)
        for index, (group, peak) in enumerate(zip(spec.groups, peaks, strict=True))
    ]
    return {
        "model": spec.name,
        "format": spec.format,
        "context": context,
        "max_positions": spec.max_positions,
        "block_size": spec.block_size,
        "lcm_tokens": spec.lcm_tokens,
        "segment_tokens": spec.segment_tokens,
        "snapshot_interval": spec.snapshot_interval,
        "global_bytes_per_token": _plain(sum(g.bytes_per_token for g in spec.of_kind(Kind.COMPRESSED, Kind.INDEXER))),
        "window_bytes": sum(g.window * g.entry_bytes for g in spec.of_kind(Kind.WINDOW)),
        "tail_bytes": sum(g.entry_bytes for g in spec.of_kind(Kind.TAIL)),
        "recurrent_bytes": sum(g.entry_bytes for g in spec.of_kind(Kind.RECURRENT)),
        "exact_replay_tokens": spec.exact_replay_tokens,
        "bytes_per_request": sum(g["bytes_per_request"] for g in groups),
        "slot_bytes_per_request": sum(g["slot_bytes_per_request"] for g in groups),
        "kinds": {
            kind.name.lower(): _kind_report(spec, kind, groups) for kind in _SHOWN_KINDS if any(spec.of_kind(kind))
        },
        "page": {"bytes": page.page_bytes, "worst_waste": page.worst_waste},
        "pages_by_tier": [
            {
                "tier_bytes": rung.tier_bytes,
                "bytes": rung.layout.page_bytes,
                "worst_waste": rung.layout.worst_waste,
                "slots_per_page": list(rung.layout.slots_per_page),
            }
            for rung in ladder
        ],
        "groups": groups,
        "notes": _notes(spec, context),
    }


def _context(spec: ModelSpec, context: int | None) -> int:
    if context is None:
        return min(DEFAULT_CONTEXT, spec.max_positions or DEFAULT_CONTEXT)
    if context < 1:
        raise ConfigError(f"context: must be at least 1 token, not {context}")
    if context > MOST_POSITIONS:
        raise ConfigError(f"context: at most {MOST_POSITIONS} tokens are counted, not {context}; use a smaller one")
    return context


def _group_report(group: GroupSpec, context: int, page: PageLayout, index: int, peak: int) -> dict[str, Any]:
    return {
        "name": group.name,
        "kind": group.kind.name.lower(),
        "layers": len(group.layers),
        "ratio": group.ratio,
        "block_tokens": group.block_tokens,
        "block_entries": group.block_entries,
        "window": group.window,
        "chunked": group.chunked,
        "bytes_per_token": _plain(group.bytes_per_token),
        "bytes_per_request": _payload(group, context),
        "slot_bytes_per_request": peak * group.slot_bytes,
        "peak_slots": peak,
        "slot_bytes": group.slot_bytes,
        "padding": 1 - group.entry_bytes * group.block_entries / group.slot_bytes,
        "slots_per_page": page.slots_per_page[index],
        "page_waste": page.waste[index],
        "tensors": {t.name: {"shape": list(t.shape), "dtype": t.dtype} for t in group.tensors},
    }


def _payload(group: GroupSpec, context: int) -> int:
    """Bytes that one request of ``context`` tokens needs of this group, without alignment."""
    if group.is_snapshot:
        return group.entry_bytes
    entries = context // group.ratio
    return group.entry_bytes * (min(entries, group.window) if group.kind is Kind.WINDOW else entries)


def _kind_report(spec: ModelSpec, kind: Kind, groups: list[dict[str, Any]]) -> dict[str, Any]:
    mine = [(g, row) for g, row in zip(spec.groups, groups, strict=True) if g.kind is kind]
    return {
        "layers": len({layer for g, _ in mine for layer in g.layers}),
        "groups": [g.name for g, _ in mine],
        "bytes_per_token": _plain(sum(g.bytes_per_token for g, _ in mine)),
        "bytes_per_request": sum(row["bytes_per_request"] for _, row in mine),
        "slot_bytes_per_request": sum(row["slot_bytes_per_request"] for _, row in mine),
    }


def _notes(spec: ModelSpec, context: int) -> list[str]:
    notes = []
    if spec.max_positions and context > spec.max_positions:
        notes.append(f"{context:,} tokens are more than the {spec.max_positions:,} positions of the model")
    if any(spec.of_kind(Kind.RECURRENT)):
        if spec.exact_replay_tokens:
            notes.append("windows cannot be rebuilt by replay: the recurrent layers need a snapshot")
        notes.append(f"recurrent snapshots are kept at checkpoints and every {spec.snapshot_interval:,} tokens")
    if any(spec.of_kind(Kind.TAIL)):
        notes.append("pending tail rows are held only between multiples of their ratio; the overlap always")
    return notes


def _plain(value: float) -> float | int:
    """Whole numbers as ``int``, so that JSON shows 4096 and not 4096.0."""
    return int(value) if value == int(value) else value
