"""Configuration: the seeds' YAML, precedence, messages that name the field and the fix."""

from __future__ import annotations

import pytest

from kvloom.config import CacheConfig, Device, exact_size, format_size, parse_size
from kvloom.errors import ConfigError
from kvloom.types import Grade

SEEDS_YAML = """\
kv_cache_config:
  block_size: 128        # tokens per block
  gpu_watermark: 0.8
  prefetch_window: 3     # blocks
  compression: {enabled: true, method: fp8, threshold: 10}
"""
AS_COPIED_FROM_A_PAGE = """\
kv_cache_config:
block_size: 64 # tokens/块
gpu_watermark: 0.8
prefetch_window: 3
compression:
enabled: true
method: fp8
threshold: 10
"""


def test_the_seeds_yaml_as_it_stands() -> None:
    config = CacheConfig.load(SEEDS_YAML)
    assert (config.block_size, config.gpu_watermark, config.prefetch_window) == (128, 0.8, 3)
    assert config.compression.model_dump() == {"enabled": True, "method": "fp8", "threshold": 10}
    assert config.default_floor is Grade.APPROXIMATE
    said = config.notices()
    for word in ("gpu_watermark", "approximate"):
        assert sum(word in notice for notice in said) == 1, word


@pytest.mark.parametrize(
    ("method", "floor", "notes"), [("fp8", "faithful", 1), ("fp8", "approximate", 0), ("lossless", "faithful", 0)]
)
def test_a_floor_that_never_reuses_what_is_kept_is_said(method: str, floor: str, notes: int) -> None:
    compression = f"{{enabled: true, method: {method}}}"
    said = CacheConfig.load(f"kv_cache_config: {{compression: {compression}, floor: {floor}}}").notices()
    assert len(said) == notes
    assert all(f"floor '{floor}' would never reuse it, so state is kept in exact forms" in note for note in said)


def test_the_same_without_its_indentation() -> None:
    config = CacheConfig.load(AS_COPIED_FROM_A_PAGE)
    assert config.block_size == 64
    assert config.compression.method == "fp8"


def test_defaults_say_nothing() -> None:
    assert CacheConfig.load("").notices() == []
    assert CacheConfig.load("kv_cache_config:").default_floor is Grade.FAITHFUL


def test_precedence() -> None:
    environ = {"KVLOOM_BLOCK_SIZE": "64", "KVLOOM_COMPRESSION_THRESHOLD": "2.5", "PATH": "/bin"}
    from_file = CacheConfig.load(SEEDS_YAML)
    from_environment = CacheConfig.load(SEEDS_YAML, environ=environ)
    from_flag = CacheConfig.load(
        SEEDS_YAML, environ=environ, flags={"block_size": 32, "device": None, "floor": "canonical"}
    )
    assert [c.block_size for c in (CacheConfig(), from_file, from_environment, from_flag)] == [128, 128, 64, 32]
    assert from_environment.compression.threshold == 2.5
    assert from_environment.compression.method == "fp8"
    assert from_flag.default_floor is Grade.CANONICAL
    assert from_flag.tiers == (Device("512MiB"),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kv_cache_config: {block_size: 0}", ["block_size", "greater than or equal to 1", "default: 128"]),
        ("kv_cache_config: {block_size: many}", ["block_size", "'many'", "integer"]),
        ("kv_cache_config: {blok_size: 1}", ["blok_size", "did you mean block_size"]),
        ("kv_cache_config: {gpu_watermark: 1.5}", ["gpu_watermark", "less than or equal to 1"]),
        ("kv_cache_config: {compression: {method: fp4}}", ["compression.method", "'lossless' or 'fp8'"]),
        ("kv_cache_config: {compression: {metod: fp8}}", ["compression.metod", "did you mean method"]),
        ("kv_cache_config: {compression: 3}", ["compression", "enabled"]),
        ("kv_cache_config: {device: 3XB}", ["device", "512MiB"]),
        ("kv_cache_config: {floor: good}", ["floor", "canonical, faithful, approximate"]),
        ("kv_cache_config: {floor: 3}", ["floor", "canonical, faithful, approximate"]),
        ("kv_cache_config: 7", ["kv_cache_config", "fields"]),
        ("cache: {}", ["kv_cache_config", "found: cache"]),
        ("[1, 2]", ["kv_cache_config", "list"]),
        ("kv_cache_config: {", ["not valid YAML", "line"]),
        ("kv_cache_config: !!python/object/apply:os.system [ls]", ["not valid YAML"]),
    ],
)
def test_messages_name_the_field_and_the_fix(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        CacheConfig.load(text, source="cache.yaml")
    message = str(caught.value)
    assert message.startswith("cache.yaml: ")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_an_unknown_environment_variable_is_an_error() -> None:
    with pytest.raises(ConfigError, match="KVLOOM_BLOK_SIZE is not known; did you mean KVLOOM_BLOCK_SIZE"):
        CacheConfig.load(environ={"KVLOOM_BLOK_SIZE": "1"})


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (65536, 65536),
        ("65536", 65536),
        ("512MiB", 512 * 1024**2),
        (" 2 GiB ", 2 * 1024**3),
        ("2G", 2 * 1024**3),
        ("1.5GB", 1_500_000_000),
        ("64kib", 65536),
        ("1t", 1024**4),
    ],
)
def test_sizes(size: int | str, expected: int) -> None:
    assert parse_size(size) == expected
    assert Device(size) == Device(expected)


@pytest.mark.parametrize("size", ["", "MiB", "-1", "1..5GiB", "12 parsecs", "1e9", "0", 0, -5, True, 1.5, None])
def test_bad_sizes(size: object) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_size(size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "said"), [(0, "0B"), (5, "5B"), (1536, "1536B"), (256 << 10, "256KiB"), (3 << 40, "3TiB")]
)
def test_sizes_to_be_written_again(size: int, said: str) -> None:
    assert exact_size(size) == said
    if size:
        assert parse_size(said) == size


def test_flags_are_named_as_they_are_written() -> None:
    with pytest.raises(ConfigError, match=r"^--block-size 0: input should be"):
        CacheConfig.load(flags={"block_size": 0})
    with pytest.raises(ConfigError, match=r"^--device 'lots': size 'lots' is not understood"):
        CacheConfig.load(flags={"device": "lots"})


def test_sizes_for_people() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, 512 * 1024**2, 5 * 1024**4)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "512.0 MiB",
        "5.0 TiB",
    ]
