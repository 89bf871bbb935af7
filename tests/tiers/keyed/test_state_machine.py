"""Everything at random over a byte store that fails: nothing raised, no wrong byte, never above the cap (D1 to D8)."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from tests.tiers.keyed.stores import Faulty

from kvloom.testing.units import LAYOUT, SEGMENT, World, hit, tokens_of, wrong_bytes
from kvloom.tiers.keyed import KeyedTier
from kvloom.tiers.values import Unit
from kvloom.types import Grade

WORLD = World((400, 900, 90))
ROOTS = (b"a" * 32, b"b" * 32)
FAULTS = {
    "put": ["raise", "half", "late", "cut", "lost"],
    "get": ["raise", "other", "flip", "cut", "lost"],
    "delete": ["raise", "half", "late", "lost"],
}


class Machine(RuleBasedStateMachine):
    @initialize(capacity=st.sampled_from([14_000, 40_000, 1 << 20]), durable=st.booleans(), at_once=st.integers(1, 3))
    def begin(self, capacity: int, durable: bool, at_once: int) -> None:
        self.coming: dict[str, list[str]] = {"put": [], "get": [], "delete": []}
        self.lost = 0
        self.store = Faulty(self.fault)
        self.options = {"capacity": capacity, "name": "m", "durable": durable, "at_once": at_once}
        self.tier = KeyedTier(self.store, **self.options)

    def fault(self, what: str, _number: int) -> str | None:
        left = self.coming.get(what)
        fault = left.pop() if left else None
        self.lost += fault == "lost" and what == "delete"
        return fault if fault != "-" else None

    @rule(
        what=st.sampled_from(["put", "get", "delete"]),
        number=st.integers(0, 20),
        which=st.integers(0, 9),
        times=st.sampled_from([1, 1, 3, 30]),
    )
    def break_(self, what: str, number: int, which: int, times: int) -> None:
        faults = FAULTS[what]
        self.coming[what] = [faults[which % len(faults)]] * times + ["-"] * number

    @rule()
    def mend(self) -> None:
        self.coming = {"put": [], "get": [], "delete": []}

    def unit(self, prompt: int, segments: int, ragged: int, root: int, have: int, grade: int) -> Unit:
        tokens = tokens_of(prompt, 4)[: segments * SEGMENT]
        return WORLD.unit(
            tokens[: len(tokens) - ragged], root=ROOTS[root], have=min(have, segments - 1), grade=Grade(grade)
        )

    parts = {  # noqa: RUF012
        "prompt": st.integers(0, 3),
        "segments": st.integers(1, 4),
        "ragged": st.sampled_from([0, 0, 3]),
        "root": st.sampled_from([0, 0, 1]),
        "have": st.sampled_from([0, 0, 1, 3]),
        "grade": st.integers(0, 2),
    }

    @rule(**parts)
    def publish(self, **parts: int) -> None:
        unit = self.unit(**parts)
        done = self.tier.publish(unit)
        assert self.tier.lookup(LAYOUT, unit.digests).boundary[-1] or not done.stored

    @rule(**parts)
    def look(self, **parts: int) -> None:
        unit = self.unit(**parts)
        places = self.tier.lookup(unit.layout, unit.digests).places
        assert wrong_bytes(self.tier, places) == 0
        if not any(self.coming.values()) and self.tier.lookup(unit.layout, unit.digests).boundary[-1]:
            assert hit(self.tier, WORLD, unit) or not self.tier.lookup(unit.layout, unit.digests).boundary[-1], (
                "a unit that is found and cannot be had"
            )

    @rule(**parts)
    def touch(self, **parts: int) -> None:
        unit = self.unit(**parts)
        self.tier.touch(LAYOUT, unit.digests[-1].tobytes())
        self.tier.unit(LAYOUT, unit.digests[-1].tobytes())

    @rule(root=st.sampled_from([None, 0, 1]))
    def clear(self, root: int | None) -> None:
        self.tier.clear(None if root is None else LAYOUT, None if root is None else ROOTS[root])

    @rule(close=st.booleans())
    def restart(self, close: bool) -> None:
        if not self.options["durable"]:
            return
        if close:
            self.tier.close()
        self.mend()
        self.tier = KeyedTier(self.store, **self.options)
        self.lost = 0
        assert self.store.bytes == self.tier.usage().bytes

    @invariant()
    def counted(self) -> None:
        if not hasattr(self, "tier"):
            return
        self.tier.check_integrity()
        usage = self.tier.usage()
        assert usage.bytes <= usage.capacity
        assert self.store.bytes <= usage.bytes or self.lost, "more lies there than is said"

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.mend()
            unit = self.unit(0, 4, 0, 0, 0, 2)
            assert self.tier.publish(unit).stored, "it does not come back"
            assert hit(self.tier, WORLD, unit) or not self.tier.lookup(LAYOUT, unit.digests).boundary[-1]
            assert self.tier.publish(unit).stored
            assert hit(self.tier, WORLD, unit)
            self.tier.close()
            assert self.options["durable"] or self.lost or not self.store.kept


def test_everything_at_random_over_a_store_that_fails() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=120,
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
