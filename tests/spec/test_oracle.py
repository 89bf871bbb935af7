"""The spec against the real thing: every state tensor that transformers keeps is claimed by exactly one group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.spec.tiny_configs import NAMES, tiny  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from kvloom.spec import ModelSpec, spec_from_config  # noqa: E402
from kvloom.spec.model_spec import GroupSpec, TensorSpec  # noqa: E402
from kvloom.testing.families import random_model  # noqa: E402
from kvloom.types import Kind  # noqa: E402

LENGTH = 131  # a multiple of every LCM here, and 3
FIRST_CHUNKS = (1, 3, LENGTH)
"""Lengths of the first forward: the strides of a state must not depend on it."""


def state_tensors(layer: Any) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of everything a cache layer keeps; constants and uninitialised states left out."""
    for name, value in vars(layer).items():
        if name.startswith("_"):
            continue
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", t) for key, t in value.items() if isinstance(t, torch.Tensor))


def cold_cache(model: Any, chunks: list[int]) -> Any:
    """Transformers' own cache after these chunks of random tokens."""
    cache = DynamicCache(config=model.config)
    ids = torch.randint(3, 90, (1, sum(chunks)), generator=torch.Generator().manual_seed(1))
    at = 0
    with torch.no_grad():
        for chunk in chunks:
            model(ids[:, at : at + chunk], past_key_values=cache, use_cache=True)
            at += chunk
    return cache


def claims(spec: ModelSpec) -> Counter[tuple[int, str]]:
    return Counter((layer, t.name) for g in spec.groups for layer in g.layers for t in g.tensors)


def is_alias(layer: Any, name: str) -> bool:
    """V4 layers keep the value beside the key that it equals."""
    return name == "values" and torch.equal(layer.keys, layer.values)


def check_tensor(group: GroupSpec, spec: TensorSpec, tensor: Any, length: int) -> None:
    assert str(tensor.dtype) == f"torch.{spec.dtype}"
    shape = list(tensor.shape[1:])
    if group.is_snapshot:
        if group.needed_unless_multiple_of:  # pending rows: as many as there are
            assert shape[0] == length % group.needed_unless_multiple_of
            assert shape[1:] == list(spec.shape[1:])
        else:
            assert shape == list(spec.shape)
        order = spec.order or tuple(range(len(shape)))
        strides = [tensor.stride()[1 + axis] for axis in order if shape[axis] > 1]
        assert strides == sorted(strides, reverse=True), "memory order differs"
        return
    assert spec.entry_axis is not None
    entries = shape.pop(spec.entry_axis)
    assert shape == list(spec.shape)
    expected = length // group.ratio
    assert entries == (min(expected, group.window - 1) if group.kind is Kind.WINDOW else expected)
    assert tensor.stride()[-1] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", NAMES)
def test_every_tensor_is_claimed_once_and_is_as_described(family: str, dtype: str) -> None:
    model = random_model(tiny(family), dtype=dtype)
    spec = spec_from_config(model.config, dtype=dtype)
    assert set(claims(spec).values()) == {1}
    assert LENGTH % spec.lcm_tokens == 3
    by_claim = {(layer, t.name): (g, t) for g in spec.groups for layer in g.layers for t in g.tensors}
    for first in FIRST_CHUNKS:
        cache = cold_cache(model, [chunk for chunk in (first, LENGTH - first) if chunk])
        seen = set()
        for index, layer in enumerate(cache.layers):
            for name, tensor in state_tensors(layer):
                if (index, name) not in by_claim and is_alias(layer, name):
                    assert spec.name == "deepseek_v4"
                    continue
                assert (index, name) in by_claim, f"layer {index} keeps {name}, and no group claims it"
                check_tensor(*by_claim[index, name], tensor, LENGTH)
                seen.add((index, name))
        assert seen == set(by_claim), "a group claims what transformers does not keep"


def test_a_wrong_spec_is_noticed() -> None:
    """The oracle can fail: a full-attention spec of a sliding model does not pass."""
    model = random_model(tiny("mistral"))
    spec = spec_from_config({**model.config.to_dict(), "sliding_window": None}, dtype="float32")
    cache = cold_cache(model, [LENGTH])
    with pytest.raises(AssertionError):
        check_tensor(spec.groups[0], spec.groups[0].tensors[0], cache.layers[0].keys, LENGTH)


def test_v4_loaded_without_float32_parts_is_described_by_tensor_dtypes() -> None:
    """``from_config(dtype=bfloat16)`` keeps no bias in float32, unlike ``from_pretrained``."""
    from transformers import AutoModelForCausalLM

    config = tiny("deepseek_v4")
    gates = {"overlap_gate.compressor": "bfloat16", "overlap_gate.indexer": "bfloat16"}
    spec = spec_from_config(config, dtype="bfloat16", tensor_dtypes=gates)
    cache = cold_cache(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval(), [19])
    group = spec.groups[spec.group_index("tail.overlap")]
    for tensor in group.tensors:
        owner, key = tensor.name.split(".")
        assert str(getattr(cache.layers[group.layers[0]], owner)[key].dtype) == f"torch.{tensor.dtype}"
