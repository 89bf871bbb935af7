"""Sizes of tiers: bytes, or a share of the unique blocks of a trace."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.config import size_option
from kvloom.errors import ConfigError
from kvloom.spec.model_spec import ModelSpec, round_up
from kvloom.spec.pages import spec_page
from kvloom.types import Kind


@dataclass(frozen=True, slots=True)
class DeviceSize:
    """What ``--device``, ``--host`` or ``--disk`` asked for: a share of the unique blocks, or bytes.

    Exactly one of ``share`` (in percent) and ``size`` is given.
    """

    asked: str
    share: float | None = None
    size: int | None = None

    @classmethod
    def parse(cls, text: str, tier: str = "device") -> DeviceSize:
        """``"10%"``, or a size such as ``"40GiB"``; raises ConfigError, which names the ``tier``."""
        asked = text.strip()
        if not asked.endswith("%"):
            return cls(asked, size=size_option(text, f"--{tier}"))
        try:
            share = float(asked[:-1])
        except ValueError:
            share = 0.0
        if not 0 < share <= 1000:
            raise ConfigError(
                f"--{tier} {text!r} is no share from above 0 to 1000%; write a percentage such as 10%, or a size"
            )
        return cls(asked, share=share)

    def blocks(self, unique: int, block_bytes: int) -> int:
        """Blocks of the trace that this size holds when everything is kept that may be kept."""
        if self.share is not None:
            return max(1, int(unique * self.share / 100))
        assert self.size is not None
        return self.size // block_bytes

    def device_bytes(self, spec: ModelSpec, unique: int, block_bytes: int) -> int:
        """Bytes of the tier; a share is rounded up to whole pages."""
        if self.size is not None:
            return self.size
        return round_up(self.blocks(unique, block_bytes) * block_bytes, spec_page(spec).page_bytes)


def trace_block_bytes(spec: ModelSpec, block: int) -> int:
    """Bytes of all groups for ``block`` tokens in the middle of a long prompt, everything kept that may be kept."""
    segment = spec.segment_tokens
    total = 0
    for group in spec.groups:
        if not group.is_snapshot:
            total += group.slot_bytes * (segment // group.block_tokens)
        elif group.kind is Kind.RECURRENT:
            total += -(-group.slot_bytes * segment // (spec.snapshot_interval or segment))
        elif not group.needed_unless_multiple_of or segment % group.needed_unless_multiple_of:
            total += group.slot_bytes
    return max(1, -(-total * block // segment))


def least_block_bytes(spec: ModelSpec, block: int) -> int:
    """Bytes that ``block`` tokens take in the groups that every deeper boundary needs; 0 when there is none.

    Windows and snapshots serve their own boundary only, so no policy has to keep them for every block.
    """
    segment = spec.segment_tokens
    needed = (g for g in spec.groups if not g.is_snapshot and g.kind is not Kind.WINDOW)
    return sum(g.slot_bytes * (segment // g.block_tokens) for g in needed) * block // segment
