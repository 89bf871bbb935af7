"""The planner in worlds whose costs are known: what it picks, how it learns, when it gives up."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvloom.manager.estimates import Fit
from kvloom.manager.recovery import LEAST_PATIENCE, RETRY, Recovery
from kvloom.manager.surveys import Reach, Survey
from kvloom.manager.ways import LATE, PATIENCE, Choice, Option, Standing, Way, Why
from kvloom.spec.model_spec import GroupSpec, ModelSpec, TensorSpec
from kvloom.types import Grade, Kind

KEYS = TensorSpec("keys", (1, 4), "float32", entry_axis=1)
SPEC = ModelSpec(
    "two windows over full attention",
    (
        GroupSpec("window.64", Kind.WINDOW, (0, 1), (KEYS,), block_tokens=16, window=64),
        GroupSpec("full", Kind.COMPRESSED, (2,), (KEYS,), block_tokens=16),
    ),
    16,
    32,
)
NOTHING_CAME = Standing(0.0, 0.0, 0.1)
REPLAY = 128
"""What both windows have seen of a position that is a multiple of the block: two times 63 tokens and the row itself."""


class World:
    """A machine: seconds per forward, per token, per token and token looked back on; per load and per byte."""

    def __init__(self, rates: tuple[float, float, float], disk: tuple[float, float], noise: float = 0.0) -> None:
        self.rates, self.disk, self.noise = rates, disk, noise
        self.random = random.Random(7)

    def run(self, start: int, end: int) -> float:
        forwards = -(-end // 32) - start // 32 if end > start else 0
        work = (forwards, end - start, (end * end - start * start) / 2)
        return self._noisy(sum(rate * amount for rate, amount in zip(self.rates, work, strict=True)))

    def load(self, n_bytes: int) -> float:
        return self._noisy(self.disk[0] + self.disk[1] * n_bytes) if n_bytes else 0.0

    def _noisy(self, seconds: float) -> float:
        return seconds * self.random.uniform(1.0 - self.noise, 1.0 + self.noise)

    def seconds(self, option: Option, tokens: int) -> float:
        load = 0.0 if option.reach is None else sum(self.load(n) for n in option.reach.tier_bytes)
        replay = 0.0 if option.span is None else self.run(option.span.start, option.span.position)
        return load + replay + self.run(option.position, tokens)

    def teach(self, recovery: Recovery, times: int = 3) -> None:
        for _ in range(times):
            for start in range(0, 2048, 32):
                recovery.prefilled(start, 32, self.run(start, start + 32))
            for n_bytes in (1 << 14, 1 << 18, 1 << 20):
                recovery.loaded(0, n_bytes, self.load(n_bytes))


def reach(position: int, n_bytes: int = 0, missing: tuple[int, ...] = (), grade: Grade = Grade.CANONICAL) -> Reach:
    return Reach(position, 1 if n_bytes else 0, (n_bytes,), (1 if n_bytes else 0,), {}, missing, grade)


def survey(tokens: int, *, stored: int = 0, floor: Grade = Grade.FAITHFUL, reused: int = 0) -> Survey:
    """Windows are lost on the device; ``stored``: bytes of them in the tier."""
    restored = (reach(tokens, stored),) if stored else ()
    return Survey(tokens, reused, floor, restored, (reach(tokens, missing=(0,)),))


FAST, SLOW = (1e-3, 1e-9), (1e-3, 1e-5)
COSTS = (1e-4, 5e-5, 1e-9)


def taught(disk: tuple[float, float], noise: float = 0.0) -> tuple[World, Recovery]:
    world, recovery = World(COSTS, disk, noise), Recovery(SPEC, ["disk"])
    world.teach(recovery)
    return world, recovery


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_the_fastest_way_is_picked(noise: float) -> None:
    """Every option is best somewhere, and picked there; what is picked is never a tenth worse than computing."""
    best_of, right, cells = dict.fromkeys(Way, 0), 0, 0
    for disk in (FAST, (1e-3, 1e-7), (1e-3, 1e-6), SLOW):
        world, recovery = taught(disk, noise)
        quiet = World(COSTS, disk)
        for tokens in (64, 160, 192, 320, 640, 1280, 2048):
            for stored in (1 << 12, 1 << 16, 1 << 20):
                choice = recovery.choose(survey(tokens, stored=stored))
                costs = {id(option): quiet.seconds(option, tokens) for option in choice.options}
                best = min(choice.options, key=lambda option: costs[id(option)])
                best_of[best.way] += 1
                right += costs[id(choice.chosen)] <= 1.05 * costs[id(best)]
                assert costs[id(choice.chosen)] <= 1.1 * costs[id(choice.options[0])] * (1 + noise)
                cells += 1
                recovery.observed(choice, world.seconds(choice.chosen, tokens))
    assert all(best_of[way] >= 5 for way in (Way.RECOMPUTE, Way.RESTORE, Way.EXACT_REPLAY)), best_of
    assert right >= 0.9 * cells, (right, cells)


def test_a_disk_that_became_slow_is_noticed_and_tried_again() -> None:
    world, recovery = taught(FAST)
    asked = survey(1024, stored=1 << 20)
    assert recovery.choose(asked).way is Way.RESTORE
    world.disk = SLOW
    for _ in range(12):
        choice = recovery.choose(asked)
        if choice.way is Way.RESTORE:
            recovery.loaded(0, 1 << 20, world.load(1 << 20))
    assert recovery.choose(asked).way is Way.EXACT_REPLAY
    ways = [recovery.choose(asked) for _ in range(RETRY + 1)]
    retried = [choice for choice in ways if choice.why is Why.RETRY]
    assert len(retried) == 1
    assert retried[0].way is Way.RESTORE


def test_while_nothing_is_known_as_few_tokens_as_possible_are_computed() -> None:
    recovery = Recovery(SPEC, ["disk"])
    choice = recovery.choose(survey(1024, stored=1 << 20))
    assert (choice.way, choice.why, choice.recompute_s) == (Way.RESTORE, Why.UNKNOWN, None)
    choice = recovery.choose(survey(1024))
    assert (choice.way, choice.why) == (Way.EXACT_REPLAY, Why.UNKNOWN)
    assert choice.chosen.span is not None
    assert choice.chosen.span.tokens == REPLAY
    assert choice.deadline_s is None
    assert not choice.give_up(10.0, NOTHING_CAME)


def test_bounded_replay_only_for_who_accepts_it() -> None:
    _, recovery = taught(SLOW)
    assert Way.BOUNDED_REPLAY not in {o.way for o in recovery.options(survey(1024))[0]}
    choice = recovery.choose(survey(1024, floor=Grade.APPROXIMATE))
    assert choice.way is Way.BOUNDED_REPLAY
    assert choice.chosen.grade is Grade.APPROXIMATE
    options, refused = recovery.options(survey(1024, floor=Grade.CANONICAL))
    assert [o.way for o in options] == [Way.RECOMPUTE]
    assert {r.way for r in refused} == {Way.EXACT_REPLAY, Way.BOUNDED_REPLAY}
    assert all("asks for canonical" in r.reason for r in refused)


def test_a_replay_over_an_approximate_prefix_is_approximate() -> None:
    _, recovery = taught(SLOW)
    asked = replace(
        survey(1024, floor=Grade.APPROXIMATE), replayed=(reach(1024, missing=(0,), grade=Grade.APPROXIMATE),)
    )
    assert {o.grade for o in recovery.options(asked)[0] if o.span} == {Grade.APPROXIMATE}


def test_a_way_that_is_asked_for_is_gone_where_it_is_possible() -> None:
    _, recovery = taught(FAST)
    asked = survey(1024, stored=1 << 20)
    for way in (Way.RECOMPUTE, Way.RESTORE, Way.EXACT_REPLAY):
        choice = recovery.choose(asked, way)
        assert (choice.way, choice.why) == (way, Why.ASKED)
        assert not choice.give_up(1e9, NOTHING_CAME)
    assert recovery.choose(asked, Way.BOUNDED_REPLAY).way is Way.RECOMPUTE


def test_a_replay_that_is_no_shorter_is_refused_with_its_reason() -> None:
    _, recovery = taught(FAST)
    options, refused = recovery.options(survey(96))
    assert [o.way for o in options] == [Way.RECOMPUTE]
    assert "no later than computing" in refused[0].reason
    options, refused = recovery.options(survey(1024, reused=900))
    assert [o.way for o in options] == [Way.RECOMPUTE]


def test_when_it_is_close_computing_is_chosen() -> None:
    world, recovery = taught((0.0, 1e-9))
    everything = world.run(0, 512)
    n_bytes = int(0.97 * everything / 1e-9)
    asked = Survey(512, 0, Grade.FAITHFUL, (reach(512, n_bytes),), ())
    choice = recovery.choose(asked)
    assert (choice.way, choice.why) == (Way.RECOMPUTE, Why.CLOSE)


def test_a_load_is_given_up_when_it_is_not_worth_it() -> None:
    world, recovery = taught(FAST)
    choice = recovery.choose(Survey(1024, 0, Grade.FAITHFUL, (reach(1024, 20 << 20),), ()))
    assert choice.way is Way.RESTORE
    compute, load = choice.recompute_s, choice.chosen.load_s
    assert compute == pytest.approx(world.run(0, 1024), rel=0.05)
    assert load == pytest.approx(FAST[0] + FAST[1] * (20 << 20), rel=0.05)
    assert choice.chosen.latency_s == pytest.approx(FAST[0], rel=0.1)
    assert compute is not None
    assert not choice.give_up(0.9 * PATIENCE * compute, Standing(0.0, 0.0, 0.01)), "a tenth is always waited for"
    assert choice.give_up(0.12 * compute, Standing(0.0, 0.0, 0.01)), "nothing came"
    assert not choice.give_up(5.0 * compute, Standing(1.0, 5.0 * compute, 1.0)), "it is there"
    assert choice.deadline_s == pytest.approx((1 + PATIENCE) * compute, rel=0.01)
    assert load is not None
    latency = choice.chosen.latency_s

    def due(share: float) -> float:
        return latency + share * (load - latency)

    late = PATIENCE * compute + LATE * load
    assert not choice.give_up(0.99 * late, Standing(0.0, 0.0, 1.0)), "its only piece is not late enough"
    assert choice.give_up(1.01 * late, Standing(0.0, 0.0, 1.0)), "nor did it come then"
    assert choice.give_up(due(0.9) + late, Standing(0.9, due(0.9), 1.0)), "the last one does not come"
    for came in range(1, 8):  # eight pieces that come when they should: right before the next one nothing is late
        standing = Standing(came / 8, due(came / 8), (came + 1) / 8)
        assert not choice.give_up(due((came + 1) / 8), standing)
    slow = Standing(0.25, 4.0 * due(0.25), 0.5)
    assert 4.0 * load > compute + slow.arrived_s
    assert choice.give_up(slow.arrived_s, slow), "at this pace it ends later than computing would"
    small = recovery.choose(survey(1024, stored=1 << 16)).give_up
    assert not small(0.11 * compute, Standing(0.1, 0.11 * compute, 0.2)), "late, but it still ends early"


def test_a_load_nearly_as_long_as_computing_is_not_given_up_between_its_pieces() -> None:
    world, recovery = taught((0.0, 1e-9))
    n_bytes = int(0.9 * world.run(0, 1024) / 1e-9)
    choice = recovery.choose(Survey(1024, 0, Grade.FAITHFUL, (reach(1024, n_bytes),), ()))
    assert choice.way is Way.RESTORE
    load = choice.chosen.load_s
    assert load is not None
    for came in range(8):
        for part in (0.3, 0.6, 0.99):
            standing = Standing(came / 8, came / 8 * load, (came + 1) / 8)
            assert not choice.give_up((came + part) / 8 * load, standing), (came, part)


def test_what_a_hung_tier_costs_does_not_grow_with_every_retry() -> None:
    """Each time that it is given up it looks slower, and what looks slow has no longer time to show that it is not."""
    world, recovery = taught(FAST)
    compute, n_bytes = world.run(0, 1024), 20 << 20
    one_piece = Standing(0.0, 0.0, 1.0)
    times = []
    for _ in range(40 * (RETRY + 1)):
        choice = recovery.choose(survey(1024, stored=n_bytes))
        if choice.why is Why.RETRY:
            steps = np.linspace(0.0, 10.0 * compute, 1001)
            times.append(next(at for at in steps.tolist() if choice.give_up(at, one_piece)))
            recovery.late(0, n_bytes, times[-1])
    assert len(times) > 30
    assert max(times) <= (LATE + PATIENCE) * compute * 1.05
    load = choice.options[1].load_s
    assert load is not None
    assert load > compute, "so it is not chosen"


def test_a_question_is_worth_a_tenth_of_computing() -> None:
    assert Recovery(SPEC, ["disk"]).patience_s(1 << 20) is None
    world, recovery = taught(FAST)
    assert recovery.patience_s(64) == LEAST_PATIENCE
    assert recovery.patience_s(1 << 18) == pytest.approx(PATIENCE * world.run(0, 1 << 18), rel=0.02)


def test_what_happens_is_learned_and_shown() -> None:
    _, recovery = taught(FAST)
    asked, estimates = survey(1024, stored=1 << 20), []
    for _ in range(30):  # something that no part of the estimate knows takes as long again
        choice = recovery.choose(asked)
        estimates.append(choice.expected_s)
        restore = next(o for o in choice.options if o.way is Way.RESTORE)
        assert restore.load_s is not None
        recovery.observed(choice, 2.0 * restore.load_s)
    first, last = estimates[0], estimates[-1]
    assert first is not None
    assert last == pytest.approx(2.0 * first, rel=0.1)
    shown = recovery.to_json()
    assert shown["chosen"] == {"restore": 30}
    assert len(shown["choices"]) == 30
    assert {"expected_s", "actual_s", "options"} <= shown["choices"][-1].keys()
    assert shown["tiers"]["disk"]["s_per_byte"] == pytest.approx(1e-9, rel=0.05)
    chunk = shown["prefill"]["s_per_forward"] + 32 * shown["prefill"]["s_per_token"]
    assert chunk == pytest.approx(1e-4 + 32 * 5e-5, rel=0.05)


def test_what_every_way_costs_beside_its_parts_is_learned() -> None:
    """Loads of all sizes take 4 ms more than their reads: what is small is computed then, what is large loaded."""
    world, recovery = taught(FAST)
    sizes = [(96, 1 << 14), (1024, 1 << 20), (256, 1 << 16), (2048, 4 << 20)]

    def asked(tokens: int, n_bytes: int) -> Survey:
        return Survey(tokens, 0, Grade.FAITHFUL, (reach(tokens, n_bytes),), ())

    assert recovery.choose(asked(*sizes[0])).way is Way.RESTORE
    for tokens, n_bytes in 20 * sizes:
        choice = recovery.choose(asked(tokens, n_bytes), Way.RESTORE)
        recovery.observed(choice, 4e-3 + world.seconds(choice.chosen, tokens))
    for tokens, n_bytes in sizes:
        option = recovery.choose(asked(tokens, n_bytes)).options[1]
        assert option.expected_s == pytest.approx(4e-3 + world.seconds(option, tokens), rel=0.1)
    assert recovery.choose(asked(*sizes[0])).way is Way.RECOMPUTE
    assert recovery.choose(asked(*sizes[1])).way is Way.RESTORE


def test_a_load_that_was_given_up_teaches_only_that_a_tier_is_slower() -> None:
    _, recovery = taught(FAST)
    before = recovery.load_s(0, 1 << 20)
    recovery.late(0, 1 << 20, 0.5 * before)
    assert recovery.load_s(0, 1 << 20) == before
    recovery.late(0, 1 << 20, 3.0 * before)
    assert recovery.load_s(0, 1 << 20) > 1.1 * before


def test_given_up_loads_teach_no_bias() -> None:
    _, recovery = taught(FAST)
    choice = recovery.choose(survey(1024, stored=1 << 20))
    before = choice.expected_s
    recovery.observed(choice, 100.0, given_up=True)
    assert recovery.choose(survey(1024, stored=1 << 20)).expected_s == before
    assert recovery.stats.given_up == 1


# ---------------------------------------------------------------- fits


def observe(fit: Fit, rates: tuple[float, ...], count: int, noise: float = 0.0, seed: int = 0) -> None:
    draw = random.Random(seed)
    for _ in range(count):
        work = [draw.uniform(0.5, 2.0) * scale for scale in (1.0, 1e3, 1e6)[: len(rates)]]
        seconds = sum(r * w for r, w in zip(rates, work, strict=True))
        fit.observe(work, seconds * draw.uniform(1 - noise, 1 + noise))


def test_a_fit_finds_the_rates() -> None:
    fit = Fit(3)
    observe(fit, (0.2, 3e-4, 5e-7), 60)
    assert fit.rates == pytest.approx(np.array([0.2, 3e-4, 5e-7]), rel=0.02)
    assert fit.error < 0.05


def test_rates_are_never_negative_and_a_hiccup_moves_little() -> None:
    fit = Fit(2)
    observe(fit, (0.0, 1e-3), 40, noise=0.1)
    assert (fit.rates >= 0.0).all()
    before = fit.estimate((1.0, 1e3))
    fit.observe((1.0, 1e3), 50.0 * before)
    assert fit.estimate((1.0, 1e3)) < 1.2 * before


def test_a_fit_follows_a_change() -> None:
    fit = Fit(2)
    observe(fit, (0.0, 1e-3), 60)
    observe(fit, (0.0, 4e-3), 60, seed=1)
    assert fit.estimate((0.0, 1e3)) == pytest.approx(4.0, rel=0.35)


def test_odd_observations() -> None:
    fit = Fit(3)
    fit.observe((1.0, 2.0, 3.0), 0.0)
    fit.observe((1.0, 2.0, 3.0), -1.0)
    assert fit.observations == 0
    with pytest.raises(ValueError, match="nothing was observed"):
        fit.estimate((1.0, 2.0, 3.0))
    fit.observe((1.0, 32.0, 0.0), 0.5)
    assert fit.estimate((1.0, 32.0, 0.0)) == pytest.approx(0.5, rel=1e-3)


def test_choices_are_values() -> None:
    _, recovery = taught(FAST)
    choice: Any = recovery.choose(survey(1024, stored=1 << 20))
    assert isinstance(choice, Choice)
    with pytest.raises(AttributeError):
        choice.why = Why.ONLY
    assert {"way", "position", "load_bytes", "replay_tokens"} <= choice.chosen.to_json().keys()


def test_a_prior_is_an_estimate_that_observations_outweigh() -> None:
    fit = Fit(2, keep=0.9, prior=((0.0, 1.0), 1.0))
    assert fit.knows
    assert fit.estimate((1.0, 0.25)) == pytest.approx(0.25, rel=1e-5)
    for seconds in 20 * (1.0, 2.0, 4.0):
        fit.observe((1.0, seconds), 0.5 + 1.5 * seconds)
    assert fit.estimate((1.0, 2.0)) == pytest.approx(3.5, rel=0.05)
    assert not Fit(2).knows
