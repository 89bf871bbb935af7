"""Reading configs: every way gives the same spec, and what is not understood is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.spec.tiny_configs import NAMES, tiny

from kvloom.adapters.auto_config import auto_config
from kvloom.errors import ConfigError, InputError, KVLoomError, SpecError
from kvloom.spec import ModelSpec, spec_from_config
from kvloom.spec.families import FAMILIES
from kvloom.spec.presets import resolve
from kvloom.types import Kind

transformers = pytest.importorskip("transformers")
# Families of which a plain dict is understood only if it states everything.
NO_DEFAULTS = {"deepseek_v2", "glm4_moe_lite", "minicpm3", "bamba", "nemotron_h", "zamba2", "lfm2_moe"} | {
    "smollm3",
    "gpt_neox",
}


def geometry(spec: ModelSpec) -> ModelSpec:
    """The spec without its identity, which records the config as it was given."""
    return replace(spec, identity=())


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
}


@pytest.mark.parametrize("name", sorted(set(NAMES) - NO_DEFAULTS))
def test_json_gives_the_same_spec_as_the_object(name: str, tmp_path: Path) -> None:
    config = tiny(name)
    expected = geometry(spec_from_config(config))
    config.save_pretrained(tmp_path)  # holds only what differs from the defaults
    assert geometry(spec_from_config(tmp_path)) == expected
    assert geometry(spec_from_config(str(tmp_path / "config.json"))) == expected
    assert geometry(spec_from_config(json.loads(config.to_json_string(use_diff=False)))) == expected
    assert geometry(spec_from_config(config.to_dict())) == expected


@pytest.mark.parametrize("name", sorted(n for n, f in FAMILIES.items() if f.defaults))
def test_defaults_are_those_of_transformers(name: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert geometry(spec_from_config({"model_type": name})) == geometry(spec_from_config(CONFIG_MAPPING[name]()))


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "llama4", "qwen3_5", "gemma3n", "mistral3"])
def test_composite_configs_are_described_by_their_text_part(name: str, tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[name]()
    expected = geometry(spec_from_config(config))
    assert expected == geometry(spec_from_config(config.get_text_config(decoder=True)))
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    assert geometry(spec_from_config(tmp_path)) == expected


def test_layers_that_reuse_kv_are_in_no_group() -> None:
    spec = spec_from_config(tiny("gemma4"))
    held = {layer for group in spec.groups for layer in group.layers}
    assert held == {0, 1, 2, 3}


def test_full_layers_of_different_geometry_are_different_groups() -> None:
    config = {**LLAMA, "per_layer_config": {"1": {"head_dim": 20}}}
    spec = spec_from_config(config)
    assert [(g.name, g.layers, g.tensors[0].shape) for g in spec.groups] == [
        ("full", (0,), (2, 8)),
        ("full.2", (1,), (2, 20)),
    ]


def test_windows_of_different_length_are_different_groups() -> None:
    config = {
        **LLAMA,
        "model_type": "unheard_of",
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 24,
        "per_layer_config": {1: {"sliding_window": 40}},
    }
    spec = spec_from_config(config)
    assert [(g.name, g.layers, g.window) for g in spec.groups] == [("window.24", (0,), 24), ("window.40", (1,), 40)]
    assert spec.exact_replay_tokens == 64


def test_deepseek_v4_groups() -> None:
    spec = spec_from_config(tiny("deepseek_v4"), block_size=32)
    by_name = {g.name: g for g in spec.groups}
    assert {n: g.kind for n, g in by_name.items()} == {
        "window.32": Kind.WINDOW,
        "csa": Kind.COMPRESSED,
        "hca": Kind.COMPRESSED,
        "csa.indexer": Kind.INDEXER,
        "tail.overlap": Kind.TAIL,
        "tail.csa": Kind.TAIL,
        "tail.hca": Kind.TAIL,
    }
    assert by_name["window.32"].layers == (0, 1, 2, 3)
    assert [t.name for t in by_name["window.32"].tensors] == ["keys"]
    assert (by_name["csa"].ratio, by_name["csa"].block_entries) == (4, 8)
    assert by_name["tail.overlap"].first_needed == 4
    assert by_name["tail.overlap"].needed_unless_multiple_of == 0
    assert (by_name["tail.csa"].needed_unless_multiple_of, by_name["tail.hca"].needed_unless_multiple_of) == (4, 16)
    assert by_name["tail.csa"].tensors[0].shape == (4, 32)
    assert by_name["tail.hca"].tensors[0].shape == (16, 16)


def test_v4_ratio_larger_than_the_block_still_holds_one_entry() -> None:
    config = {"model_type": "deepseek_v4", "compress_rates": {"heavily_compressed_attention": 96}}
    spec = spec_from_config(config, block_size=16)
    group = spec.groups[spec.group_index("hca")]
    assert (group.block_tokens, group.block_entries, spec.lcm_tokens, spec.segment_tokens) == (96, 1, 96, 96)


def test_v4_legacy_keys() -> None:
    config = {"model_type": "deepseek_v4", "num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 4]}
    spec = spec_from_config({**config, "compress_rate_hca": 64})
    assert spec.groups[spec.group_index("csa")].layers == (1,)
    assert spec.groups[spec.group_index("hca")].ratio == 64
    with pytest.raises(SpecError, match="layer 1 has compression ratio 7"):
        spec_from_config({**config, "compress_ratios": [0, 7, 128]})


def test_kimi_layers_of_the_checkpoint_are_one_based() -> None:
    config = {
        "model_type": "kimi_linear",
        "num_hidden_layers": 4,
        "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3, 4], "head_dim": 8, "num_heads": 3},
    }
    spec = spec_from_config(config)
    assert {g.name: g.layers for g in spec.groups} == {"full": (1,), "recurrent": (0, 2, 3)}
    assert spec.groups[1].tensors[0].shape == (72, 4)


def test_the_class_method_is_the_same_function() -> None:
    assert ModelSpec.from_config(LLAMA, block_size=32) == spec_from_config(LLAMA, block_size=32)


def test_options() -> None:
    config = tiny("qwen3_next")
    spec = spec_from_config(config, block_size=32, segment=64, snapshot_interval=192, dtype="bfloat16", name="mine")
    assert (spec.name, spec.block_size, spec.segment_tokens, spec.snapshot_interval) == ("mine", 32, 64, 192)
    tensors = {t.name: t.dtype for g in spec.groups for t in g.tensors}
    assert tensors == {
        "keys": "bfloat16",
        "values": "bfloat16",
        "conv_states.0": "bfloat16",
        "recurrent_states.0": "float32",
    }
    for wrong, message in (
        ({"segment": 100}, "segment: 100"),
        ({"segment": 0}, "segment: 0"),
        ({"segment": -128}, "segment: -128"),
        ({"block_size": 0}, "block_size"),
        ({"snapshot_interval": 100}, "snapshot_interval: 100"),
        ({"snapshot_interval": -128}, "snapshot_interval"),
        ({"dtype": "int3"}, "dtype: 'int3'.*use one of bfloat16, float16, float32, float64"),
        ({"dtype": "uint8"}, "dtype: 'uint8'"),
    ):
        with pytest.raises(ConfigError, match=message):
            spec_from_config(config, **wrong)  # type: ignore[arg-type]


def test_snapshots_weigh_no_more_than_the_kv_between_them() -> None:
    spec = spec_from_config({"model_type": "qwen3_next", "dtype": "bfloat16"})
    snapshot = sum(g.entry_bytes for g in spec.of_kind(Kind.RECURRENT))
    per_token = sum(g.bytes_per_token for g in spec.of_kind(Kind.COMPRESSED))
    assert spec.snapshot_interval % spec.segment_tokens == 0
    assert snapshot <= per_token * spec.snapshot_interval < snapshot + per_token * spec.segment_tokens


@pytest.mark.parametrize(
    ("window", "block", "expected"),
    [
        (128, 128, 128),
        (4096, 128, 128),
        (40, 128, 32),
        (24, 128, 16),
        (4, 128, 16),
        (4, 8, 8),
        (24, 100, 20),
        (5, 7, 7),
    ],
)
def test_window_blocks_divide_the_block(window: int, block: int, expected: int) -> None:
    config = {**LLAMA, "model_type": "mistral", "sliding_window": window}
    spec = spec_from_config(config, block_size=block)
    assert spec.groups[0].block_tokens == expected
    assert block % expected == 0


def test_identity_tells_models_apart() -> None:
    base = dict(spec_from_config(LLAMA).identity)
    assert base == dict(spec_from_config(dict(LLAMA)).identity)
    assert base["model_type"] == "llama"
    for change in ({"rope_theta": 1e6}, {"rms_norm_eps": 1e-3}, {"dtype": "bfloat16"}, {"hidden_size": 64}):
        assert dict(spec_from_config({**LLAMA, **change}).identity) != base
    assert dict(spec_from_config({**LLAMA, "transformers_version": "9"}).identity) == base
    names = [name for name, _ in spec_from_config(LLAMA).identity]
    assert names == sorted(names)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({**LLAMA, "layer_types": ["full_attention", "quantum_attention"]}, SpecError, "layer 1.*'quantum_attention'"),
        ({**LLAMA, "layer_types": ["full_attention"]}, SpecError, "1 layer_types for 2 layers"),
        ({**LLAMA, "layer_types": ["linear_attention"] * 2}, SpecError, "layer 0.*'linear_attention'.*recurrent"),
        ({**LLAMA, "layer_types": ["indexed_attention"] * 2}, SpecError, "indexed_attention"),
        ({**LLAMA, "layer_types": ["heavily_compressed_attention"] * 2}, SpecError, "deepseek_v4 only"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 2}, SpecError, "no sliding_window"),
        ({**LLAMA, "layer_types": ["chunked_attention"] * 2}, SpecError, "no attention_chunk_size"),
        ({**LLAMA, "layer_types": ["moe", "mlp"]}, SpecError, "no layer keeps any state"),
        ({**LLAMA, "num_hidden_layers": "two"}, SpecError, "num_hidden_layers"),
        ({**LLAMA, "num_hidden_layers": 10**9}, SpecError, "layers"),
        ({**LLAMA, "num_key_value_heads": -1}, SpecError, "num_key_value_heads"),
        ({**LLAMA, "is_encoder_decoder": True}, SpecError, "encoder-decoder"),
        ({**LLAMA, "use_bidirectional_attention": True}, SpecError, "both directions"),
        ({"model_type": "unheard_of"}, SpecError, "unheard_of.*num_hidden_layers"),
        (
            {**LLAMA, "model_type": "unheard_of", "layer_types": ["full_attention"] * 2, "kv_lora_rank": 8},
            SpecError,
            "kv_lora_rank",
        ),
        ({}, SpecError, "no model_type"),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, SpecError, "LLLG"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 32}, SpecError, "sliding_window"),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["half"] * 78}, SpecError, "'half'"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 35}, SpecError, "share"),
        ({"model_type": "llama", "text_config": {}, "decoder": {}}, SpecError, "several text configs"),
        (None, InputError, "NoneType"),
        ([1, 2], InputError, "list"),
        (b"config", InputError, "bytes"),
    ],
)
def test_what_is_not_understood_is_named(config: Any, error: type[KVLoomError], message: str) -> None:
    with pytest.raises(error, match=message):
        spec_from_config(config)


def test_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no config"):
        spec_from_config(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        spec_from_config(tmp_path / "nowhere")
    file = tmp_path / "config.json"
    for content, message in (
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[]", "one JSON object"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[" * 100_000, "nested too deeply"),
    ):
        file.write_bytes(content)
        with pytest.raises(InputError, match=message):
            spec_from_config(file)
        with pytest.raises(InputError, match=message):
            spec_from_config(tmp_path)
    with pytest.raises(InputError):
        spec_from_config("no\0name")


@pytest.mark.parametrize("name", sorted(NO_DEFAULTS & set(NAMES)))
def test_transformers_completes_families_that_are_not_known_here(name: str, tmp_path: Path) -> None:
    config = tiny(name)
    config.save_pretrained(tmp_path)
    for path in (tmp_path, str(tmp_path), str(tmp_path / "config.json")):
        assert geometry(spec_from_config(path, complete=auto_config)) == geometry(spec_from_config(config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba", "num_hidden_layers": 2}, "layer 0 of mamba: .*'linear_attention'.*not supported"),
        ({"model_type": "jamba", "num_hidden_layers": 8}, "layer 0 of jamba: .*'linear_attention'.*not supported"),
        ({"model_type": "unheard_of"}, "transformers cannot read it: .*unheard_of"),
        ({}, "transformers cannot read it: .*model_type"),
    ],
)
def test_the_true_cause_is_named(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match=message):
        resolve(str(tmp_path), complete=auto_config)


def test_gpt2_is_described_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 3}))
    spec = resolve(str(tmp_path), complete=auto_config)
    assert [(g.name, g.layers, g.tensors[0].shape) for g in spec.groups] == [("full", (0, 1, 2), (12, 64))]
    with pytest.raises(SpecError, match="pass transformers' config object"):
        resolve(str(tmp_path))


def test_without_transformers_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    code = "import sys; sys.modules['transformers'] = None\nfrom kvloom.cli import main; main(['spec', sys.argv[1]])"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "transformers is not installed; run: pip install 'kvloom[transformers]'" in done.stderr


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
SEEN_KEYS = [
    *sorted({key for family in FAMILIES.values() for key in family.defaults}),
    "layer_types",
    "per_layer_config",
    "text_config",
    "dtype",
    "compress_ratios",
    "compress_rates",
    "linear_attn_config",
    "indexer_types",
    "kv_sharing_modes",
    "no_rope_layers",
    "full_attn_idxs",
]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(SEEN_KEYS), JSON_VALUES, max_size=3))
def test_malformed_values_raise_typed_errors_only(family: str, values: dict[str, Any]) -> None:
    try:
        spec = spec_from_config({"model_type": family, **values})
    except KVLoomError:
        return
    assert spec.groups


def test_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers']))\n"
        "from kvloom.spec.presets import resolve; from kvloom.spec.report import spec_report\n"
        "print(spec_report(resolve('gpt-oss-120b'))['global_bytes_per_token'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "36864"), done.stderr
