"""The probe: a few tokens through transformers' own cache, to check the spec against what the model really keeps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import DynamicCache, PreTrainedModel

from kvloom.adapters.transformers.forward import forward_chunk
from kvloom.adapters.transformers.state import TORCH_DTYPES, layer_state, places
from kvloom.errors import SpecError, UnsupportedError
from kvloom.spec.model_spec import GroupSpec, ModelSpec, TensorSpec

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_FEW = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """One state tensor of the running model, without the batch axis.

    Attributes:
        shape, dtype, order: as in a spec; ``order`` is the memory order of the axes.
        is_keys: the tensor has the contents of ``keys`` (DeepSeek-V4: one tensor is key and value).
    """

    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...]
    is_keys: bool


def measure(model: PreTrainedModel, tokens: int) -> dict[int, dict[str, Measured]]:
    """State tensors of every layer, by name: what the model makes of it, after ``tokens`` tokens and one more.

    Raises:
        SpecError: a state tensor whose batch axis is not first or whose memory is not dense.
        UnsupportedError: transformers cannot run the model on its own cache, so nothing could be compared or resumed.
    """
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    ids = torch.arange(1, tokens + 2, device=model.device).remainder(vocabulary).unsqueeze(0)
    cache = DynamicCache(config=model.config)
    try:
        forward_chunk(model, ids[:, :tokens], cache, 0)
        forward_chunk(model, ids[:, tokens:], cache, tokens)
    except Exception as error:  # kvloom has no part in it yet: transformers raises whatever its parts raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedError(
            "transformers itself cannot run this model on a cache, so there is nothing to reuse: "
            f"{type(error).__name__}: {first}"
        ) from error
    found: dict[int, dict[str, Measured]] = {}
    for index, layer in enumerate(cache.layers):
        state = layer_state(layer)
        if state:
            found[index] = {name: _measured(index, name, tensor, state.get("keys")) for name, tensor in state.items()}
    return found


def probe(model: PreTrainedModel, spec: ModelSpec) -> ModelSpec:
    """Check ``spec`` against the model and return it with the dtypes and memory orders that the model has.

    A model can keep single tensors in another dtype than its activations (float32 gates in a bfloat16 model), which
    no config states; everything else must agree.

    Raises:
        SpecError: a layer keeps a tensor that the spec does not have, lacks one that it has, or makes it in
            another shape; layers of one group disagree.
    """
    tokens = max([_FEW, *(g.ratio for g in spec.groups)])
    measured = measure(model, tokens)
    expected = places(spec)
    for layer in sorted(set(measured) | set(expected)):
        _check_names(layer, measured.get(layer, {}), set(expected.get(layer, {})))
    return replace(spec, groups=tuple(_adopt(group, measured, tokens + 1) for group in spec.groups))


def _measured(layer: int, name: str, tensor: torch.Tensor, keys: torch.Tensor | None) -> Measured:
    if tensor.dim() < 2 or tensor.shape[0] != 1:
        shape = list(tensor.shape)
        raise SpecError(f"layer {layer}: state tensor {name!r} is {shape}; the first axis must be the batch, 1")
    if tensor.dtype not in _NAMES:
        raise SpecError(f"layer {layer}: state tensor {name!r} has the dtype {tensor.dtype}, which is not supported")
    strides = tensor.stride()[1:]
    order = tuple(sorted(range(len(strides)), key=lambda i: (-strides[i], i)))
    is_keys = keys is not None and keys.shape == tensor.shape and torch.equal(keys, tensor)
    return Measured(tuple(tensor.shape[1:]), _NAMES[tensor.dtype], order, is_keys)


def _check_names(layer: int, measured: dict[str, Measured], expected: set[str]) -> None:
    extra = {name for name, one in measured.items() if name not in expected and not (name == "values" and one.is_keys)}
    if extra:
        raise SpecError(f"layer {layer}: the model keeps {sorted(extra)}, which the spec does not have")
    missing = expected - set(measured)
    if missing:
        raise SpecError(f"layer {layer}: the spec has {sorted(missing)}, which the model does not keep")


def _adopt(group: GroupSpec, measured: dict[int, dict[str, Measured]], tokens: int) -> GroupSpec:
    tensors = []
    for tensor in group.tensors:
        seen = [(layer, measured[layer][tensor.name]) for layer in group.layers]
        adopted = {_adopt_tensor(group, tensor, layer, one, tokens) for layer, one in seen}
        if len(adopted) > 1:
            found = sorted(map(repr, adopted))
            raise SpecError(f"group {group.name!r}: its layers disagree about {tensor.name!r}: {found}")
        tensors.append(adopted.pop())
    return replace(group, tensors=tuple(tensors))


def _adopt_tensor(group: GroupSpec, tensor: TensorSpec, layer: int, seen: Measured, tokens: int) -> TensorSpec:
    where = f"layer {layer}, group {group.name!r}, tensor {tensor.name!r}"
    if group.is_snapshot:
        rows = tokens % group.ratio if tensor.name.startswith("buffer_") else tensor.shape[0]
        shape = (rows, *tensor.shape[1:])
        order = None if seen.order == tuple(range(len(shape))) or 0 in shape else seen.order
        adopted = replace(tensor, dtype=seen.dtype, order=order)
    else:
        entries = tokens // group.ratio
        if group.window:
            entries = min(entries, group.window - 1)
        axis = tensor.entry_axis or 0
        shape = (*tensor.shape[:axis], entries, *tensor.shape[axis:])
        adopted = replace(tensor, dtype=seen.dtype)
    if seen.shape != shape:
        raise SpecError(f"{where}: the model makes it {list(seen.shape)}, the spec says {list(shape)}")
    return adopted
