"""What a plan stores, as a unit that a tier takes: objects in the forms that pay, in the order of reading."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvloom.plan import ArenaGeometry, Chain, TransferPlan
from kvloom.spec.model_spec import ModelSpec
from kvloom.tiers.values import Need, NewObject, Unit
from kvloom.transfer.forms import Forms
from kvloom.transfer.jobs import Urgency
from kvloom.transfer.lanes import Lane
from kvloom.transfer.memory import SlotMemory
from kvloom.transfer.pace import Rest
from kvloom.transfer.parts import Parts
from kvloom.types import AnyArray, Grade, IntArray, PayloadForm

_YIELD_S, _YIELDS_S = 0.02, 1.0
"""Seconds that a store waits for loads before each object, and for a whole unit, at most."""


@dataclass(frozen=True, slots=True)
class UnitMaker:
    """For one tier: what it stores of which model, out of which memory.  Used by the lane that stores there."""

    spec: ModelSpec
    geometry: ArenaGeometry
    memory: SlotMemory
    parts: Parts
    forms: Forms
    clock: Callable[[], float]

    def make(
        self,
        layout: bytes,
        chain: Chain,
        plan: TransferPlan,
        gives_way_to: Sequence[Lane],
        rest: Rest,
        *,
        exact: bool = False,
    ) -> Unit:
        """What ``plan`` stores, in the forms that pay, or in exact ones; made by the lane that publishes it."""
        patience = [_YIELDS_S]

        def reading(offset: int) -> Callable[[memoryview], None]:
            def read(into: memoryview) -> None:
                self._give_way(gives_way_to, patience)
                self.memory.read_slot(offset, into)

            return read

        parts, segment, forms = self.parts, chain.segment, self.forms.for_unit(plan.group, exact=exact)
        count = parts.count[plan.group]
        offsets = slot_offsets(self.geometry, plan).tolist()
        items = zip(plan.row.tolist(), plan.group.tolist(), plan.column.tolist(), plan.grade.tolist(), strict=True)
        objects: list[NewObject] = []
        for (row, group, column, grade), offset in zip(items, offsets, strict=True):
            reads = [reading(offset + begin) for begin in parts.begin[group, : parts.count[group]].tolist()]
            if forms[group] is not PayloadForm.RAW:
                rest()  # encoding is what costs time here
            objects += self.forms.make((row, group, column), Grade(grade), forms[group], reads)
        if not parts.whole:
            # As a restore wants them: what it copies, then layer by layer, so that a stage lies together on the disk.
            item = np.repeat(np.arange(len(plan)), count)
            part = np.arange(len(item)) - np.repeat(np.cumsum(count) - count, count)
            layer = parts.first_layer[plan.group[item], part]
            first = copied_first(plan, segment, self.spec)[item]
            order = np.lexsort((plan.column[item], plan.row[item], plan.group[item], layer, ~first))
            objects = [objects[i] for i in order.tolist()]
        needs = [
            Need(g, row, count * int(parts.count[g]), column * int(parts.count[g]))
            for g, row, column, count in plan.needs.tolist()
        ]
        rows, tokens = -(-plan.position // segment), chain.tokens[: plan.position]
        digests = chain.digests[:rows]
        return Unit(parts.layout(layout), chain.root, digests, tokens, segment, tuple(objects), tuple(needs))

    def _give_way(self, lanes: Sequence[Lane], patience: list[float]) -> None:
        """Let loads go first for a while."""
        begun = self.clock()
        while patience[0] > 0 and any(lane.busy(Urgency.LOAD) for lane in lanes):
            time.sleep(0.001)
            if self.clock() - begun > _YIELD_S:
                break
        patience[0] -= self.clock() - begun


def copied_first(plan: TransferPlan, segment: int, spec: ModelSpec) -> AnyArray:
    """Which objects are copied before the first forward, bool ``[n]``: snapshots, and the blocks of a checkpoint."""
    snapshots = np.array([group.is_snapshot for group in spec.groups], dtype=np.bool_)
    first: AnyArray = snapshots[plan.group]
    if plan.position % segment:
        first = first | (plan.row == plan.position // segment)
    return first


def slot_offsets(geometry: ArenaGeometry, plan: TransferPlan) -> IntArray:
    """Byte offset in the arena of every slot of a plan."""
    offsets = np.zeros(len(plan), dtype=np.int64)
    for g in np.unique(plan.group).tolist():
        mine = plan.group == g
        offsets[mine] = geometry.slot_offsets(g, plan.slot[mine])
    return offsets
