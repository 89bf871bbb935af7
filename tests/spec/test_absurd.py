"""Numbers that no model has: an error that names them, or a report; never a crash, never minutes."""

from __future__ import annotations

import pytest

from kvloom.errors import ConfigError, SpecError
from kvloom.spec.from_config import spec_from_config
from kvloom.spec.layers import V4_CSA, V4_HCA
from kvloom.spec.presets import PRESETS
from kvloom.spec.report import spec_report

ABSURD = (10**12, 10**30, 1e12, 1e30, float("inf"), float("nan"), 2**31, 10**6)
NAMES = ("num_hidden_layers", "head_dim", "num_key_value_heads", "hidden_size", "num_attention_heads", "vocab_size")
NAMES += ("max_position_embeddings", "sliding_window", "attention_chunk_size", "kv_lora_rank", "index_head_dim")
NAMES += ("linear_key_head_dim", "linear_conv_kernel_dim", "full_attention_interval", "compress_ratios")


@pytest.mark.parametrize(
    "preset", ["gpt-oss-20b", "deepseek-v4-flash", "deepseek-v3.2", "qwen3-next-80b", "llama-4-scout"]
)
def test_absurd_numbers_are_refused_or_reported(preset: str) -> None:
    said: list[str] = []
    for name in NAMES:
        for value in ABSURD:
            try:
                report = spec_report(spec_from_config({**PRESETS[preset].config, name: value}))
            except SpecError as error:
                said.append(str(error))
            else:
                assert 0 < report["page"]["bytes"] < 1 << 43
    assert said
    assert not any("\n" in message for message in said)


def test_limits_are_named() -> None:
    config = dict(PRESETS["mistral-7b"].config)
    with pytest.raises(
        SpecError, match="'head_dim' must be at most 2147483647, it is 1000000000000; correct the config"
    ):
        spec_from_config({**config, "head_dim": 10**12})
    with pytest.raises(SpecError, match="more than a terabyte; correct the sizes"):
        spec_from_config({**config, "head_dim": 10**9})
    with pytest.raises(ConfigError, match="block_size: must be from 1 to 65536 tokens"):
        spec_from_config(config, block_size=10**12)
    with pytest.raises(ConfigError, match=r"segment: .* use a smaller multiple of 128"):
        spec_from_config(config, segment=128 * 10**12)
    v4 = {**PRESETS["deepseek-v4-flash"].config, "compress_rates": {V4_CSA: 9973, V4_HCA: 9967}}
    with pytest.raises(ConfigError, match="LCM of all blocks"):
        spec_from_config(v4)
