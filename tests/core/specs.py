"""Small hand-made models for the core: every rule, and the combinations that real models have."""

from __future__ import annotations

from kvloom.spec.model_spec import GroupSpec, ModelSpec, TensorSpec
from kvloom.types import Kind


def blocks(
    name: str,
    kind: Kind,
    block_tokens: int,
    *,
    ratio: int = 1,
    window: int = 0,
    chunked: bool = False,
    slot_bytes: int = 2048,
) -> GroupSpec:
    """A block group with slots of ``slot_bytes`` bytes (a multiple of 256 x entries per block works out exactly)."""
    entries = block_tokens // ratio
    tensor = TensorSpec("keys", (1, slot_bytes // entries // 4), "float32", entry_axis=1)
    return GroupSpec(name, kind, (0,), (tensor,), ratio, block_tokens, window, chunked)


def snapshots(
    name: str, kind: Kind, *, unless_multiple: int = 0, first_needed: int = 1, slot_bytes: int = 1024
) -> GroupSpec:
    """A snapshot group."""
    tensor = TensorSpec("state", (slot_bytes // 4,), "float32")
    return GroupSpec(name, kind, (0,), (tensor,), needed_unless_multiple_of=unless_multiple, first_needed=first_needed)


def full(block_tokens: int = 4, slot_bytes: int = 2048) -> GroupSpec:
    """Ordinary full attention."""
    return blocks("full", Kind.COMPRESSED, block_tokens, slot_bytes=slot_bytes)


def window(size: int, block_tokens: int, slot_bytes: int = 2048) -> GroupSpec:
    """A sliding window of ``size`` tokens."""
    return blocks(f"window.{size}", Kind.WINDOW, block_tokens, window=size, slot_bytes=slot_bytes)


def chunks(size: int, block_tokens: int, slot_bytes: int = 2048) -> GroupSpec:
    """Chunked local attention."""
    return blocks(f"chunk.{size}", Kind.WINDOW, block_tokens, window=size, chunked=True, slot_bytes=slot_bytes)


FULL = ModelSpec("full", (full(),), block_size=4, segment_tokens=8, vocab_size=100)

FULL_WINDOW = ModelSpec("full + window below a segment", (full(), window(3, 2, 1024)), 4, 8, vocab_size=100)

THREE_SEGMENTS = ModelSpec(
    "full + window of three segments + chunks",
    (full(4), window(12, 4, 1280), chunks(8, 2)),
    block_size=4,
    segment_tokens=4,
    max_positions=96,
)

V4 = ModelSpec(
    "ratios 4 and 8, indexer, window, tails",
    (
        blocks("csa", Kind.COMPRESSED, 8, ratio=4),
        blocks("indexer", Kind.INDEXER, 8, ratio=4),
        blocks("hca", Kind.COMPRESSED, 16, ratio=8),
        window(6, 4),
        snapshots("tail.overlap", Kind.TAIL, first_needed=4, slot_bytes=4096),
        snapshots("tail.pending", Kind.TAIL, unless_multiple=4, slot_bytes=2048),
    ),
    block_size=4,
    segment_tokens=16,
    vocab_size=100,
)

RECURRENT = ModelSpec(
    "recurrent with an interval",
    (full(4), snapshots("state", Kind.RECURRENT, slot_bytes=4096)),
    block_size=4,
    segment_tokens=4,
    snapshot_interval=12,
)

STATE_ONLY = ModelSpec(
    "only recurrent",
    (snapshots("conv", Kind.RECURRENT), snapshots("ssm", Kind.RECURRENT, slot_bytes=4096)),
    block_size=4,
    segment_tokens=4,
)

TINY = ModelSpec("one token per segment", (full(1, 1024), window(2, 1, 1024)), block_size=1, segment_tokens=1)

LARGE_LCM = ModelSpec(
    "large LCM",
    (blocks("hca", Kind.COMPRESSED, 64, ratio=32, slot_bytes=1024), full(4, 1024), window(8, 4, 1024)),
    block_size=4,
    segment_tokens=64,
)

CHUNKS_ONLY = ModelSpec("only chunks", (chunks(6, 4), chunks(8, 2, 1024)), block_size=4, segment_tokens=4)

HEAVY_PATH = ModelSpec(
    "a window of three segments and a tail that weigh less than the path",
    (
        full(4, 1024),
        blocks("more", Kind.COMPRESSED, 4, slot_bytes=1024),
        blocks("indexer", Kind.INDEXER, 4, slot_bytes=1024),
        window(11, 4, 256),
        snapshots("tail", Kind.TAIL, slot_bytes=256),
    ),
    block_size=4,
    segment_tokens=4,
)
"""Has rests after 3, 6, 9, 12... segments."""

ALL = (FULL, FULL_WINDOW, THREE_SEGMENTS, V4, RECURRENT, STATE_ONLY, TINY, LARGE_LCM, CHUNKS_ONLY, HEAVY_PATH)
