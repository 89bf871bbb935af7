"""The form in which objects lie in a tier: how their payloads are made and read back, and which form pays.

``compression`` of the configuration asks for cold forms.  A tier that outlives the process gets them when it is
written; memory keeps what comes in as it is, and what is used too rarely there is converted later (``cooling``).
Which of the allowed forms is taken follows from speeds measured here: of the codecs, and of the tier.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvloom.errors import FormatError
from kvloom.kernels.choice import CodecSpeed, FormChoice, TierSpeed, choose_form
from kvloom.kernels.forms import decode, encode, encoded_grade, payload_bytes
from kvloom.kernels.measure import measure_codecs
from kvloom.kernels.slots import SlotFormat, slot_format
from kvloom.spec.model_spec import GroupSpec
from kvloom.tiers.values import Fill, NewObject
from kvloom.transfer.options import ColdForm
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
        read, write: measured speeds of the tier.
    """

    name: str
    groups: tuple[GroupSpec, ...]
    allowed: ColdForm
    read: Speed = field(default_factory=Speed)
    write: Speed = field(default_factory=Speed)
    formats: list[SlotFormat] = field(init=False)
    _codecs: tuple[CodecSpeed, ...] = ()

    def __post_init__(self) -> None:
        self.formats = [slot_format(group) for group in self.groups]

    # ---------------------------------------------------------------- choosing

    def may_take(self, group: int) -> set[PayloadForm]:
        """The forms that are allowed for a group."""
        found = {PayloadForm.RAW}
        if self.allowed is not ColdForm.NONE:
            found.add(PayloadForm.LOSSLESS)
        if self.allowed is ColdForm.FP8 and self.formats[group].has_fp8:
            found.add(PayloadForm.FP8)
        return found

    def choose(self, group: int, *, smaller: bool = False) -> FormChoice:
        """The form for objects of a group, and why.  ``smaller``: room is what counts, so RAW is not taken."""
        if not self._codecs:
            self._codecs = measure_codecs(time.perf_counter)
        allowed = self.may_take(group)
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

    def fits(self, entries: AnyArray, group: AnyArray) -> AnyArray:
        """Which objects (``group`` int64, known to the model) have a length that their form can have."""
        good = np.zeros(len(entries), dtype=np.bool_)
        for g in np.unique(group).tolist():
            mine = group == g
            form, length = entries["form"][mine], entries["length"][mine]
            slot = self.formats[g].nbytes
            fits = (form == PayloadForm.RAW) & (length == slot)
            fits |= (form == PayloadForm.LOSSLESS) & (length < slot)
            if self.formats[g].has_fp8:
                fits |= (form == PayloadForm.FP8) & (length == payload_bytes(PayloadForm.FP8, self.formats[g]))
            good[mine] = fits
        return good

    def decode(self, form: int, group: int, payload: AnyArray, into: AnyArray) -> bool:
        """Write the object of a verified payload into its slot; whether it could be read."""
        try:
            decode(PayloadForm(form), payload, into, self.formats[group])
        except FormatError:
            return False
        return True

    # ---------------------------------------------------------------- writing

    def for_unit(self, group: AnyArray) -> dict[int, PayloadForm]:
        """The form for objects of each of these groups; encoded ones lie in memory until they are written, so RAW for
        very many at a time.
        """
        groups = np.unique(group).tolist()
        size = sum(int(np.count_nonzero(group == g)) * self.formats[g].nbytes for g in groups)
        if self.allowed is ColdForm.NONE or size > MOST_ENCODED:
            return dict.fromkeys(groups, PayloadForm.RAW)
        return {g: self.choose(g).form for g in groups}

    def make(
        self, place: tuple[int, int, int], grade: Grade, form: PayloadForm, read: Callable[[memoryview], None]
    ) -> NewObject:
        """An object to publish, (row, group, column) ``place``, whose bytes ``read`` copies out of its slot."""
        row, group, column = place
        fmt = self.formats[group]
        if form is PayloadForm.FP8:
            size = payload_bytes(PayloadForm.FP8, fmt)
            assert size is not None
            slot = self._slot(fmt, read)
            made = encode(form, slot, fmt)
            if made is not None:
                return NewObject(row, group, column, encoded_grade(form, grade), made, form)
        elif form is PayloadForm.LOSSLESS:
            made = encode(form, self._slot(fmt, read), fmt)
            if made is not None:
                return NewObject(row, group, column, grade, made, form)
        return NewObject(row, group, column, grade, Fill(fmt.nbytes, read))

    @staticmethod
    def _slot(fmt: SlotFormat, read: Callable[[memoryview], None]) -> AnyArray:
        slot = np.empty(-(-fmt.nbytes // 8), np.uint64).view(np.uint8)[: fmt.nbytes]
        read(slot.data)
        return slot
