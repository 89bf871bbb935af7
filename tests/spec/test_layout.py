"""Slot layout invariants that kernels, adapters and the disk format rely on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.errors import SpecError
from kvloom.spec import GroupSpec, ModelSpec, TensorSpec
from kvloom.spec.model_spec import LAYER_ALIGN, TENSOR_ALIGN
from kvloom.spec.presets import PRESETS, load_preset
from kvloom.types import DTYPE_BYTES, Kind

shapes = st.lists(st.integers(1, 33), min_size=1, max_size=3).map(tuple)


@st.composite
def groups(draw: st.DrawFn) -> GroupSpec:
    snapshot = draw(st.booleans())
    tensors = tuple(
        TensorSpec(f"t{i}", draw(shapes), draw(st.sampled_from(sorted(DTYPE_BYTES))), None if snapshot else 0)
        for i in range(draw(st.integers(1, 4)))
    )
    layers = tuple(sorted(draw(st.sets(st.integers(0, 20), min_size=1, max_size=5))))
    if snapshot:
        return GroupSpec("g", Kind.RECURRENT, layers, tensors)
    ratio = draw(st.integers(1, 8))
    return GroupSpec("g", Kind.COMPRESSED, layers, tensors, ratio=ratio, block_tokens=ratio * draw(st.integers(1, 32)))


@given(groups())
def test_tensors_do_not_overlap_and_are_aligned(group: GroupSpec) -> None:
    end = 0
    for offset, tensor in zip(group.tensor_offsets, group.tensors, strict=True):
        assert offset % TENSOR_ALIGN == 0
        assert offset >= end
        end = offset + tensor.entry_bytes * group.block_entries
    assert end <= group.layer_stride
    assert group.layer_stride % LAYER_ALIGN == 0
    assert group.slot_bytes == group.layer_stride * len(group.layers)
    assert group.slot_bytes >= group.entry_bytes * group.block_entries


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_segments_are_whole_numbers_of_blocks(name: str) -> None:
    for block_size in (16, 48, 128):
        spec = load_preset(name, block_size=block_size)
        assert spec.segment_tokens >= block_size
        for group in spec.groups:
            assert group.layers == tuple(sorted(set(group.layers)))
            if not group.is_snapshot:
                assert spec.segment_tokens % group.block_tokens == 0
                assert group.block_tokens == group.block_entries * group.ratio


def test_bad_specs_are_refused() -> None:
    with pytest.raises(SpecError, match="dtype"):
        TensorSpec("t", (1,), "int3")
    with pytest.raises(SpecError, match="dimension below 1"):
        TensorSpec("t", (0,), "int8" if "int8" in DTYPE_BYTES else "uint8")
    with pytest.raises(SpecError, match="permutation"):
        TensorSpec("t", (1, 2), "uint8", order=(0, 0))
    group = GroupSpec("g", Kind.COMPRESSED, (0,), (TensorSpec("t", (1,), "uint8", 0),), block_tokens=16)
    with pytest.raises(SpecError, match="multiple of the LCM"):
        ModelSpec("m", (group,), block_size=16, segment_tokens=24)
    with pytest.raises(SpecError, match="not unique"):
        ModelSpec("m", (group, group), block_size=16, segment_tokens=16)
    with pytest.raises(SpecError, match="nothing to cache"):
        ModelSpec("m", (), block_size=16, segment_tokens=16)
    spec = ModelSpec("m", (group,), block_size=16, segment_tokens=16)
    assert spec.with_segment(32).segment_tokens == 32
    with pytest.raises(SpecError, match="no group 'x'"):
        spec.group_index("x")
