"""``CacheState``: the one abstraction over every kind of cached state.

A kind is a strategy that answers the same questions for its group: what must be present to resume at a
position, what an append writes, what dropping one object strands, how a lost object comes back and what
is verified before reuse.  The metadata core compiles the positional answers into ``RuleRow`` numbers;
``kvloom.core.rules`` is their compiled form, and a test compares the two at every position.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from kvloom.spec.model_spec import GroupSpec
from kvloom.types import Kind


class MatchRule(enum.IntEnum):
    """How presence along a prefix turns into "resumable here" (values are stored in the core's arrays)."""

    PREFIX = 0
    """Every block from the start must be there (prefix-AND)."""
    RUN = 1
    """The blocks of the last tokens must be there (run length)."""
    POINT = 2
    """The snapshot taken exactly here must be there (point presence)."""


class Recovery(enum.Enum):
    """A way back for an object that is not on the device."""

    SNAPSHOT_RESTORE = "copy the snapshot into the live slot"
    SHARE_BLOCKS = "enter the shared blocks into the block table"
    SHARE_ALIGNED = "align the window to the boundary and share its blocks"
    RECOMPUTE = "recompute from the nearest boundary"


class Check(enum.Enum):
    """What is verified before an object of the kind is reused."""

    COMPLETE_BLOCKS = "every block from the start, at the floor of the request"
    WINDOW_RUN = "every row that the window still reads"
    EXACT_POSITION = "a snapshot at exactly this position"
    SAME_WEIGHTS = "same weights version, through the layout identity"
    LAYOUT = "same layout identity"


@dataclass(frozen=True, slots=True)
class RuleRow:
    """The numbers that the compiled rules read for one group; see ``kvloom.core.rules``."""

    rule: MatchRule
    ratio: int
    block_tokens: int
    window: int
    chunked: bool
    needed_unless_multiple_of: int
    first_needed: int
    keep_every: int


class CacheState(ABC):
    """The strategy of one KV cache group.  Immutable and stateless; safe to share between threads."""

    kind: ClassVar[Kind]
    rule: ClassVar[MatchRule]
    recovery: ClassVar[tuple[Recovery, ...]]
    checks: ClassVar[tuple[Check, ...]]
    strands_deeper: ClassVar[bool]
    """Whether dropping one object makes every deeper boundary unreachable, so they go with it."""

    def __init__(self, group: GroupSpec) -> None:
        self.group = group

    @abstractmethod
    def needed(self, position: int) -> range:
        """Logical blocks that must be present to resume at token ``position`` (snapshots: ``range(1)`` or empty)."""

    @abstractmethod
    def written(self, start: int, count: int) -> range:
        """Logical blocks that an append of ``count`` tokens after ``start`` writes."""

    def rule_row(self, keep_every: int = 1) -> RuleRow:
        """The group's row for the compiled rules.  ``keep_every``: snapshots of segment ends kept, in tokens."""
        g = self.group
        return RuleRow(
            self.rule,
            g.ratio,
            g.block_tokens,
            g.window,
            g.chunked,
            g.needed_unless_multiple_of,
            g.first_needed,
            keep_every,
        )
