"""Plans in flight: what each holds while its copies run, and what it publishes when they are done.

A ticket holds the source and the destination of every copy, so a slot is never reused under a
transfer, even when the sequence that asked for it is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import hold, release
from kvloom.core.fields import CARRIED, SLOT_BASE, STATE
from kvloom.core.heat import use_checkpoint
from kvloom.core.lifecycle import ALLOCATED, READY, move
from kvloom.core.objects import adopt, refresh_spine
from kvloom.core.prefix_index import drop_anchor, touch
from kvloom.plan import CopyPlan

NOTHING = CopyPlan(ticket=0)
"""The plan without copies, which nobody has to complete."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One slot copy: global slots, ``src`` -1 = fill with zeros; see ``CopyPlan`` for ``entries``."""

    group: int
    src: int
    dst: int
    entries: int = -1


@dataclass(frozen=True, slots=True)
class Publication:
    """A slot that becomes column ``column`` of node ``node`` when the copies are done."""

    node: int
    column: int
    group: int
    slot: int


@dataclass(slots=True)
class _Open:
    held: list[tuple[int, int]]
    ready: list[int]
    publish: list[Publication] = field(default_factory=list)
    node: int = -1
    plan: CopyPlan | None = None


class Tickets:
    """The plans that were handed out and not yet completed or abandoned.

    Attributes:
        ignored: completions for tickets that are not open (the request was gone, or completed twice).
    """

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._open: dict[int, _Open] = {}
        self._last = 0
        self.ignored = 0

    def issue(
        self,
        copies: Sequence[Copy],
        *,
        ready: Sequence[int] = (),
        publish: Sequence[Publication] = (),
        node: int = -1,
    ) -> CopyPlan:
        """Hold both ends of ``copies`` and hand out their plan.

        Args:
            copies: in the order in which they must run.
            ready: ALLOCATED destination slots that are whole blocks once copied.
            publish: slots that enter the index on completion; the ticket takes over one hold of each.
            node: a node whose anchor the ticket takes over.
        """
        if not copies:
            if node >= 0:
                drop_anchor(self._arrays, node)
            return NOTHING
        held = [(c.group, s) for c in copies for s in (c.src, c.dst) if s >= 0]
        for group, slot in held:
            hold(self._arrays, group, slot)
        self._last += 1
        self._arrays.scalars[CARRIED] += node >= 0
        opened = self._open[self._last] = _Open(held, list(ready), list(publish), node)
        base = self._arrays.group[:, SLOT_BASE]
        opened.plan = CopyPlan(
            ticket=self._last,
            group=np.array([c.group for c in copies], dtype=np.int32),
            src=np.array([c.src - base[c.group] if c.src >= 0 else -1 for c in copies], dtype=np.int32),
            dst=np.array([c.dst - base[c.group] for c in copies], dtype=np.int32),
            entries=np.array([c.entries for c in copies], dtype=np.int32),
        )
        return opened.plan

    def is_foreign(self, plan: CopyPlan) -> bool:
        """Whether another manager's plan has the number of one that is open here."""
        opened = self._open.get(plan.ticket)
        return opened is not None and opened.plan is not plan

    def is_open(self, ticket: int) -> bool:
        """Whether the plan still waits for its copies."""
        return ticket in self._open

    def slots(self, ticket: int) -> list[int]:
        """Global slots that an open plan reads or writes; empty for a ticket that is not open."""
        opened = self._open.get(ticket)
        return [] if opened is None else [slot for _, slot in opened.held]

    def complete(self, ticket: int) -> None:
        """The copies were executed."""
        self._finish(ticket, publish=True)

    def abandon(self, ticket: int) -> None:
        """The copies were not executed."""
        self._finish(ticket, publish=False)

    def _finish(self, ticket: int, *, publish: bool) -> None:
        if ticket == 0:
            return
        opened = self._open.pop(ticket, None)
        if opened is None:
            self.ignored += 1
            return
        a = self._arrays
        if publish:
            for slot in opened.ready:
                if a.slot[slot, STATE] == ALLOCATED:
                    move(a.slot, slot, READY)
            for p in opened.publish:
                move(a.slot, p.slot, READY)
                adopt(a, p.node, p.column, p.group, p.slot)
        for group, slot in opened.held:
            release(a, group, slot)
        for p in opened.publish:
            release(a, p.group, p.slot)
        if opened.node >= 0:
            a.scalars[CARRIED] -= 1
            refresh_spine(a, opened.node)
            touch(a, opened.node)
            use_checkpoint(a, opened.node)
            drop_anchor(a, opened.node)

    def holds(self) -> list[tuple[int, int]]:
        """Every (group, global slot) hold of the open tickets, for the integrity check."""
        found = []
        for opened in self._open.values():
            found += opened.held
            found += [(p.group, p.slot) for p in opened.publish]
        return found

    def nodes(self) -> list[int]:
        """Every node that an open ticket anchors, for the integrity check."""
        return [o.node for o in self._open.values() if o.node >= 0]

    def __len__(self) -> int:
        return len(self._open)
