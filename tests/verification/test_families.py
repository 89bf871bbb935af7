"""The tiny models: every family, every layer kind, every parameter drawn, the dtypes of a loaded model."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

from kvloom.errors import InputError  # noqa: E402
from kvloom.testing.families import FAMILIES, REAL_V4_RATIOS, random_model, tiny_config  # noqa: E402

LAYERS = {
    "llama": {"DynamicLayer"},
    "mistral": {"DynamicSlidingWindowLayer"},
    "gemma4": {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"},
    "glm_moe_dsa": {"DynamicIndexedLayer"},
    "deepseek_v4": {"DynamicSlidingWindowLayer", "DeepseekV4CSACache", "DeepseekV4HCACache"},
    "qwen3_next": {"LinearAttentionLayer", "DynamicLayer"},
    "lfm3": {"LinearAttentionLayer", "DynamicSlidingWindowLayer", "DynamicLayer"},
    "falcon_h1": {"LinearAttentionAndFullAttentionLayer"},
}


def test_the_families_of_the_documentation() -> None:
    assert len(FAMILIES) == len(set(FAMILIES)) == 22


@pytest.mark.parametrize("family", LAYERS)
def test_layer_kinds(family: str) -> None:
    layers = DynamicCache(config=tiny_config(family)).layers
    assert {type(layer).__name__ for layer in layers} == LAYERS[family]


def test_overrides() -> None:
    assert tiny_config("deepseek_v4", compress_rates=REAL_V4_RATIOS).compress_rates == REAL_V4_RATIOS
    assert tiny_config("gemma3", sliding_window=32).sliding_window == 32
    with pytest.raises(InputError, match="unknown family 'gpt2'"):
        tiny_config("gpt2")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_drawn_and_only_from_the_seed(family: str) -> None:
    torch.manual_seed(1)
    one = random_model(tiny_config(family), 3)
    torch.manual_seed(2)
    two = random_model(tiny_config(family), 3)
    other = dict(random_model(tiny_config(family), 4).named_parameters())
    for (name, left), right in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(left, right), name
        assert bool(left.isfinite().all()), name
        assert left.numel() < 4 or float(left.detach().std()) > 0, name
        assert not torch.equal(left, other[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_what_a_loaded_model_has(family: str, tmp_path: Path) -> None:
    logging.disable(logging.WARNING)
    random_model(tiny_config(family), 0, "float32").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    drawn = random_model(tiny_config(family), 0, "bfloat16").state_dict()
    logging.disable(logging.NOTSET)
    assert drawn.keys() == loaded.keys()
    for name, value in drawn.items():
        assert value.dtype == loaded[name].dtype, name
        assert torch.equal(value, loaded[name]), name
