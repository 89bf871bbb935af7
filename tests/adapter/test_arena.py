"""Arenas run plans exactly, and the two implementations agree byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvloom.adapters.transformers.device import CpuArena, TorchArena, make_arena  # noqa: E402
from kvloom.config import Device  # noqa: E402
from kvloom.errors import InputError  # noqa: E402
from kvloom.manager import Manager  # noqa: E402
from kvloom.plan import CopyPlan  # noqa: E402
from kvloom.spec.from_config import spec_from_config  # noqa: E402
from kvloom.testing.families import tiny_config  # noqa: E402
from kvloom.tiers.memory import HostArena, rows_from  # noqa: E402


def spec_and_geometry(family: str) -> tuple[Any, Any]:
    spec = spec_from_config(tiny_config(family), block_size=16, segment=32)
    return spec, Manager(spec, [Device("2MiB")]).geometry


def plan(*copies: tuple[int, int, int, int]) -> CopyPlan:
    columns = [np.array(c, dtype=np.int32) for c in zip(*copies, strict=True)]
    return CopyPlan(1, *columns)


def test_host_arena_is_aligned_lazy_and_zero() -> None:
    spec, geometry = spec_and_geometry("gpt_oss")
    arena = HostArena(geometry, spec)
    assert arena.buffer.ctypes.data % 4096 == 0
    assert arena.buffer.nbytes == geometry.arena_bytes
    assert not arena.buffer.any()


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v4", "qwen3_next"])
def test_plans_copy_fill_and_pad(family: str) -> None:
    spec, geometry = spec_and_geometry(family)
    host, other = CpuArena(geometry, spec), TorchArena(geometry, spec, torch.device("cpu"))
    noise = torch.randint(0, 256, (geometry.arena_bytes,), dtype=torch.uint8)
    host.bytes.copy_(noise)
    other.bytes.copy_(noise)
    for index, group in enumerate(spec.groups):
        before = noise.numpy().copy()
        size = group.slot_bytes
        at = [geometry.slot_offset(index, s) for s in range(3)]
        half = -1 if group.is_snapshot else group.block_entries // 2
        steps = plan((index, -1, 0, -1), (index, 1, 2, half))
        host.bytes.copy_(noise)
        other.bytes.copy_(noise)
        host.run(steps)
        other.run(steps)
        expected = before.copy()
        expected[at[0] : at[0] + size] = 0
        target = before[at[1] : at[1] + size].copy()
        if half >= 0:
            for tensor, offset in zip(group.tensors, group.tensor_offsets, strict=True):
                for layer in range(len(group.layers)):
                    start = layer * group.layer_stride + offset
                    part = target[start : start + tensor.entry_bytes * group.block_entries]
                    lead = int(np.prod(tensor.shape[: tensor.entry_axis]))
                    part.reshape(lead, group.block_entries, -1)[:, half:] = 0
        expected[at[2] : at[2] + size] = target
        np.testing.assert_array_equal(host.bytes.numpy(), expected)
        assert torch.equal(host.bytes, other.bytes)


def test_snapshots_have_no_rows_to_pad() -> None:
    spec, _ = spec_and_geometry("qwen3_next")
    snapshot = next(g for g in spec.groups if g.is_snapshot)
    with pytest.raises(InputError, match="snapshots"):
        rows_from(snapshot, 0)


def test_typed_bases_share_the_bytes() -> None:
    spec, geometry = spec_and_geometry("gpt_oss")
    arena = make_arena(geometry, spec, torch.device("cpu"))
    arena.base(torch.float32)[3] = 1.0
    assert arena.bytes[12:16].tolist() == [0, 0, 128, 63]
    assert arena.base(torch.bfloat16)[7] == 1.0
