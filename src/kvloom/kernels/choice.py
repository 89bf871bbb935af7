"""Which form pays on this machine, for one tier and one kind of object: a pure function of measured speeds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvloom.errors import InputError
from kvloom.types import Grade, PayloadForm

CLOSE = 0.05
"""Restores within this part of the fastest count as equally fast."""


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """What a form costs here: bytes of slots per second, encoding and decoding, and slot bytes per payload byte."""

    form: PayloadForm
    encode: float
    decode: float
    ratio: float

    def __post_init__(self) -> None:
        if min(self.encode, self.decode, self.ratio) <= 0:
            raise InputError(f"{self} is no measurement: every speed and the ratio must be above 0")


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """What a tier reads and writes: bytes per second."""

    name: str
    read: float
    write: float

    def __post_init__(self) -> None:
        if min(self.read, self.write) <= 0:
            raise InputError(f"{self} is no measurement: both speeds must be above 0")


@dataclass(frozen=True, slots=True)
class FormCost:
    """One form on one tier: bytes of slots per second that a restore and a store reach, and what was made of it."""

    form: PayloadForm
    restore: float
    store: float
    ratio: float
    verdict: str


@dataclass(frozen=True, slots=True)
class FormChoice:
    """The form to write, why, and what the others would have cost.

    ``worth``: a restore in it is faster than computing the state again; None where that speed is not known.
    """

    tier: str
    group: str
    form: PayloadForm
    reason: str
    costs: tuple[FormCost, ...]
    worth: bool | None

    def __str__(self) -> str:
        return f"{self.group} in {self.tier}: {self.form.name.lower()}, {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """Plain values, forms by name."""
        costs = [asdict(cost) | {"form": cost.form.name.lower()} for cost in self.costs]
        return asdict(self) | {"form": self.form.name.lower(), "costs": costs}


def choose_form(
    codecs: Sequence[CodecSpeed],
    tier: TierSpeed,
    allowed: Collection[PayloadForm],
    *,
    group: str = "",
    recompute: float = 0.0,
) -> FormChoice:
    """The allowed form whose restore is fastest; among equally fast ones an exact one, then the smallest.

    Reading and decoding overlap, as do encoding and writing, so each pair takes as long as its slower half.  A form
    whose stores are slower than both writing raw and making the state is not taken: stores would fall ever further
    behind.  RAW is always allowed.

    Args:
        codecs: the measured forms, RAW among them (its speeds are those of a copy).
        tier: where the objects go.
        allowed: what the objects may become: LOSSLESS, FP8 only where the group has that form and was asked for.
        group: for the answer's text.
        recompute: bytes of slots per second that computing the state again makes; 0 when not known.

    Raises InputError when RAW was not measured, or a form twice.
    """
    speeds = {codec.form: codec for codec in codecs}
    if PayloadForm.RAW not in speeds or len(speeds) != len(codecs):
        raise InputError("choosing a form takes one measurement of each, RAW among them")
    raw_store = _store(speeds[PayloadForm.RAW], tier)
    candidates, dropped = [], []
    for form, speed in speeds.items():
        restore, store = min(tier.read * speed.ratio, speed.decode), _store(speed, tier)
        if form is not PayloadForm.RAW and form not in allowed:
            dropped.append(FormCost(form, restore, store, speed.ratio, "not allowed here"))
        elif store < min(raw_store, recompute or raw_store):
            dropped.append(FormCost(form, restore, store, speed.ratio, "encodes too slowly to keep up with prefill"))
        else:
            candidates.append((form, restore, store, speed.ratio))
    fastest = max(restore for _, restore, _, _ in candidates)
    close = [c for c in candidates if c[1] >= fastest * (1 - CLOSE)]
    best = min(close, key=lambda c: (c[0] is PayloadForm.FP8, -c[3]))
    costs = [
        FormCost(*c, "chosen" if c is best else "about as fast" if c in close else "slower to restore")
        for c in candidates
    ]
    raw = next(c for c in candidates if c[0] is PayloadForm.RAW)
    return FormChoice(
        tier.name,
        group,
        best[0],
        _reason(best, raw, speeds[best[0]], tier),
        tuple(sorted([*costs, *dropped], key=lambda cost: cost.form)),
        best[1] > recompute if recompute else None,
    )


def _store(codec: CodecSpeed, tier: TierSpeed) -> float:
    return min(tier.write * codec.ratio, codec.encode)


def _reason(
    best: tuple[PayloadForm, float, float, float],
    raw: tuple[PayloadForm, float, float, float],
    codec: CodecSpeed,
    tier: TierSpeed,
) -> str:
    rate = f"restores {best[1] / 1e9:.2f} GB/s"
    if best[0] is PayloadForm.RAW:
        return f"{rate}: no allowed form is faster"
    bound = "decoding" if codec.decode < tier.read * codec.ratio else "reading"
    grade = "" if best[0] is not PayloadForm.FP8 else f", its state becomes {Grade.APPROXIMATE}"
    gain = f"{best[1] / raw[1]:.2f} x raw"
    return f"{rate}, {gain}, limited by {bound}, in 1/{codec.ratio:.2f} of the bytes{grade}"
