"""In which order a load reads its records: what is copied first, then the layers as the model runs them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvloom.plan import TransferPlan
from kvloom.transfer.options import Restoring
from kvloom.transfer.parts import Parts
from kvloom.types import AnyArray, IntArray

SMALLEST = 8 << 20
"""Bytes that a stage has at least, so that a tier reads in large pieces.  ``Restoring.AUTO`` takes stages where more
than this is left to read after the first one."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Attributes:
    count: how many; 1 where everything is read at once.
    of_record: int64 ``[records]``.
    of_object: int64 ``[objects]``, the last stage that has a part of it.
    of_layer: by group and layer of the group: the stage that has the last of its state, -1 for what is not loaded.
    """

    count: int
    of_record: IntArray
    of_object: IntArray
    of_layer: list[list[int]]


def one_stage(objects: int, records: int) -> Stages:
    """Everything at once."""
    return Stages(1, np.zeros(records, np.int64), np.zeros(objects, np.int64), [])


def stages_of(
    plan: TransferPlan, item: IntArray, part: IntArray, first: AnyArray, parts: Parts, restoring: Restoring
) -> Stages:
    """Those of a load.

    Args:
        plan: what is loaded.
        item, part: int64 ``[records]``: which part of which object of the plan.
        first: bool ``[objects]``, what is copied before the first forward.
        parts: how slots are cut.
        restoring: what was asked for.
    """
    group = plan.group.astype(np.int64)[item]
    size, layer, later = parts.size[group, part], parts.first_layer[group, part], ~first[item]
    left = int(size[later].sum())
    if restoring is Restoring.WHOLE or not left or (restoring is Restoring.AUTO and left <= SMALLEST):
        return one_stage(len(plan), len(item))
    layers, index = np.unique(layer[later], return_inverse=True)
    weights = np.bincount(index, size[later])
    stage, full, numbers = 1, 0.0, np.empty(len(layers), dtype=np.int64)
    for k, weight in enumerate(weights.tolist()):
        if full and (full >= SMALLEST or restoring is Restoring.LAYERS):
            stage, full = stage + 1, 0.0
        numbers[k] = stage
        full += weight
    of_record = np.zeros(len(item), dtype=np.int64)
    of_record[later] = numbers[index]
    of_object = np.zeros(len(plan), dtype=np.int64)
    np.maximum.at(of_object, item, of_record)
    of_part = np.full(parts.begin.shape, -1, dtype=np.int64)
    np.maximum.at(of_part, (group, part), of_record)
    of_layer = [of_part[g, parts.of_layer[g]].tolist() for g in range(len(of_part))]
    return Stages(stage + 1, of_record, of_object, of_layer)
