"""Presets: the published numbers, options, and names that do not exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvloom.cli.spec import spec_table
from kvloom.errors import ConfigError, InputError
from kvloom.spec.model_spec import ModelSpec
from kvloom.spec.pages import PAGE_ALIGN, spec_page
from kvloom.spec.presets import PRESETS, IndexerFormat, load_preset, resolve
from kvloom.spec.report import spec_report
from kvloom.types import Kind


def layers(spec: ModelSpec) -> dict[str, int]:
    return {g.name: len(g.layers) for g in spec.groups}


@pytest.mark.parametrize(
    ("name", "per_token", "window", "replay"),
    [("deepseek-v4-flash", 3850.25, 3_214_336, 5504), ("deepseek-v4-pro", 5511.4375, 4_559_872, 7808)],
)
def test_published_numbers_of_deepseek_v4(name: str, per_token: float, window: int, replay: int) -> None:
    report = json.loads(json.dumps(spec_report(load_preset(name))))
    assert report["global_bytes_per_token"] == per_token
    assert report["window_bytes"] == window
    assert report["exact_replay_tokens"] == replay
    assert report["lcm_tokens"] == 128


def test_deepseek_v4_layers_and_tails() -> None:
    flash, pro = load_preset("deepseek-v4-flash"), load_preset("deepseek-v4-pro")
    assert layers(flash) == {
        "window.128": 43,
        "csa": 21,
        "hca": 20,
        "csa.indexer": 21,
        "tail.overlap": 21,
        "tail.csa": 21,
        "tail.hca": 20,
    }
    assert (layers(pro)["csa"], layers(pro)["hca"], layers(pro)["window.128"]) == (30, 31, 61)
    overlap = flash.groups[flash.group_index("tail.overlap")]
    assert overlap.entry_bytes == 430_080  # what an aligned boundary keeps
    pending = flash.groups[flash.group_index("tail.hca")]
    assert pending.entry_bytes == 20 * 524_288


def test_fp4_indexer() -> None:
    spec = load_preset("deepseek-v4-flash", indexer_format=IndexerFormat.FP4)
    assert spec_report(spec)["global_bytes_per_token"] == 3514.25
    assert spec_report(load_preset("deepseek-v4-pro", indexer_format=IndexerFormat.FP4))["global_bytes_per_token"] == (
        5031.4375
    )
    assert spec.format != load_preset("deepseek-v4-flash").format
    with pytest.raises(ConfigError, match="indexer_format"):
        load_preset("gpt-oss-20b", indexer_format=IndexerFormat.FP4)
    with pytest.raises(ConfigError, match="dtype"):
        load_preset("deepseek-v4-pro", dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "expected", "per_token"),
    [
        ("gpt-oss-20b", {"full": 12, "window.128": 12}, 12 * 2 * 8 * 64 * 2),
        ("gpt-oss-120b", {"full": 18, "window.128": 18}, 18 * 2 * 8 * 64 * 2),
        ("gemma-3-27b", {"full": 10, "window.1024": 52}, 10 * 2 * 16 * 128 * 2),
        ("llama-4-scout", {"full": 12, "chunk.8192": 36}, 12 * 2 * 8 * 128 * 2),
        ("qwen3-next-80b", {"full": 12, "recurrent": 36}, 12 * 2 * 2 * 256 * 2),
        ("kimi-linear-48b", {"full": 7, "recurrent": 20}, 7 * 576 * 2),
        ("deepseek-v3.2", {"full": 61, "indexer": 61}, 61 * (576 + 128) * 2),
        ("mistral-7b", {"window.4096": 32}, 0),
        ("llama-3.1-8b", {"full": 32}, 32 * 2 * 8 * 128 * 2),
        ("llama-3.1-70b", {"full": 80}, 80 * 2 * 8 * 128 * 2),
    ],
)
def test_geometry(name: str, expected: dict[str, int], per_token: int) -> None:
    spec = load_preset(name)
    assert layers(spec) == expected
    assert spec_report(spec)["global_bytes_per_token"] == per_token


def test_qwen3_next_snapshot_is_78_megabytes() -> None:
    spec = load_preset("qwen3-next-80b")
    assert sum(g.entry_bytes for g in spec.of_kind(Kind.RECURRENT)) == 77_856_768


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_reports(name: str) -> None:
    spec = resolve(name)
    assert spec == load_preset(name.upper())
    report = spec_report(spec, 4096)
    assert json.loads(json.dumps(report)) == report
    assert report["context"] == 4096
    assert set(report["kinds"]) == {g.kind.name.lower() for g in spec.groups}
    assert report["bytes_per_request"] == sum(k["bytes_per_request"] for k in report["kinds"].values())
    assert report["bytes_per_request"] <= report["slot_bytes_per_request"]
    page = spec_page(spec)
    assert page.page_bytes % PAGE_ALIGN == 0
    assert page.worst_waste <= 0.04
    assert report["pages_by_tier"][-1]["bytes"] == report["page"]["bytes"] == page.page_bytes
    console = Console(width=160, record=True)
    console.print(spec_table(report))
    text = console.export_text()
    assert all(group.name in text for group in spec.groups)


def test_contexts() -> None:
    spec = load_preset("gpt-oss-20b")
    assert spec_report(spec)["context"] == 131_072
    assert spec_report(load_preset("mistral-7b"))["context"] == 32_768
    assert any("more than" in note for note in spec_report(spec, 200_000)["notes"])
    assert spec_report(spec, 1)["bytes_per_request"] == 2 * 12 * 2 * 8 * 64 * 2
    for wrong in (0, -5):
        with pytest.raises(ConfigError, match="context"):
            spec_report(spec, wrong)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("deepseek-v4-flush", "deepseek-v4-flash"), ("gpt-oss", "gpt-oss-20b"), ("lama-3.1-8b", "llama-3.1-8b")],
)
def test_unknown_names_offer_close_ones(name: str, hint: str) -> None:
    for call in (load_preset, resolve):
        with pytest.raises(InputError, match=hint):
            call(name)


def test_a_name_unlike_any_lists_all() -> None:
    with pytest.raises(InputError, match=r"presets: deepseek-v4-flash, .*llama-3\.1-70b"):
        load_preset("zzz")
    with pytest.raises(InputError, match="no such file"):
        resolve("some/where")


def test_resolve_reads_directories_and_files(tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": "gpt_oss", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = resolve(str(tmp_path), block_size=64, segment=256)
    assert (spec.name, spec.block_size, spec.segment_tokens) == ("gpt_oss", 64, 256)
    assert resolve(str(tmp_path / "config.json"), block_size=64, segment=256) == spec
