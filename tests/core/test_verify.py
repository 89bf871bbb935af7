"""The door: only ``verify`` makes a VerifiedHit, and each of its four levels can say no."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.core import specs
from tests.core.toy_engine import ToyEngine
from tests.core.workshop import engine, ids, prompt_of

from kvloom.core.hybrid_match import best_boundary, walk
from kvloom.errors import IntegrityError
from kvloom.types import Grade
from kvloom.verify.hit import VerifiedHit, verify

PROMPT = prompt_of(34)


def cached() -> ToyEngine:
    """A V4-like cache with a checkpoint at 33."""
    e = engine(specs.V4, 200, max_nodes=20)
    e.request(PROMPT)
    return e


def arguments(e: ToyEngine, **changes: Any) -> dict[str, Any]:
    """What the manager would hand to ``verify`` for ``PROMPT``, with changes."""
    m = e.manager
    path = np.zeros(20, dtype=np.int32)
    root = next(iter(m.namespaces)).root
    _, depth = walk(m.arrays, root, ids(PROMPT), 33, int(Grade.FAITHFUL), path)
    position, at, checkpoint = best_boundary(m.arrays, path, depth, ids(PROMPT), 33, int(Grade.FAITHFUL))
    assert (position, at) == (33, 2)
    boundary = {"depth": at, "checkpoint": checkpoint, "position": position}
    boundary |= {name: changes.pop(name) for name in list(changes) if name in boundary}
    found = {
        "core": m,
        "path": path,
        "boundary": tuple(boundary.values()),
        "floor": Grade.FAITHFUL,
        "layout": m.layout,
    }
    return found | changes


def test_a_right_hit_passes() -> None:
    hit = verify(**arguments(cached()))
    assert (hit.position, hit.depth) == (33, 2)
    assert len(hit.path) == 3


def test_nobody_else_can_make_one() -> None:
    hit = verify(**arguments(cached()))
    for forged in (object(), None, VerifiedHit):
        with pytest.raises(TypeError, match="only made by"):
            VerifiedHit(33, 2, hit.checkpoint, hit.path, forged)
    with pytest.raises((TypeError, ValueError)):
        replace(hit, position=34)
    with pytest.raises((TypeError, ValueError, AttributeError)):
        hit.position = 34  # type: ignore[misc]


@pytest.mark.parametrize("position", [0, 16, 31, 32, 34, 48])
def test_level_1_a_position_that_is_no_boundary(position: int) -> None:
    with pytest.raises(IntegrityError, match="LCM level"):
        verify(**arguments(cached(), position=position))


def test_level_1_a_segment_end_that_claims_a_tail() -> None:
    with pytest.raises(IntegrityError, match="LCM level"):
        verify(**arguments(cached(), checkpoint=-1))


def test_level_2_another_layout() -> None:
    e = cached()
    with pytest.raises(IntegrityError, match="kernel ABI level"):
        verify(**arguments(e, layout=b"another model"))


@pytest.mark.parametrize("group", range(6), ids=[g.name for g in specs.V4.groups])
def test_level_3_each_group_is_asked(group: int) -> None:
    """The objects went between the match and the check."""
    e = cached()
    given = arguments(e)
    e.manager.drop(specs.V4.groups[group].name)
    with pytest.raises(IntegrityError, match=f"group {group}"):
        verify(**given)


def test_level_3_the_grade_is_checked_too() -> None:
    with pytest.raises(IntegrityError, match="group level"):
        verify(**arguments(cached(), floor=Grade.CANONICAL))


@pytest.mark.parametrize("part", ["base", "page_bytes", "slot_bytes"])
def test_level_4_slots_that_are_not_aligned(part: str) -> None:
    e = cached()
    given = arguments(e)
    crooked = getattr(e.manager.geometry, part).copy()
    crooked[1] += 64
    e.manager.geometry = replace(e.manager.geometry, **{part: crooked})
    with pytest.raises(IntegrityError, match="byte level"):
        verify(**given)


@pytest.mark.parametrize("spec", specs.ALL, ids=lambda s: s.name)
def test_every_slot_of_every_arena_is_aligned_and_they_do_not_overlap(spec: Any) -> None:
    for kib in (12, 60, 300):
        geometry = engine(spec, kib, max_nodes=4).manager.geometry
        taken: dict[int, int] = {}
        for g in range(len(spec.groups)):
            for slot in range(int(geometry.num_slots[g])):
                at = geometry.slot_offset(g, slot)
                assert at % 256 == 0
                assert at + geometry.slot_bytes[g] <= geometry.arena_bytes
                if geometry.static_split:
                    assert all(end <= at or begin >= at + geometry.slot_bytes[g] for begin, end in taken.items())
                    taken[at] = at + int(geometry.slot_bytes[g])
            every = np.arange(int(geometry.num_slots[g]), dtype=np.int32)
            assert geometry.slot_offsets(g, every).tolist() == [geometry.slot_offset(g, int(s)) for s in every]
            with pytest.raises(IndexError):
                geometry.slot_offset(g, int(geometry.num_slots[g]))
