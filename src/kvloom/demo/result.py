"""What a demo found, as plain values, and its JSON form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvloom.manager import Stats
    from kvloom.types import Grade


@dataclass(frozen=True, slots=True)
class Row:
    """One answer, warm beside cold.

    Attributes:
        step: what this answer shows (``question``, ``fork``, ``after eviction``, ``hit again``, ...).
        reused_tokens: prompt tokens that needed no compute.
        grade: grade of the hit; None for a miss.
        ttft_cold_oneshot_s: transformers' ``generate`` on the whole prompt, to its first token.
        ttft_cold_s: transformers' own cache, filled in the same chunks that kvloom uses.
        ttft_warm_s: kvloom, from the call to the first token.
        identical: all greedy tokens and the first logits, bit for bit, against the chunked cold run.
        generated: how many tokens were compared.
    """

    step: str
    question: str
    answer: str
    prompt_tokens: int
    reused_tokens: int
    grade: str | None
    ttft_cold_oneshot_s: float
    ttft_cold_s: float
    ttft_warm_s: float
    identical: bool
    generated: int


@dataclass(frozen=True, slots=True)
class KindRow:
    """Counters of one kind in objects; ``bytes`` are those kept at the end."""

    hits: int
    misses: int
    evictions: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ModelShow:
    """One model of the demo.

    Attributes:
        facts: what is worth saying about it, label to value.
        rows: its answers.
        kinds: per kind name.
    """

    name: str
    facts: dict[str, Any]
    rows: tuple[Row, ...]
    kinds: dict[str, KindRow]

    @property
    def identical(self) -> bool:
        """True when every answer equals its cold answer."""
        return all(row.identical for row in self.rows)


@dataclass(frozen=True, slots=True)
class NewProcess:
    """An answer of another process, which found the document in a disk store.

    Attributes:
        question, answer, prompt_tokens, reused_tokens, grade: as in ``Row``.
        bytes_stored: what the first process stored of the document.
        bytes_loaded: what the new one read.
        ttft_cold_s: the first process, with transformers alone in the same chunks.
        ttft_s: the new process, from the call to the first token; reading from disk is part of it.
        identical: all greedy tokens and the first logits, bit for bit, against that cold run; None: nothing was
            answered.
        problem: why nothing was answered; empty otherwise.
    """

    question: str = ""
    answer: str = ""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    grade: str | None = None
    bytes_stored: int = 0
    bytes_loaded: int = 0
    ttft_cold_s: float = 0.0
    ttft_s: float = 0.0
    identical: bool | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The whole demo: a real-weights model, another process with it, then a tiny model with more kinds."""

    real: ModelShow
    again: NewProcess
    tiny: ModelShow

    @property
    def all_identical(self) -> bool:
        """True when every warm answer was identical to its cold answer."""
        return self.real.identical and self.tiny.identical and self.again.identical is not False

    def speedups(self) -> tuple[float, float]:
        """Median warm time to first token against one-shot and chunked cold, as factors, over the answers that hit."""
        hits = [row for row in self.real.rows if row.reused_tokens]
        warm = median(row.ttft_warm_s for row in hits)
        return median(r.ttft_cold_oneshot_s for r in hits) / warm, median(r.ttft_cold_s for r in hits) / warm

    def to_json(self) -> dict[str, Any]:
        """Ready for ``json.dumps``."""
        oneshot, chunked = self.speedups()
        return {
            "all_identical": self.all_identical,
            "answers": [asdict(row) for row in self.real.rows],
            "new_process": asdict(self.again),
            "kinds": {name: asdict(row) for name, row in merge_kinds([self.real.kinds, self.tiny.kinds]).items()},
            "speedup_over_cold_oneshot": oneshot,
            "speedup_over_cold": chunked,
            "models": {
                show.name: {
                    "identical": show.identical,
                    **show.facts,
                    "answers": len(show.rows),
                    "kinds": {name: asdict(row) for name, row in show.kinds.items()},
                }
                for show in (self.real, self.tiny)
            },
            "tiny_answers": [asdict(row) for row in self.tiny.rows],
        }


def kind_rows(stats: Stats) -> dict[str, KindRow]:
    """The counters of a manager by kind name."""
    return {
        kind.name.lower(): KindRow(s.hits, s.misses, s.evictions, s.bytes) for kind, s in sorted(stats.kinds.items())
    }


def merge_kinds(parts: Iterable[dict[str, KindRow]]) -> dict[str, KindRow]:
    """Counters of several managers, added up by kind name."""
    merged: dict[str, KindRow] = {}
    for part in parts:
        for name, row in part.items():
            old = merged.get(name, KindRow(0, 0, 0, 0))
            merged[name] = KindRow(
                old.hits + row.hits, old.misses + row.misses, old.evictions + row.evictions, old.bytes + row.bytes
            )
    return merged


def grade_name(grade: Grade | None) -> str | None:
    """A grade for people and JSON; None stays None (a miss has no grade)."""
    return None if grade is None else grade.name.lower()
