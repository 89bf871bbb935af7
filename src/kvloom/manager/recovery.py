"""Which way back is fastest: compute, load, replay, or load and replay; and how good the estimates were.

Pure: seconds come in as numbers, nothing is measured here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from kvloom.manager.estimates import Fit
from kvloom.manager.surveys import Reach, Survey
from kvloom.manager.ways import PATIENCE, Choice, Option, RecoveryStats, Refused, Way, Why
from kvloom.spec.model_spec import ModelSpec
from kvloom.spec.replay import Span, replay_span
from kvloom.types import Grade

CLOSE = 0.05
"""Another way than computing must promise to be this much faster, as a share."""
RETRY = 64
"""Requests that a tier may look too slow for before it is tried again."""
UNMEASURED = (1e-3, 1e-9)
"""Seconds per load and per byte of a tier of which nothing is known."""
LEAST_PATIENCE = 0.25
"""Seconds that a tier always has to say what it knows: a thread of a busy machine may need some to begin."""
REMEMBERED = 256
"""Choices whose estimate and outcome are kept."""
_AS_EXPECTED = (0.0, 1.0), 1.0


class Recovery:
    """The planner of one model on one machine.  Not thread-safe.

    Args:
        spec: the model.
        tiers: names of the colder tiers, the nearest first.
    """

    def __init__(self, spec: ModelSpec, tiers: Sequence[str] = ()) -> None:
        self.spec = spec
        self.tiers = tuple(tiers)
        self.stats = RecoveryStats()
        self._prefill, self._replay = Fit(3), Fit(3)
        self._loads = tuple(Fit(2, keep=0.85) for _ in self.tiers)
        # By way and tiers: seconds that it took as a constant (asking, planning, publishing) and a share of its parts.
        self._whole: dict[tuple[Way, int], Fit] = {}
        self._passed = 0
        self._pairs: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)

    # ---------------------------------------------------------------- choosing

    def choose(self, survey: Survey, way: Way | None = None) -> Choice:
        """The way with the lowest expected time to the first token; or ``way`` where it is possible, else computing."""
        options, refused = self.options(survey)
        if way is None:
            chosen, why = self._best(options)
        else:
            chosen, why = next((o for o in reversed(options) if o.way is way), options[0]), Why.ASKED
        self.stats.chosen[chosen.way.value] += 1
        self.stats.reasons[why.value] += 1
        return Choice(self.stats.chosen.total(), chosen, why, options, refused)

    def options(self, survey: Survey) -> tuple[tuple[Option, ...], tuple[Refused, ...]]:
        """Every way with its estimates, and those that are not possible; changes nothing."""
        end = survey.tokens
        options = [self._option(Way.RECOMPUTE, survey.reused, end)]
        options += [self._option(Way.RESTORE, reach.position, end, reach) for reach in survey.restored]
        refused = []
        for reach in survey.replayed:
            for way in (Way.EXACT_REPLAY, Way.BOUNDED_REPLAY):
                exact = way is Way.EXACT_REPLAY
                span = replay_span(self.spec, reach.position, reach.missing, exact=exact, skip=survey.reused)
                grade = min(Grade.FAITHFUL if exact else Grade.APPROXIMATE, reach.grade)
                if grade < survey.floor:
                    reason = f"what it makes is {grade} at best, and the request asks for {survey.floor}"
                    refused.append(Refused(way, reach.position, reason))
                elif not span:
                    refused.append(Refused(way, reach.position, span.reason))
                else:
                    options.append(self._option(way, reach.position, end, reach, span, grade))
        return tuple(options), tuple(refused)

    def _best(self, options: Sequence[Option]) -> tuple[Option, Why]:
        recompute = options[0]
        if len(options) == 1:
            return recompute, Why.ONLY
        if recompute.expected_s is None:
            return min(options, key=_forwarded), Why.UNKNOWN
        best = min(options, key=_expected)
        loads = [o for o in options if o.reach is not None and o.reach.tiers]
        if best.reach is not None and best.reach.tiers:
            self._passed = 0
        elif loads:
            self._passed += 1
            if self._passed > RETRY:
                self._passed = 0
                return min(loads, key=_expected), Why.RETRY
        if best is not recompute and _expected(best) > (1.0 - CLOSE) * recompute.expected_s:
            return recompute, Why.CLOSE
        return best, Why.FASTEST

    def _option(
        self,
        way: Way,
        position: int,
        end: int,
        reach: Reach | None = None,
        span: Span | None = None,
        grade: Grade = Grade.CANONICAL,
    ) -> Option:
        prefill = self._seconds(self._prefill, self._replay, position, end)
        replay: float | None = 0.0
        if span is not None:
            replay = self._seconds(self._replay, self._prefill, span.start, span.position)
        sizes = [] if reach is None else [(tier, n) for tier, n in enumerate(reach.tier_bytes) if n]
        load = sum((self.load_s(tier, n_bytes) for tier, n_bytes in sizes), 0.0)
        latency = sum((self._latency_s(tier) for tier, _ in sizes), 0.0)
        expected = None
        if prefill is not None and replay is not None:
            parts = load + replay + prefill
            whole = self._whole.get((way, _tiers(reach)))
            expected = parts if whole is None else whole.estimate((1.0, parts))
        return Option(way, position, reach, span, grade, load, replay, prefill, expected, latency)

    def load_s(self, tier: int, n_bytes: int) -> float:
        """Seconds for one load of ``n_bytes`` from a tier; 0 without bytes."""
        if not n_bytes:
            return 0.0
        fit = self._loads[tier]
        if not fit.observations:
            return UNMEASURED[0] + UNMEASURED[1] * n_bytes
        return fit.estimate((1.0, float(n_bytes)))

    def patience_s(self, tokens: int) -> float | None:
        """Seconds to wait at most for what tiers know of a prompt: a tenth of computing it; None: nobody knows that."""
        computing = self._seconds(self._prefill, self._replay, 0, tokens)
        return None if computing is None else max(LEAST_PATIENCE, PATIENCE * computing)

    def _latency_s(self, tier: int) -> float:
        fit = self._loads[tier]
        return float(fit.rates[0]) if fit.observations else UNMEASURED[0]

    def _seconds(self, fit: Fit, other: Fit, start: int, end: int) -> float | None:
        """Seconds to run the tokens [start, end) in chunks, by ``other`` while ``fit`` has seen none; None: neither."""
        if start >= end:
            return 0.0
        fit = fit if fit.observations else other
        if not fit.observations:
            return None
        segment = self.spec.segment_tokens
        return fit.estimate(_work(start, end, -(-end // segment) - start // segment))

    # ---------------------------------------------------------------- learning

    def prefilled(self, start: int, tokens: int, seconds: float) -> None:
        """A forward over the tokens [start, start + tokens) of a prompt took ``seconds``."""
        self._prefill.observe(_work(start, start + tokens, 1), seconds)

    def loaded(self, tier: int, n_bytes: int, seconds: float) -> None:
        """A load of ``n_bytes`` from a tier took ``seconds``."""
        if n_bytes:
            self._loads[tier].observe((1.0, float(n_bytes)), seconds)

    def late(self, tier: int, n_bytes: int, seconds: float) -> None:
        """A load was given up: ``n_bytes`` took at least ``seconds``."""
        if seconds > self.load_s(tier, n_bytes):
            self.loaded(tier, n_bytes, seconds)

    def replayed(self, span: Span, forwards: int, seconds: float) -> None:
        """A replay of ``span`` took ``forwards`` calls of the model and ``seconds`` in all."""
        self._replay.observe(_work(span.start, span.position, forwards), seconds)
        self.stats.replays += 1
        self.stats.replayed_tokens += span.tokens
        self.stats.replayed_forwards += forwards

    def observed(self, choice: Choice, seconds: float, *, given_up: bool = False) -> None:
        """The first token came after ``seconds``; ``given_up``: not by the way that was chosen."""
        self.stats.given_up += given_up
        expected, chosen = choice.expected_s, choice.chosen
        self._pairs.append(
            {
                "number": choice.number,
                "way": choice.way.value,
                "why": choice.why.value,
                "position": choice.position,
                "expected_s": expected,
                "actual_s": seconds,
                "given_up": given_up,
                "options": [option.to_json() for option in choice.options],
            }
        )
        if chosen.parts_s and not given_up:
            whole = self._whole.setdefault((chosen.way, _tiers(chosen.reach)), Fit(2, keep=0.9, prior=_AS_EXPECTED))
            whole.observe((1.0, chosen.parts_s), seconds)

    # ---------------------------------------------------------------- looking

    def to_json(self) -> dict[str, Any]:
        """Counters, what was measured, and the last choices with estimate and outcome, as plain values."""
        return {
            "chosen": dict(self.stats.chosen),
            "reasons": dict(self.stats.reasons),
            "given_up": self.stats.given_up,
            "replays": self.stats.replays,
            "replayed_tokens": self.stats.replayed_tokens,
            "replayed_forwards": self.stats.replayed_forwards,
            "prefill": _shown(self._prefill, ("s_per_forward", "s_per_token", "s_per_token_and_context")),
            "replay": _shown(self._replay, ("s_per_forward", "s_per_token", "s_per_token_and_context")),
            "tiers": {
                name: _shown(fit, ("s_per_load", "s_per_byte"))
                for name, fit in zip(self.tiers, self._loads, strict=True)
            },
            "choices": list(self._pairs),
        }


def _work(start: int, end: int, forwards: int) -> tuple[float, float, float]:
    """Forwards, tokens, and tokens times what each looks back on."""
    return float(forwards), float(end - start), (float(end) ** 2 - float(start) ** 2) / 2.0


def _expected(option: Option) -> float:
    assert option.expected_s is not None
    return option.expected_s


def _forwarded(option: Option) -> tuple[int, int]:
    """Tokens that must be run, fewest first; then those that a replay runs."""
    replayed = 0 if option.span is None else option.span.tokens
    return replayed - option.position, replayed


def _tiers(reach: Reach | None) -> int:
    return 0 if reach is None else reach.tiers


def _shown(fit: Fit, names: Sequence[str]) -> dict[str, Any]:
    if not fit.observations:
        return {"observations": 0}
    rates = dict(zip(names, fit.rates.tolist(), strict=True))
    return {"observations": fit.observations, "error": fit.error, **rates}
