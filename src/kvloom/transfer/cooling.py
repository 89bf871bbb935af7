"""Cold forms in memory: what is used too rarely is encoded where it lies, before room is short."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from kvloom.kernels.forms import encode, encoded_grade
from kvloom.kernels.slots import SlotFormat
from kvloom.tiers.contract import Tier
from kvloom.tiers.values import Places, Result
from kvloom.transfer.forms import Forms
from kvloom.transfer.options import TransferOptions
from kvloom.transfer.pace import Rest
from kvloom.types import AnyArray, Grade, PayloadForm

BATCH = 32 << 20
"""Bytes that are looked at after one store."""
MOST_KEPT = 1 << 16


@runtime_checkable
class Rewrites(Tier, Protocol):
    """A tier whose objects may take another form where they are.  Thread-safe, too."""

    def cold_objects(self, below: float, most_bytes: int) -> list[Places]:
        """RAW objects that no unit needs whose decayed count of uses is ``below`` or more, the coldest first."""

    def rewrite(self, places: Places, payloads: list[AnyArray], form: PayloadForm, grade: Grade) -> int:
        """Put other bytes in the place of objects; returns how many changed."""


class Cooling:
    """Of one tier.  ``run`` belongs to the thread that stores there.

    Attributes:
        forms: what may become of objects there, and what it costs.
        converted: objects by form.
        saved: bytes.
    """

    def __init__(self, tier: Rewrites, layout: bytes, forms: Forms, options: TransferOptions) -> None:
        self._tier, self._layout, self.forms, self._options = tier, layout, forms, options
        self.converted: dict[PayloadForm, int] = {}
        self.saved = 0
        self._kept: set[tuple[bytes, int, int]] = set()

    def run(self, rest: Rest) -> None:
        """Convert what is cold, once the tier is half as full as it may be."""
        usage = self._tier.usage()
        if usage.bytes < self._options.host_mark / 2 * usage.capacity:
            return
        for places in self._tier.cold_objects(self._options.cold_below, BATCH):
            if places.layout == self._layout:
                self._convert(places, rest)

    def _convert(self, places: Places, rest: Rest) -> None:
        entries, parts = places.entries[self._known(places)], self.forms.parts
        places = places.take(self._known(places))
        group = entries["group"].astype(np.int64)
        number = entries["column"].astype(np.int64) % parts.count[group]
        for g, p, grade in np.unique(np.stack([group, number, entries["grade"].astype(np.int64)]), axis=1).T.tolist():
            form, fmt = self.forms.choose(g, smaller=True).form, self.forms.part_formats[g][p]
            mine = (group == g) & (number == p) & (entries["grade"] == grade) & (entries["length"] == fmt.nbytes)
            if form is not PayloadForm.RAW and mine.any():
                self._encode(places.take(mine), form, fmt, Grade(grade), rest)

    def _known(self, places: Places) -> AnyArray:
        return self.forms.parts.known(places.entries["group"], places.entries["column"])

    def _encode(self, places: Places, form: PayloadForm, fmt: SlotFormat, grade: Grade, rest: Rest) -> None:
        slot = np.empty(-(-fmt.nbytes // 8), np.uint64).view(np.uint8)[: fmt.nbytes]
        for i in range(len(places)):
            rest()
            one = places.take(np.array([i]))
            name = (one.digests[0].tobytes(), int(one.entries["group"][0]), int(one.entries["column"][0]))
            if name in self._kept or self._tier.read(one, slot, np.zeros(1, np.int64)).results[0] != Result.OK:
                continue
            payload = encode(form, slot, fmt)
            if payload is None:
                if len(self._kept) < MOST_KEPT:
                    self._kept.add(name)  # it does not become smaller: not tried again
                continue
            if self._tier.rewrite(one, [payload], form, encoded_grade(form, grade)):
                self.converted[form] = self.converted.get(form, 0) + 1
                self.saved += fmt.nbytes - len(payload)
