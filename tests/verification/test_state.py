"""Comparing state: what counts as equal, and what a difference says."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvloom.spec import spec_from_config  # noqa: E402
from kvloom.testing.families import random_model, tiny_config  # noqa: E402
from kvloom.types import Kind  # noqa: E402
from kvloom.verification.cold import canonical_chunks, run_cold  # noqa: E402
from kvloom.verification.state import compare_state, state_names, tensor_of  # noqa: E402

AT = 99


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: Any) -> str:
    return str(request.param)


def cold(family: str, dtype: str) -> tuple[Any, Any]:
    model = random_model(tiny_config(family), 0, dtype)
    ids = torch.randint(3, 320, (1, AT + 1), generator=torch.Generator().manual_seed(1))
    chunks = [c for c in canonical_chunks(AT + 1, 32) if c[1] <= AT]
    cache = run_cold(model, ids, chunks, keep_caches=[AT]).caches[AT]
    return spec_from_config(model.config, block_size=32, dtype=dtype), cache


def test_equal_caches(dtype: str) -> None:
    for family in ("deepseek_v4", "qwen3_next", "llama4", "glm_moe_dsa", "gemma4"):
        spec, cache = cold(family, dtype)
        assert compare_state(spec, cache, copy.deepcopy(cache), AT) == []


def test_one_bit(dtype: str) -> None:
    spec, cache = cold("gpt_oss", dtype)
    warm = copy.deepcopy(cache)
    bits = {"float32": torch.int32, "bfloat16": torch.int16}[dtype]
    tensor_of(warm.layers[2], "values").view(bits)[0, 1, 5, 3] ^= 1
    (found,) = compare_state(spec, cache, warm, AT)
    assert (found.kind, found.group, found.layer, found.tensor) == (Kind.WINDOW, "window.40", 2, "values")
    assert (found.what, found.size) == ("bytes", 1)
    assert found.position == AT - 39 + 5
    assert 0 < found.max_abs_diff < 0.1


def test_zero_signs_and_nan_are_bits(dtype: str) -> None:
    spec, cache = cold("llama", dtype)
    tensor_of(cache.layers[0], "keys")[0, 0, 7, 0] = float("nan")
    tensor_of(cache.layers[0], "keys")[0, 0, 8, 0] = 0.0
    warm = copy.deepcopy(cache)
    assert compare_state(spec, cache, warm, AT) == []
    tensor_of(warm.layers[0], "keys")[0, 0, 8, 0] = -0.0
    (found,) = compare_state(spec, cache, warm, AT)
    assert (found.position, found.max_abs_diff) == (8, 0.0)


def test_strides_shape_missing_unknown() -> None:
    spec, cache = cold("qwen3_next", "float32")
    warm = copy.deepcopy(cache)
    state = warm.layers[0].recurrent_states
    state[0] = state[0].transpose(2, 3).contiguous().transpose(2, 3)
    warm.layers[1].keys = warm.layers[1].keys[:, :, 1:]
    warm.layers[2].conv_states[0] = None
    cache.layers[3].memory = torch.ones(1, 3)
    found = {(d.layer, d.tensor): (d.what, d.position) for d in compare_state(spec, cache, warm, AT)}
    assert found == {
        (0, "recurrent_states.0"): ("strides", AT),
        (1, "keys"): ("shape", AT),
        (2, "conv_states.0"): ("missing", AT),
        (3, "memory"): ("unknown", AT),
    }


def test_rows_of_a_finished_chunk_do_not_count() -> None:
    spec, cache = cold("llama4", "float32")
    warm = copy.deepcopy(cache)
    alive = AT - AT // 48 * 48
    rows = warm.layers[0].keys.shape[2]
    warm.layers[0].keys[:, :, : rows - alive] = 0
    assert compare_state(spec, cache, warm, AT) == []
    warm.layers[0].keys[0, 0, rows - alive, 0] += 1
    (found,) = compare_state(spec, cache, warm, AT)
    assert (found.kind, found.position) == (Kind.WINDOW, AT // 48 * 48)


def test_compressed_positions_are_tokens() -> None:
    spec, cache = cold("deepseek_v4", "float32")
    warm = copy.deepcopy(cache)
    warm.layers[1].compressed_kv["indexer"][0, 9, 0] += 1
    warm.layers[2].buffer_kv["compressor"][0, 0, 0] += 1
    found = compare_state(spec, cache, warm, AT)
    assert [(d.kind, d.group, d.position) for d in found] == [
        (Kind.INDEXER, "csa.indexer", 36),
        (Kind.TAIL, "tail.hca", AT),
    ]


def test_aliases_are_named_once() -> None:
    _, cache = cold("deepseek_v4", "float32")
    assert "values" not in set(state_names(cache.layers[1]))
    assert "_sliding_window_tensor" not in set(state_names(cache.layers[1]))
