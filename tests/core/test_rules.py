"""What a group needs at a position: compiled rules, the kinds' strategies and plain enumeration agree everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.core.reference.rules import Group
from tests.core.specs import ALL, blocks, chunks, window
from tests.core.workshop import engine, prompt_of

from kvloom.core import rules
from kvloom.core.fields import COL_BASE, COLUMNS
from kvloom.kinds import state_of
from kvloom.spec.model_spec import GroupSpec, ModelSpec
from kvloom.types import Kind

WINDOWS = ModelSpec(
    "windows of every shape",
    tuple(window(size, block) for size, block in ((1, 4), (2, 4), (3, 1), (4, 4), (5, 4), (8, 2), (9, 4), (40, 4)))
    + tuple(chunks(size, block) for size, block in ((4, 4), (6, 4), (8, 1), (10, 2), (12, 4), (7, 2)))
    + (blocks("ratio 3", Kind.COMPRESSED, 12, ratio=3), blocks("ratio 12", Kind.INDEXER, 12, ratio=12)),
    block_size=4,
    segment_tokens=12,
)
SPECS = (*ALL, WINDOWS)


def _unique(spec: ModelSpec) -> list[tuple[int, GroupSpec]]:
    return list(enumerate(spec.groups))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_three_ways_to_say_what_is_needed(spec: ModelSpec) -> None:
    a = engine(spec, 600, max_nodes=4).manager.arrays
    for g, group in _unique(spec):
        plain, strategy = Group(spec, g), state_of(group)
        for position in range(130):
            if group.is_snapshot:
                wanted = plain.snapshot_needed(position)
                assert bool(rules.snapshot_needed(a, g, position)) == wanted
                assert bool(rules.snapshot_kept(a, g, position)) == plain.snapshot_kept(position)
                assert len(strategy.needed(position)) == int(wanted)
                continue
            first, last = int(rules.first_block_needed(a, g, position)), int(rules.blocks_at(a, g, position))
            assert list(range(first, last)) == plain.needed(position), (group.name, position)
            assert list(strategy.needed(position)) == plain.needed(position)
            assert plain.begun(position) == last


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_a_block_is_published_where_it_is_needed(spec: ModelSpec) -> None:
    segment = spec.segment_tokens
    blocks_wanted = 100 // segment * sum(segment // g.block_tokens for g in spec.groups if not g.is_snapshot)
    e = engine(spec, 200 + 3 * blocks_wanted, max_nodes=110)
    a = e.manager.arrays
    s = e.open(prompt_of(1))
    for end in range(segment, min(100, spec.max_positions or 100), segment):
        e.step(s, prompt_of(end)[-segment:])
        for g, group in _unique(spec):
            if not group.is_snapshot:
                first, count = a.group[g, [COL_BASE, COLUMNS]].tolist()
                there = (
                    np.flatnonzero(a.columns[s.node, first : first + count] >= 0)
                    + (end - segment) // group.block_tokens
                )
                wanted = [b for b in Group(spec, g).needed(end) if b * group.block_tokens >= end - segment]
                assert there.tolist() == wanted, (group.name, end)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_what_a_later_position_needs_of_the_past_was_needed_at_the_segment_end_before(spec: ModelSpec) -> None:
    """So publishing what each segment end needs is enough for every checkpoint after it."""
    for g, group in _unique(spec):
        if group.is_snapshot:
            continue
        plain = Group(spec, g)
        for position in range(1, 130):
            end = position // spec.segment_tokens * spec.segment_tokens
            past = {b for b in plain.needed(position) if (b + 1) * group.block_tokens <= end}
            assert past <= set(plain.needed(end)), (group.name, position)


@pytest.mark.parametrize("kind", [Kind.WINDOW, Kind.COMPRESSED])
def test_a_group_that_does_not_fit_its_kind_is_refused(kind: Kind) -> None:
    from kvloom.errors import SpecError

    wrong: dict[Kind, dict[str, Any]] = {Kind.WINDOW: {"window": 0}, Kind.COMPRESSED: {"block_tokens": 0}}
    arguments = {"block_tokens": 4} | wrong[kind]
    with pytest.raises(SpecError):
        state_of(GroupSpec("odd", kind, (0,), ALL[0].groups[0].tensors, **arguments))
