"""What a KV cache group needs at a position, by enumeration: every row, every entry, one at a time."""

from __future__ import annotations

from kvloom.spec.model_spec import GroupSpec, ModelSpec
from kvloom.types import Kind


class Group:
    """One group of the model: its geometry, and the questions of the match rule."""

    def __init__(self, spec: ModelSpec, index: int) -> None:
        group: GroupSpec = spec.groups[index]
        self.index = index
        self.name = group.name
        self.kind = group.kind
        self.snapshot = group.block_tokens == 0
        self.tokens = group.block_tokens
        self.columns = 1 if self.snapshot else spec.segment_tokens // group.block_tokens
        self.slot_bytes = group.slot_bytes
        self._group = group
        self._keep_every = (spec.snapshot_interval or spec.segment_tokens) if group.kind is Kind.RECURRENT else 1

    def begun(self, position: int) -> int:
        """How many blocks hold at least one entry of [0, position)."""
        entries = range(position // self._group.ratio)
        return len({entry // self._group.block_entries for entry in entries})

    def needed(self, position: int) -> list[int]:
        """Blocks that must be there to resume at ``position``.

        Windows need the blocks of the rows that attention still reads, and the block that the next row goes into
        when it is begun already.
        """
        if self._group.kind is not Kind.WINDOW:
            return list(range(self.begun(position)))
        window = self._group.window
        first = position // window * window if self._group.chunked else max(0, position - window + 1)
        blocks = {row // self.tokens for row in range(first, position)}
        if position % self.tokens:
            blocks.add(position // self.tokens)
        return sorted(blocks)

    def full(self, position: int) -> int:
        """Blocks whose entries are all within [0, position)."""
        return position // self._group.ratio // self._group.block_entries

    def snapshot_needed(self, position: int) -> bool:
        """Whether resuming at ``position`` needs this group's snapshot."""
        group = self._group
        if position < group.first_needed:
            return False
        return group.needed_unless_multiple_of == 0 or position % group.needed_unless_multiple_of != 0

    def snapshot_kept(self, position: int) -> bool:
        """Whether a segment end keeps it without being asked."""
        return self.snapshot_needed(position) and position % self._keep_every == 0

    def entries_in(self, block: int, position: int) -> int | None:
        """Entries of ``block`` within [0, position), or None when all of them are."""
        entries = [e for e in range(position // self._group.ratio) if e // self._group.block_entries == block]
        return len(entries) if len(entries) < self._group.block_entries else None
