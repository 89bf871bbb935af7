"""Compare the cached state that a warm cache shows with a cold cache, tensor by tensor and bit by bit.

Logits alone are not enough: a one-ulp change of the state can stay invisible in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvloom.spec.model_spec import GroupSpec, ModelSpec, TensorSpec
from kvloom.types import Kind
from kvloom.verification.report import Difference

_NOT_STATE = frozenset({"_sliding_window_tensor"})


def tensor_of(layer: Any, name: str) -> torch.Tensor | None:
    """State tensor ``name`` (as in ``TensorSpec.name``) of a cache layer; None when it has none yet."""
    attribute, _, key = name.partition(".")
    value = getattr(layer, attribute, None)
    if key and value is not None:
        value = value.get(int(key) if key.isdigit() else key)
    return value if isinstance(value, torch.Tensor) else None


def state_names(layer: Any) -> Iterator[str]:
    """Names of every state tensor of one of transformers' cache layers, aliases of the same object once."""
    seen: set[int] = set()
    for attribute, value in vars(layer).items():
        if attribute in _NOT_STATE:
            continue
        items = value.items() if isinstance(value, dict) else [("", value)]
        for key, tensor in items:
            if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{attribute}.{key}" if key != "" else attribute


def compare_state(spec: ModelSpec, cold: Any, warm: Any, position: int) -> list[Difference]:
    """Every state tensor of the cold cache that the warm cache does not show bit for bit at ``position``.

    Only live rows count: a chunked window may show zeros for the rows of the chunk that just ended.
    Both caches have seen exactly ``position`` tokens.  At most one difference per tensor is returned,
    ordered by position.
    """
    found: list[Difference] = []
    if position == 0:  # what lies in a slot before the first token is never read
        return found
    for index, layer in enumerate(cold.layers):
        known = {t.name for g in spec.groups if index in g.layers for t in g.tensors}
        for name in state_names(layer):
            state, shown = tensor_of(layer, name), tensor_of(warm.layers[index], name)
            # A tensor without a group of its own may be another one under a second name (V4's values are its keys).
            if name not in known and state is not None and state.numel() and not _same_bits(state, shown):
                found.append(Difference(None, "", index, name, position, "unknown"))
    for group in spec.groups:
        for index in group.layers:
            for tensor in group.tensors:
                difference = _compare_tensor(group, tensor, index, cold.layers[index], warm.layers[index], position)
                if difference is not None:
                    found.append(difference)
    return sorted(found, key=lambda d: (d.position, d.layer))


def _compare_tensor(
    group: GroupSpec, tensor: TensorSpec, index: int, cold: Any, warm: Any, position: int
) -> Difference | None:
    """The difference of one tensor of one layer, or None."""
    want, have = tensor_of(cold, tensor.name), tensor_of(warm, tensor.name)

    def differs(what: str, at: int = position, size: int = 0, largest: float = 0.0) -> Difference:
        return Difference(group.kind, group.name, index, tensor.name, at, what, size, largest)

    if want is None or want.numel() == 0:
        return None if have is None or have.numel() == 0 else differs("shape")
    if have is None:
        return differs("missing")
    if want.shape != have.shape:
        return differs("shape")
    if want.dtype != have.dtype:
        return differs("dtype")
    if _dimension_order(want) != _dimension_order(have):
        return differs("strides")
    first = 0
    if not group.is_snapshot:
        axis = 1 + (tensor.entry_axis or 0)
        rows = want.shape[axis]
        end = position // group.ratio
        dead = max(0, _first_live(group, position) - (end - rows))
        first = end - rows + dead
        want, have = (t.narrow(axis, dead, rows - dead).movedim(axis, 0) for t in (want, have))
    unequal = _bits(want) != _bits(have)
    if not bool(unequal.any()):
        return None
    off = (want.double() - have.double()).abs().nan_to_num(nan=float("inf"))
    largest = float(off[unequal].max())
    at = position
    if not group.is_snapshot:
        at = (first + int(unequal.flatten(1).any(dim=1).int().argmax())) * group.ratio
    return differs("bytes", at, int(unequal.sum()), largest)


def _first_live(group: GroupSpec, position: int) -> int:
    """First entry that a resume at ``position`` may still read."""
    if group.kind is not Kind.WINDOW:
        return 0
    return position // group.window * group.window if group.chunked else max(0, position - group.window + 1)


def _dimension_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions longer than 1 from the outermost to the innermost in memory."""
    strides = tensor.stride()
    dims = [d for d in range(tensor.dim()) if tensor.shape[d] > 1]
    return tuple(sorted(dims, key=lambda d: (-strides[d], d)))


def _same_bits(want: torch.Tensor, have: torch.Tensor | None) -> bool:
    if have is None or want.shape != have.shape or want.dtype != have.dtype:
        return False
    return torch.equal(_bits(want), _bits(have))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns as integers, so that NaN equals itself and -0.0 is not 0.0."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.element_size()])
