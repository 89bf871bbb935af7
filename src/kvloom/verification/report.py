"""The verdict of ``verify-model`` and everything it rests on, as values, JSON and text."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvloom.spec.model_spec import GroupSpec
from kvloom.types import Grade, Kind

if TYPE_CHECKING:  # needs torch, and a report must be printable without it
    from kvloom.verification.spread import Spread


class Verdict(enum.StrEnum):
    """What was found out."""

    EXACT = "exact"
    DIFFERS = "differs"
    UNSUPPORTED = "unsupported"


class Omission(enum.StrEnum):
    """What happened when the objects of one kind were left out."""

    DETECTED = "detected"
    """The hit became shorter, and the answer stayed right."""
    HARMLESS = "harmless"
    """The hit stayed as long, and the answer stayed right."""
    MISSED = "missed"
    """The hit stayed as long, and the answer changed."""


EXIT_CODES = {Verdict.EXACT: 0, Verdict.DIFFERS: 1, Verdict.UNSUPPORTED: 2}
EXIT_INTERNAL = 70


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a warm run is not what the cold run is.

    Attributes:
        kind, group, layer, tensor: which state; None, "" and -1 when no state is at fault.
        position: token position of the first differing entry (a snapshot: the position it was taken at).
        what: ``bytes``, ``shape``, ``strides``, ``dtype``, ``missing``, ``unknown`` (no group keeps this tensor),
            ``stale`` (the slot was reused), ``hit`` (it ended elsewhere) or ``logits``.
        size: number of differing elements (bytes and logits).
        max_abs_diff: largest difference of any element; 0 when only the bits differ.
    """

    kind: Kind | None
    group: str
    layer: int
    tensor: str
    position: int
    what: str
    size: int = 0
    max_abs_diff: float = 0.0

    def __str__(self) -> str:
        where = [f"{self.kind.name.lower()} ({self.group})"] if self.kind is not None else []
        where += [f"layer {self.layer}"] if self.layer >= 0 else []
        where += [self.tensor, f"position {self.position}"]
        text = f"{', '.join(w for w in where if w)}: {self.what}"
        return f"{text}, {self.size} elements, up to {self.max_abs_diff:.3g}" if self.size else text


@dataclass(frozen=True, slots=True)
class Boundary:
    """One resume that was tried.

    Attributes:
        position: tokens reused.
        grade: grade of the hit.
        scenario: ``cold`` (nothing reused), ``segment``, ``checkpoint``, ``decode``, ``fork``, ``eviction``, ``disk``.
        bitwise: restored state and logits are bit for bit those of a cold run of the same calls.
        max_abs_diff: largest difference of the next logits from the canonical cold run.
        allowed: what ``max_abs_diff`` may be: 0 for canonical, twice the spread for faithful.
        difference: the first difference; None when there is none.
    """

    position: int
    grade: Grade
    scenario: str
    bitwise: bool
    max_abs_diff: float
    allowed: float
    difference: Difference | None = None

    @property
    def passed(self) -> bool:
        """Whether this resume kept its promise."""
        return self.difference is None and self.bitwise and self.max_abs_diff <= self.allowed


@dataclass(slots=True)
class KindResult:
    """What was restored of one kind (or one of its groups), and what leaving it out did.

    Attributes:
        objects_restored: objects that hits reused.
        bytes_restored: tier -> payload bytes of these objects.
        omission: worst outcome over the kind's groups; None when it was never tried.
        changes_logits: resuming a cold cache with this state zeroed changes the logits.
    """

    objects_restored: int = 0
    bytes_restored: dict[str, int] = field(default_factory=dict)
    omission: Omission | None = None
    changes_logits: bool | None = None

    def restored(self, objects: int, payload: int, tier: str = "device") -> None:
        """Count objects that a hit reused."""
        if objects:
            self.objects_restored += objects
            self.bytes_restored[tier] = self.bytes_restored.get(tier, 0) + payload


@dataclass(slots=True)
class StoreUse:
    """What a disk store had to do with it.

    Attributes:
        directory: of the store.
        found: kind -> bytes that runs before this one had left, and that were read.
        stored: kind -> bytes that this run stored.
        failed: reason -> objects that were found and did not arrive.
        evicted: prefix units that went to make room for what was stored.
    """

    directory: str = ""
    found: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    evicted: int = 0


@dataclass(slots=True)
class Report:
    """Everything ``verify-model`` found out about one model."""

    model: str = ""
    dtype: str = ""
    attention: str = ""
    device: str = ""
    threads: int = 0
    tokens: int = 0
    segment: int = 0
    seed: int = 0
    verdict: Verdict = Verdict.UNSUPPORTED
    reason: str = ""
    spread: Spread | None = None
    boundaries: list[Boundary] = field(default_factory=list)
    kinds: dict[Kind, KindResult] = field(default_factory=dict)
    groups: dict[str, KindResult] = field(default_factory=dict)
    evicted_bytes: int = 0
    store: StoreUse | None = None

    @property
    def first_failure(self) -> Boundary | None:
        """The boundary with the smallest position that did not keep its promise."""
        return min((b for b in self.boundaries if not b.passed), key=lambda b: b.position, default=None)

    def results(self, group: GroupSpec) -> tuple[KindResult, KindResult]:
        """The results of a group and of its kind, made when they do not exist yet."""
        return self.groups.setdefault(group.name, KindResult()), self.kinds.setdefault(group.kind, KindResult())

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 exact, 1 differs, 2 unsupported."""
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; infinite differences become the string ``"inf"``."""
        values: dict[str, Any] = {
            "verdict": self.verdict.value,
            "reason": self.reason,
            "model": self.model,
            "dtype": self.dtype,
            "attention": self.attention,
            "device": self.device,
            "threads": self.threads,
            "tokens": self.tokens,
            "segment": self.segment,
            "seed": self.seed,
            "spread": None,
            "boundaries": [_boundary_json(b) for b in self.boundaries],
            "kinds": {k.name.lower(): _kind_json(v) for k, v in sorted(self.kinds.items())},
            "evicted_bytes": self.evicted_bytes,
            "store": None if self.store is None else asdict(self.store),
            "groups": {name: _kind_json(v) for name, v in self.groups.items()},
            "first_difference": _difference_json(self.first_failure),
        }
        if self.spread is not None:
            values["spread"] = {
                **asdict(self.spread),
                "relative": self.spread.relative,
                "tolerance": self.spread.tolerance,
            }
        jsonable: dict[str, Any] = _finite(values)
        return jsonable

    def to_text(self) -> str:
        """A few lines for people."""
        lines = [f"{self.model}  {self.dtype}  {self.attention}  {self.tokens} tokens in segments of {self.segment}"]
        if self.spread is not None:
            s = self.spread
            lines.append(
                f"transformers with itself: spread {s.absolute:.3g} = {s.relative:.2g} of the logits' scale "
                f"(limit {s.limit:g}); faithful hits may be off by {s.tolerance:.3g}; "
                f"{s.routed_positions} positions routed otherwise, not judged"
            )
        for b in self.boundaries:
            mark = "ok" if b.passed else "DIFFERS"
            same = "bitwise" if b.bitwise else "not bitwise"
            lines.append(
                f"  {b.scenario:<10} at {b.position:>6}  {b.grade.name.lower():<9}  {same}, "
                f"logits off by {b.max_abs_diff:.3g}  {mark}{f'  {b.difference}' if b.difference else ''}"
            )
        for kind, result in sorted(self.kinds.items()):
            omission = result.omission.value if result.omission else "not tried"
            disk = result.bytes_restored.get("disk", 0)
            lines.append(
                f"  {kind.name.lower():<10} {result.objects_restored} objects, "
                f"{sum(result.bytes_restored.values())} bytes restored{f', {disk} of them from disk' if disk else ''}; "
                f"left out: {omission}"
            )
        if self.store is not None:
            found, stored = sum(self.store.found.values()), sum(self.store.stored.values())
            lines.append(f"  store {self.store.directory}: {found} bytes found of runs before, {stored} bytes stored")
            lines += [f"  {count} objects did not arrive: {reason}" for reason, count in self.store.failed.items()]
        lines.append(f"{self.verdict.value}: {self.reason}")
        return "\n".join(lines)


def _boundary_json(boundary: Boundary) -> dict[str, Any]:
    values = {**asdict(boundary), "grade": boundary.grade.name.lower(), "passed": boundary.passed}
    del values["difference"]
    return values


def _difference_json(boundary: Boundary | None) -> dict[str, Any] | None:
    if boundary is None:
        return None
    found = boundary.difference or Difference(None, "", -1, "logits", boundary.position, "logits")
    kind = found.kind.name.lower() if found.kind is not None else None
    return {"boundary": boundary.position, "scenario": boundary.scenario, **asdict(found), "kind": kind}


def _kind_json(result: KindResult) -> dict[str, Any]:
    return {**asdict(result), "omission": result.omission.value if result.omission else None}


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become strings."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):  # noqa: PLR0124
        return str(value)
    return value
