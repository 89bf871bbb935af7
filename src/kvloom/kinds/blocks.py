"""Kinds whose objects are blocks of tokens: compressed history, routing keys, windows."""

from __future__ import annotations

from typing import ClassVar

from kvloom.kinds.cache_state import CacheState, Check, MatchRule, Recovery
from kvloom.types import Kind


class BlockState(CacheState):
    """Block groups: one entry per ``ratio`` tokens, and block ``i`` holds entries ``[i * E, (i + 1) * E)``."""

    def blocks_at(self, position: int) -> int:
        """Blocks that hold the entries of ``[0, position)``."""
        return -(-(position // self.group.ratio) // self.group.block_entries)

    def written(self, start: int, count: int) -> range:
        """See ``CacheState.written``: from the block of the first new entry on."""
        entry = start // self.group.ratio
        return range(entry // self.group.block_entries, self.blocks_at(start + count))


class CompressedState(BlockState):
    """KV entries at ratio m >= 1: ordinary full attention (m = 1), MLA latents, CSA and HCA entries."""

    kind: ClassVar[Kind] = Kind.COMPRESSED
    rule: ClassVar[MatchRule] = MatchRule.PREFIX
    recovery: ClassVar[tuple[Recovery, ...]] = (Recovery.SHARE_BLOCKS, Recovery.RECOMPUTE)
    checks: ClassVar[tuple[Check, ...]] = (Check.COMPLETE_BLOCKS, Check.LAYOUT)
    strands_deeper: ClassVar[bool] = True

    def needed(self, position: int) -> range:
        """Every block from the start."""
        return range(self.blocks_at(position))


class IndexerState(CompressedState):
    """Routing keys of sparse layers, made with the entries that they index."""

    kind: ClassVar[Kind] = Kind.INDEXER
    checks: ClassVar[tuple[Check, ...]] = (Check.COMPLETE_BLOCKS, Check.SAME_WEIGHTS, Check.LAYOUT)


class WindowState(BlockState):
    """Uncompressed KV of the last W tokens, or of the current chunk of W tokens."""

    kind: ClassVar[Kind] = Kind.WINDOW
    rule: ClassVar[MatchRule] = MatchRule.RUN
    recovery: ClassVar[tuple[Recovery, ...]] = (Recovery.SHARE_ALIGNED, Recovery.RECOMPUTE)
    checks: ClassVar[tuple[Check, ...]] = (Check.WINDOW_RUN, Check.LAYOUT)
    strands_deeper: ClassVar[bool] = False

    def first_row(self, position: int) -> int:
        """First token whose row attention still reads after ``position`` tokens."""
        if self.group.chunked:
            return position // self.group.window * self.group.window
        return max(0, position - self.group.window + 1)

    def needed(self, position: int) -> range:
        """The blocks that intersect ``[first_row(position), position)``."""
        return range(self.first_row(position) // self.group.block_tokens, self.blocks_at(position))
