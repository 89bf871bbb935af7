"""The form in which objects lie in a tier: how their payloads are made and read back, and which form pays.

``compression`` of the configuration asks for cold forms.  A tier that outlives the process gets them when it is
written; memory keeps what comes in as it is, and what is used too rarely there is converted later (``cooling``).
Which of the allowed forms is taken follows from speeds measured here: of the codecs, and of the tier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvloom.errors import FormatError
from kvloom.kernels.choice import CodecSpeed, FormChoice, TierSpeed, choose_form
from kvloom.kernels.forms import decode, encode, encoded_grade, payload_bytes
from kvloom.kernels.measure import measure_codecs
from kvloom.kernels.slots import SlotFormat, slot_format
from kvloom.spec.model_spec import GroupSpec
from kvloom.tiers.values import Fill, NewObject
from kvloom.transfer.options import ColdForm
from kvloom.transfer.parts import MOST, Parts
from kvloom.types import AnyArray, Grade, PayloadForm

ASSUMED = 1e9
"""Bytes per second that a tier is taken to read and write before it has done so."""
MOST_ENCODED = 1 << 30
"""Bytes of a unit beyond which it is not encoded."""
_SMOOTH = 0.3
_ENOUGH = 1 << 20
"""Bytes from which on a transfer says something about speed."""


@dataclass(slots=True)
class Speed:
    """A moving average of bytes per second; ``ASSUMED`` before anything was measured."""

    value: float = ASSUMED
    samples: int = 0

    def note(self, n_bytes: int, seconds: float) -> None:
        """A transfer ended."""
        if n_bytes >= _ENOUGH and seconds > 0:
            share = 1.0 if self.samples == 0 else _SMOOTH
            self.value += share * (n_bytes / seconds - self.value)
            self.samples += 1


@dataclass(slots=True)
class Forms:
    """Of one tier.

    Attributes:
        name: of the tier.
        groups: of the model.
        allowed: the coldest form that may be used: RAW for none.
        parts: how slots are cut; every part has its own payload.
        formats: of whole slots; ``part_formats``: of their parts.
        read, write: measured speeds of the tier.
        lossy: whether state of sessions that accept ``approximate`` comes here: until then nobody would reuse what is
            fp8, and it is not chosen.
    """

    name: str
    groups: tuple[GroupSpec, ...]
    allowed: ColdForm
    parts: Parts
    read: Speed = field(default_factory=Speed)
    write: Speed = field(default_factory=Speed)
    lossy: bool = False
    formats: list[SlotFormat] = field(init=False)
    part_formats: list[list[SlotFormat]] = field(init=False)
    _codecs: tuple[CodecSpeed, ...] = ()

    def __post_init__(self) -> None:
        self.formats = [slot_format(group) for group in self.groups]
        self.part_formats = [
            [
                slot_format(replace(group, layers=group.layers[self.parts.layers(g, p)]))
                for p in range(int(self.parts.count[g]))
            ]
            for g, group in enumerate(self.groups)
        ]

    # ---------------------------------------------------------------- choosing

    def may_take(self, group: int, *, exact: bool) -> set[PayloadForm]:
        """The forms that are allowed for a group, only exact ones if ``exact``."""
        found = {PayloadForm.RAW}
        if self.allowed is not ColdForm.NONE:
            found.add(PayloadForm.LOSSLESS)
        if self.allowed is ColdForm.FP8 and not exact and self.formats[group].has_fp8:
            found.add(PayloadForm.FP8)
        return found

    def choose(self, group: int, *, smaller: bool = False, exact: bool = False) -> FormChoice:
        """The form for objects of a group, and why.

        ``smaller``: room is what counts, so RAW is not taken; ``exact``: they are wanted as they are.
        """
        if not self._codecs:
            self._codecs = measure_codecs(time.perf_counter)
        allowed = self.may_take(group, exact=exact or not self.lossy)
        tier = TierSpeed(self.name, self.read.value, self.write.value)
        codecs = self._codecs
        if smaller:  # as from a tier so slow that only size counts
            tier = TierSpeed(self.name, 1.0, 1.0)
        return choose_form(codecs, tier, allowed, group=self.groups[group].name)

    def table(self) -> list[FormChoice]:
        """The present choice for every group; empty where nothing but RAW is allowed."""
        if self.allowed is ColdForm.NONE:
            return []
        return [self.choose(g) for g in range(len(self.groups))]

    # ---------------------------------------------------------------- reading

    def fits(self, entries: AnyArray) -> AnyArray:
        """Which records (of groups and columns that the model has) have a length that their form can have."""
        good = np.zeros(len(entries), dtype=np.bool_)
        group = entries["group"].astype(np.int64)
        key = group * MOST + entries["column"].astype(np.int64) % self.parts.count[group]
        for g, p in [divmod(each, MOST) for each in np.unique(key).tolist()]:
            mine, fmt = key == g * MOST + p, self.part_formats[g][p]
            form, length = entries["form"][mine], entries["length"][mine]
            fits = (form == PayloadForm.RAW) & (length == fmt.nbytes)
            fits |= (form == PayloadForm.LOSSLESS) & (length < fmt.nbytes)
            if fmt.has_fp8:
                fits |= (form == PayloadForm.FP8) & (length == payload_bytes(PayloadForm.FP8, fmt))
            good[mine] = fits
        return good

    def decode(self, form: int, part: tuple[int, int], payload: AnyArray, into: AnyArray) -> bool:
        """Write the (group, part) of a verified payload to its place; whether it could be read."""
        group, number = part
        try:
            decode(PayloadForm(form), payload, into, self.part_formats[group][number])
        except FormatError:
            return False
        return True

    # ---------------------------------------------------------------- writing

    def for_unit(self, group: AnyArray, *, exact: bool = False) -> dict[int, PayloadForm]:
        """The form for objects of each of these groups, an exact one if ``exact``; encoded ones lie in memory until
        they are written, so RAW for very many at a time.
        """
        groups = np.unique(group).tolist()
        size = sum(int(np.count_nonzero(group == g)) * self.formats[g].nbytes for g in groups)
        if self.allowed is ColdForm.NONE or size > MOST_ENCODED:
            return dict.fromkeys(groups, PayloadForm.RAW)
        return {g: self.choose(g, exact=exact).form for g in groups}

    def make(
        self,
        place: tuple[int, int, int],
        grade: Grade,
        form: PayloadForm,
        reads: Sequence[Callable[[memoryview], None]],
    ) -> list[NewObject]:
        """The parts of the object at ``place`` (row, group, column); ``reads`` copy their bytes out of its slot.

        All of them have one grade, so one that has no fp8 form leaves the others without it.
        """
        row, group, column = place
        formats = self.part_formats[group]
        made: list[AnyArray | None] = [None] * len(formats)
        if form is not PayloadForm.RAW:
            made = [encode(form, self._slot(fmt, read), fmt) for fmt, read in zip(formats, reads, strict=True)]
        if form is PayloadForm.FP8 and any(part is None for part in made):
            form, made = PayloadForm.RAW, [None] * len(formats)
        worst, first = encoded_grade(form, grade), column * len(formats)
        return [
            NewObject(row, group, first + p, grade, Fill(fmt.nbytes, read))
            if part is None
            else NewObject(row, group, first + p, worst, part, form)
            for p, (fmt, read, part) in enumerate(zip(formats, reads, made, strict=True))
        ]

    @staticmethod
    def _slot(fmt: SlotFormat, read: Callable[[memoryview], None]) -> AnyArray:
        slot = np.empty(-(-fmt.nbytes // 8), np.uint64).view(np.uint8)[: fmt.nbytes]
        read(slot.data)
        return slot
