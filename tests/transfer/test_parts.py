"""Slots cut into runs of layers: what fits, what is whole, what is read when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvloom.plan import TransferPlan
from kvloom.spec.model_spec import GroupSpec, ModelSpec, TensorSpec
from kvloom.spec.presets import PRESETS, load_preset
from kvloom.tiers.values import OBJECT, Places
from kvloom.transfer import parts as parts_module
from kvloom.transfer import stages as stages_module
from kvloom.transfer.forms import Forms
from kvloom.transfer.offers import make_offer, objects_of, whole_objects
from kvloom.transfer.options import ColdForm, Restoring
from kvloom.transfer.parts import MOST, SMALLEST, Parts
from kvloom.transfer.stages import stages_of
from kvloom.types import Grade, Kind, PayloadForm

LAYOUT = b"\7" * 32


def spec_of(layers: int, stride: int, **options: Any) -> ModelSpec:
    """Full attention in the even layers, a window in the odd ones; ``stride`` bytes of a layer in a slot."""
    keys = TensorSpec("keys", (1, stride // 16), "uint8", entry_axis=1)
    full = GroupSpec("full", Kind.COMPRESSED, tuple(range(0, layers, 2)), (keys,), block_tokens=16)
    window = replace(full, name="window", kind=Kind.WINDOW, layers=tuple(range(1, layers, 2)), window=40)
    state = GroupSpec("state", Kind.RECURRENT, tuple(range(layers)), (TensorSpec("s", (stride,), "uint8"),))
    return ModelSpec("made", (full, window, state), 16, 32, **options)


def places_of(rows: list[tuple[int, int, int, int, int]]) -> Places:
    """From (row, group, column, grade, length), as a tier has them."""
    entries = np.zeros(len(rows), dtype=OBJECT)
    for i, (_, group, column, grade, length) in enumerate(rows):
        entries[i] = (group, column, 0, grade, length)
    found = np.array([row for row, *_ in rows], np.int64)
    return Places(LAYOUT, np.zeros((len(rows), 32), np.uint8), entries, found)


@pytest.mark.parametrize(
    ("layers", "stride", "count"),
    [(8, 4096, 1), (8, SMALLEST, 4), (8, SMALLEST // 2, 2), (8, SMALLEST // 2 - 256, 1), (80, SMALLEST, MOST)],
)
def test_parts_are_whole_layers_and_large_enough(layers: int, stride: int, count: int) -> None:
    spec = spec_of(layers, stride)
    parts = Parts.of(spec)
    assert parts.count.tolist() == [count, count, 1], "snapshots are never cut"
    for g, group in enumerate(spec.groups):
        at = 0
        for p in range(int(parts.count[g])):
            assert parts.begin[g, p] == at
            at += int(parts.size[g, p])
            assert parts.size[g, p] >= min(SMALLEST, group.slot_bytes)
            assert parts.size[g, p] % group.layer_stride == 0
        assert at == group.slot_bytes
        for n, layer in enumerate(group.layers):
            p = int(parts.of_layer[g, n])
            assert parts.begin[g, p] <= n * group.layer_stride < parts.begin[g, p] + parts.size[g, p]
            assert parts.first_layer[g, p] <= layer


def test_another_rule_is_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = Parts.of(spec_of(8, 4096)), Parts.of(spec_of(16, SMALLEST))
    assert small.layout(LAYOUT) == LAYOUT, "where nothing is cut nothing changes"
    names = {large.layout(LAYOUT), large.layout(b"\1" * 32)}
    for name, value in (("SMALLEST", 2 * SMALLEST), ("MOST", 4)):
        with monkeypatch.context() as patch:
            patch.setattr(parts_module, name, value)
            names.add(Parts.of(spec_of(16, SMALLEST)).layout(LAYOUT))
    assert len(names) == 4
    assert {len(name) for name in names} == {32}


def test_what_fits_is_a_part_of_the_model() -> None:
    spec = spec_of(6, SMALLEST)  # three parts of one layer each
    parts = Parts.of(spec)
    forms = Forms("disk", spec.groups, ColdForm.NONE, parts)
    good = [(0, 0, SMALLEST), (0, 5, SMALLEST), (1, 3, SMALLEST), (2, 0, 6 * SMALLEST)]
    short = [(0, 0, 3 * SMALLEST), (2, 0, SMALLEST)]
    bad = [(0, 6, SMALLEST), (3, 0, SMALLEST), (2, 1, 6 * SMALLEST), (2**32 - 1, 2**32 - 1, 1)]
    entries = places_of([(0, g, c, 2, n) for g, c, n in (*good, *short, *bad)]).entries
    known = parts.known(entries["group"], entries["column"])
    assert known.tolist() == [True] * 6 + [False] * 4
    assert forms.fits(entries[known]).tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize("form", [PayloadForm.LOSSLESS, PayloadForm.FP8])
def test_every_part_has_a_payload_of_its_own(form: PayloadForm) -> None:
    keys = TensorSpec("keys", (1, SMALLEST // 64), "float32", entry_axis=1)
    spec = ModelSpec("made", (GroupSpec("full", Kind.COMPRESSED, tuple(range(5)), (keys,), block_tokens=16),), 16, 32)
    parts, group = Parts.of(spec), spec.groups[0]
    forms = Forms("disk", spec.groups, ColdForm.FP8, parts)
    assert parts.count[0] == 5
    slot = np.random.default_rng(0).integers(0, 3, group.slot_bytes // 4).astype(np.float32).view(np.uint8)

    def reading(p: int) -> Any:
        def read(into: memoryview) -> None:
            begin = int(parts.begin[0, p])
            np.frombuffer(into, np.uint8)[:] = slot[begin : begin + len(into)]

        return read

    made = forms.make((1, 0, 1), Grade.CANONICAL, form, [reading(p) for p in range(5)])
    assert [(item.node, item.column, item.form) for item in made] == [(1, 5 + p, form) for p in range(5)]
    assert {item.grade for item in made} == {Grade.APPROXIMATE if form is PayloadForm.FP8 else Grade.CANONICAL}
    back = np.zeros_like(slot)
    for p, item in enumerate(made):
        begin, size = int(parts.begin[0, p]), int(parts.size[0, p])
        assert forms.decode(form, (0, p), np.asarray(item.payload), back[begin : begin + size])
    assert (back == slot).all(), "small whole numbers are exact in both forms"
    slot.view(np.float32)[-1] = np.inf  # one part has no fp8 form: then none has
    again = forms.make((1, 0, 1), Grade.CANONICAL, PayloadForm.FP8, [reading(p) for p in range(5)])
    assert {(item.form, item.grade) for item in again} == {(PayloadForm.RAW, Grade.CANONICAL)}


def test_an_object_is_whole_with_all_parts_at_one_grade() -> None:
    parts = Parts.of(spec_of(6, SMALLEST))
    size = SMALLEST
    whole = [(0, 0, p, 2, size) for p in (2, 0, 1)]
    lacking = [(0, 0, p, 2, size) for p in (3, 5)]
    mixed = [(1, 0, 0, 2, size), (1, 0, 1, 1, size), (1, 0, 2, 2, size)]
    twice = [(1, 1, 3, 1, size), (1, 1, 3, 1, size), (1, 1, 5, 1, size)]
    snapshot = [(1, 2, 0, 1, 6 * size)]
    rows = [*whole, *lacking, *mixed, *twice, *snapshot]
    draw = np.random.default_rng(0)
    for _ in range(20):
        places = places_of([rows[i] for i in draw.permutation(len(rows))])
        found = whole_objects(places, parts)
        objects = sorted(
            zip(*(getattr(found.stored, n).tolist() for n in ("row", "group", "column", "grade")), strict=True)
        )
        assert objects == [(0, 0, 0, 2), (1, 2, 0, 1)]
        first = int(found.first[found.stored.group.tolist().index(0)])
        assert found.places.entries["column"][first : first + 3].tolist() == [0, 1, 2]
        assert len(objects_of(places, parts).row) == 2
    offer = make_offer([places_of(lacking), places_of(rows)], Grade.CANONICAL, parts)
    assert (offer.stored.row.tolist(), offer.stored.group.tolist(), offer.tier.tolist()) == ([0], [0], [1])
    assert not len(make_offer([None, places_of([])], Grade.FAITHFUL, parts))


def plan_of(items: list[tuple[int, int, int]], position: int) -> TransferPlan:
    row, group, column = (np.array(each, np.int32) for each in zip(*items, strict=True))
    n = len(items)
    return TransferPlan(
        1,
        position,
        row,
        group,
        column,
        np.full(n, 2, np.int32),
        np.arange(n, dtype=np.int32),
        np.empty((0, 4), np.int32),
    )


def staged(spec: ModelSpec, plan: TransferPlan, first: list[bool], restoring: Restoring) -> Any:
    parts = Parts.of(spec)
    count = parts.count[plan.group]
    item = np.repeat(np.arange(len(plan)), count)
    part = np.concatenate([np.arange(c) for c in count])
    return item, part, stages_of(plan, item, part, np.array(first), parts, restoring)


def test_stages_go_with_the_layers_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(6, SMALLEST)
    plan = plan_of([(0, 0, 0), (0, 1, 1), (0, 2, 0)], 32)
    item, part, stages = staged(spec, plan, [False, False, True], Restoring.LAYERS)
    assert stages.count == 7
    order = {(int(i), int(p)): int(s) for i, p, s in zip(item, part, stages.of_record, strict=True)}
    assert order == {(2, 0): 0, (0, 0): 1, (1, 0): 2, (0, 1): 3, (1, 1): 4, (0, 2): 5, (1, 2): 6}
    assert stages.of_object.tolist() == [5, 6, 0]
    assert stages.of_layer[0][:3] == [1, 3, 5]
    assert stages.of_layer[1][:3] == [2, 4, 6]
    assert staged(spec, plan, [False, False, True], Restoring.WHOLE)[2].count == 1
    assert staged(spec, plan, [False, False, True], Restoring.AUTO)[2].count == 1, "too little to pay"
    monkeypatch.setattr(stages_module, "SMALLEST", 2 * SMALLEST)
    assert staged(spec, plan, [False, False, True], Restoring.AUTO)[2].of_record.tolist() == [1, 2, 3, 1, 2, 3, 0]
    assert staged(spec, plan, [True, True, True], Restoring.LAYERS)[2].count == 1


def test_what_is_not_loaded_is_not_waited_for() -> None:
    spec = spec_of(6, SMALLEST)
    _, _, stages = staged(spec, plan_of([(0, 0, 0)], 32), [False], Restoring.LAYERS)
    assert stages.of_layer[1][:3] == [-1, -1, -1]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_real_models_have_parts_that_add_up(name: str) -> None:
    spec = load_preset(name)
    parts = Parts.of(spec)
    for g, group in enumerate(spec.groups):
        assert int(parts.size[g].sum()) == group.slot_bytes
        assert 1 <= parts.count[g] <= MOST
