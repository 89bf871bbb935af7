"""How bytes are to move between the device and its cold tiers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvloom.errors import ConfigError


class Admission(enum.StrEnum):
    """Which ends of sequences a tier behind the nearest one is told of."""

    ALWAYS = "always"
    """Every one, when it is kept: nothing is lost with the process."""
    REUSED = "reused"
    """The end that a later request went on from, once it did, or when the tier before lets go of it: what is used once
    is not written to flash.  What is left is written when the engine closes."""


class ColdForm(enum.StrEnum):
    """What objects in cold tiers may become, where it pays."""

    NONE = "none"
    """They stay as they are."""
    LOSSLESS = "lossless"
    FP8 = "fp8"
    """Also eight-bit floats, which is not exact: such objects are ``approximate``."""


class Restoring(enum.StrEnum):
    """When a request goes on with a prefix that is being read for it."""

    AUTO = "auto"
    """``LAYERS`` where enough is left to read that overlapping it with the forward pays, else ``WHOLE``."""
    LAYERS = "layers"
    """As soon as the state of the first layers is there; each layer of its first forward waits for its own."""
    WHOLE = "whole"
    """Once everything is there."""


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Attributes:
    gpu_watermark: share of the device tier above which ends of sequences are copied to the nearest cold tier that does
        not outlive the process.
    prefetch_window: blocks of every group that a prefetch reads at a time before it looks for something more urgent.
    admission: see ``Admission``.
    cold_form: see ``ColdForm``.
    cold_below: decayed count of uses below which what is in memory goes to its cold form.
    load_deadline_s: seconds that a request waits for its prefix at most, before anything better is known.
    host_mark: share of a tier above which what is coldest there is moved to the next one.
    most_stores: ends of sequences that may wait to be stored in one tier; others come later, or not at all.
    most_prefetches: prefetches that may be under way.
    restoring: see ``Restoring``.
    pace: share of one core that transfers which nobody waits for take while a forward computes on the same processors
        (``pace.py``); 1: as much as they can.

    ``admission``, ``cold_form`` and ``restoring`` also take names, such as ``"fp8"``.  Raises ConfigError for what is
    out of range or of another type.
    """

    gpu_watermark: float = 0.8
    prefetch_window: int = 3
    admission: Admission = Admission.ALWAYS
    cold_form: ColdForm = ColdForm.NONE
    cold_below: float = 10.0
    load_deadline_s: float = 30.0
    host_mark: float = 0.9
    most_stores: int = 8
    most_prefetches: int = 16
    restoring: Restoring = Restoring.AUTO
    pace: float = 0.05

    def __post_init__(self) -> None:
        for name in ("gpu_watermark", "host_mark", "pace"):
            if not 0 < self._number(name) <= 1:
                raise ConfigError(f"{name} {getattr(self, name)} is no share; use a number above 0 and up to 1")
        for name in ("prefetch_window", "most_stores", "most_prefetches"):
            if self._number(name, whole=True) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} is too small; use at least 1")
        if not self._number("load_deadline_s") > 0:
            raise ConfigError(f"load_deadline_s {self.load_deadline_s} leaves no time to load; use more than 0 seconds")
        if not self._number("cold_below") >= 0:
            raise ConfigError(f"cold_below {self.cold_below} is no count; use 0 or more")
        for name, kind in (("admission", Admission), ("cold_form", ColdForm), ("restoring", Restoring)):
            self._member(name, kind)

    def _number(self, name: str, *, whole: bool = False) -> float:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise ConfigError(f"{name} {value!r} is no {'whole ' if whole else ''}number; write one, without quotes")
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{name} is more than any number of that kind; write a smaller one") from None

    def _member(self, name: str, kind: type[enum.StrEnum]) -> None:
        """A member of ``kind``, or its name, becomes the member."""
        value = getattr(self, name)
        try:
            object.__setattr__(self, name, kind(value))
        except ValueError:
            raise ConfigError(f"{name} {value!r} is not known; use one of: {', '.join(kind)}") from None
