"""Where every state tensor of every layer lives, and how to read the state of any cache layer by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvloom.adapters.transformers.block_table import BlockTable, Gate, Sequence
from kvloom.adapters.transformers.device import Arena
from kvloom.adapters.transformers.host_tensor import HostPagedTensor
from kvloom.adapters.transformers.layers import Parts
from kvloom.adapters.transformers.paged_tensor import PagedTensor, snapshot_view
from kvloom.errors import SpecError
from kvloom.plan import ArenaGeometry
from kvloom.spec.model_spec import ModelSpec, TensorSpec

_NOT_STATE = frozenset({"_sliding_window_tensor"})
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "uint8", "bool",
    )
}  # fmt: skip
"""torch dtypes by the names that specs use."""


def layer_state(layer: Any) -> dict[str, torch.Tensor]:
    """Every state tensor of a cache layer, transformers' own or kvloom's, by name.

    ``keys``, ``values``, ``conv_states.0``, ``buffer_kv.compressor``, ...; what the layer does not have yet is left
    out.  Tensors of kvloom's layers are copies.
    """
    if hasattr(layer, "state") and callable(layer.state):
        state: dict[str, torch.Tensor] = layer.state()
        return state
    found: dict[str, torch.Tensor] = {}
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor) and name not in _NOT_STATE:
            found[name] = value
        elif isinstance(value, dict):
            found.update({f"{name}.{key}": t for key, t in value.items() if isinstance(t, torch.Tensor)})
    return found


def places(spec: ModelSpec) -> dict[int, dict[str, tuple[int, int, TensorSpec]]]:
    """Tensors of every layer by name, as (group, position of the layer in it, tensor); SpecError when one is double."""
    found: dict[int, dict[str, tuple[int, int, TensorSpec]]] = {}
    for index, group in enumerate(spec.groups):
        for position, layer in enumerate(group.layers):
            for tensor in group.tensors:
                tensors = found.setdefault(layer, {})
                if tensor.name in tensors:
                    raise SpecError(f"layer {layer}: tensor {tensor.name!r} is in two groups")
                tensors[tensor.name] = (index, position, tensor)
    return found


class SequenceState:
    """The tensors of one sequence.

    Attributes:
        tables: block tables of the block groups.
    """

    def __init__(self, spec: ModelSpec, geometry: ArenaGeometry, arena: Arena, sequence: Sequence) -> None:
        self._spec = spec
        self._arena = arena
        self._tables: dict[int, BlockTable] = {}
        self._live: dict[int, int] = {}
        for index, group in enumerate(spec.groups):
            if group.is_snapshot:
                self._live[index] = geometry.slot_offset(index, sequence.live_slot(index))
            else:
                self._tables[index] = BlockTable(sequence, index, group, geometry)
        self.tables = tuple(self._tables.values())

    def part(self, group: int, position: int, tensor: TensorSpec) -> PagedTensor | torch.Tensor:
        """One tensor of one layer: paged, or a view of the live slot."""
        base = self._arena.base(TORCH_DTYPES[tensor.dtype])
        if group in self._tables:
            table, scratch = self._tables[group], self._arena.scratch
            if scratch is None:
                return PagedTensor(table, base, position, tensor)
            return HostPagedTensor(table, base, position, tensor, scratch)
        return snapshot_view(base, self._live[group], self._spec.groups[group], position, tensor)

    def parts(self, tensors: dict[str, tuple[int, int, TensorSpec]]) -> Parts:
        """All tensors of one layer, given its entry of :func:`places`."""
        return {name: self.part(*place) for name, place in tensors.items()}

    def set_gate(self, gate: Gate | None) -> None:
        """Let every read wait at ``gate`` from now on; None: no more."""
        for table in self.tables:
            table.gate = gate

    def refresh(self) -> None:
        """Take over new and released blocks."""
        for table in self.tables:
            table.refresh()


def arena_views(
    spec: ModelSpec, geometry: ArenaGeometry, arena: Arena, sequence: Sequence
) -> Iterator[tuple[str, int, str, torch.Tensor]]:
    """Every view that a running sequence holds: (group, layer, tensor, view), block by block."""
    state = SequenceState(spec, geometry, arena, sequence)
    for index, group in enumerate(spec.groups):
        for position, layer in enumerate(group.layers):
            for tensor in group.tensors:
                part = state.part(index, position, tensor)
                if isinstance(part, torch.Tensor):
                    yield group.name, layer, tensor.name, part
                else:
                    for block in range(sequence.first_block(index), sequence.num_blocks(index)):
                        yield group.name, layer, tensor.name, part.block(block)
