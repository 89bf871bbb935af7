"""``verify-model`` says exact for every family, in float32 and bfloat16, and has really tried everything."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvloom.errors import InputError, UnsupportedError  # noqa: E402
from kvloom.testing.families import FAMILIES, REAL_V4_RATIOS, random_model, tiny_config  # noqa: E402
from kvloom.types import Grade, Kind  # noqa: E402
from kvloom.verification.report import Omission, Report, Verdict  # noqa: E402
from kvloom.verification.verify import verify_model  # noqa: E402

SEGMENT = 32
KINDS = {
    "full": {Kind.COMPRESSED},
    "sliding": {Kind.WINDOW},
    "mixed": {Kind.COMPRESSED, Kind.WINDOW},
    "indexed": {Kind.COMPRESSED, Kind.INDEXER},
    "recurrent": {Kind.COMPRESSED, Kind.RECURRENT},
    "lfm3": {Kind.COMPRESSED, Kind.WINDOW, Kind.RECURRENT},
    "deepseek_v4": {Kind.COMPRESSED, Kind.WINDOW, Kind.INDEXER, Kind.TAIL},
}
SHAPE = {
    **dict.fromkeys(("llama", "qwen3", "deepseek_v3"), "full"),
    "mistral": "sliding",
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "indexed"),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "kimi_linear", "lfm2", "falcon_h1", "granitemoehybrid"), "recurrent"),
    **{name: name for name in ("lfm3", "deepseek_v4")},
}


def check_everything_was_tried(report: Report, config: Any, kinds: set[Kind]) -> None:
    assert report.tokens > 3 * report.segment
    for name in ("sliding_window", "attention_chunk_size"):
        assert report.tokens >= 2 * (getattr(config, name, None) or 0)
    entries = report.tokens // (4 if config.model_type == "deepseek_v4" else 1)
    assert getattr(config, "index_topk", 0) < entries
    tried = {(b.scenario, b.position) for b in report.boundaries}
    ends = range(report.segment, report.tokens, report.segment)
    assert {("segment", end) for end in ends} <= tried
    assert {"cold", "segment", "checkpoint", "decode", "fork", "omission", "eviction"} == {name for name, _ in tried}
    assert all(b.grade is Grade.CANONICAL for b in report.boundaries if b.scenario in ("cold", "segment", "eviction"))
    assert all(b.grade is Grade.FAITHFUL for b in report.boundaries if b.scenario in ("checkpoint", "decode", "fork"))
    assert all(b.bitwise and b.max_abs_diff <= b.allowed for b in report.boundaries)
    assert all(b.max_abs_diff == 0 for b in report.boundaries if b.grade is Grade.CANONICAL)
    assert set(report.kinds) == kinds
    for name, result in [*report.kinds.items(), *report.groups.items()]:
        assert result.objects_restored > 0, name
        assert result.bytes_restored["device"] > 0, name
        assert result.omission is Omission.DETECTED, name
        assert result.changes_logits, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_exact(family: str, dtype: str) -> None:
    config = tiny_config(family)
    report = verify_model(random_model(config, 0, dtype), segment=SEGMENT, block_size=SEGMENT)
    assert report.verdict is Verdict.EXACT, report.to_text()
    assert report.exit_code == 0
    check_everything_was_tried(report, config, KINDS[SHAPE.get(family, "mixed")])
    values = report.to_json()
    assert values["verdict"] == "exact"
    assert values["first_difference"] is None
    assert {"position", "grade", "bitwise", "max_abs_diff"} <= set(values["boundaries"][0])
    assert all({"objects_restored", "bytes_restored", "omission"} <= set(kind) for kind in values["kinds"].values())


def test_deepseek_v4_that_compresses_nothing_is_exact() -> None:
    """At a ratio of 1 no row ever waits to be compressed, so that group is never restored."""
    layers = ["compressed_sparse_attention", "heavily_compressed_attention"]
    rates = dict.fromkeys(layers, 1)
    config = tiny_config("deepseek_v4", compress_rates=rates, layer_types=layers, mlp_layer_types=["hash_moe", "moe"])
    report = verify_model(random_model(config), segment=SEGMENT, block_size=SEGMENT)
    assert report.verdict is Verdict.EXACT, report.to_text()


def test_a_model_that_transformers_cannot_run_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match="get_seq_length"):
        verify_model(random_model(tiny_config("lfm2", layer_types=["conv"] * 2)))


@pytest.mark.slow
def test_deepseek_v4_with_its_real_ratios() -> None:
    config = tiny_config("deepseek_v4", compress_rates=REAL_V4_RATIOS, sliding_window=128)
    report = verify_model(random_model(config, 0, "bfloat16"), block_size=128)
    assert report.verdict is Verdict.EXACT, report.to_text()
    assert report.segment == 128
    check_everything_was_tried(report, config, KINDS["deepseek_v4"])


def test_a_segment_of_several_blocks() -> None:
    report = verify_model(random_model(tiny_config("gpt_oss")), segment=64, block_size=16)
    assert report.verdict is Verdict.EXACT, report.to_text()


def test_a_chunk_that_ends_with_the_segment_is_left_out_inside_it() -> None:
    config = tiny_config("llama4", attention_chunk_size=SEGMENT)
    report = verify_model(random_model(config), segment=SEGMENT, block_size=SEGMENT)
    assert report.verdict is Verdict.EXACT, report.to_text()
    assert report.kinds[Kind.WINDOW].omission is Omission.DETECTED


def test_too_few_and_too_many_tokens() -> None:
    model = random_model(tiny_config("mistral", max_position_embeddings=256))
    with pytest.raises(InputError, match="98"):
        verify_model(model, tokens=97, segment=SEGMENT, block_size=SEGMENT)
    with pytest.raises(InputError, match="at most 192"):
        verify_model(model, tokens=193, segment=SEGMENT, block_size=SEGMENT)
    assert verify_model(model, tokens=98, segment=SEGMENT, block_size=SEGMENT).verdict is Verdict.EXACT
