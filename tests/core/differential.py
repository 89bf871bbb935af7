"""One integer seed -> one long random life of a manager, lived twice: by the core and by the reference.

After every step the two must agree on everything: results, errors, slots, pages, eviction order, the index
with its ghosts, block tables, plans, explanations and counters.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.core import compare
from tests.core.reference.checkpoints import checkpoint
from tests.core.reference.leasing import fork
from tests.core.reference.manager import RefManager
from tests.core.reference.plans import Ticket
from tests.core.reference.sequence import RefSequence
from tests.core.workshop import cut_statically
from tests.core.worlds import World

from kvloom.config import Device
from kvloom.errors import CapacityError, SequenceError
from kvloom.eviction import EvictionPolicy
from kvloom.manager import CachedSequence, Manager
from kvloom.manager.decoding import Batch
from kvloom.plan import CopyPlan
from kvloom.types import Grade, Kind

SALTS = (b"", b"tenant", b"other")
EXTRA_KEYS: tuple[tuple[tuple[str, str | bytes | int], ...], ...] = (
    (),
    (),
    (("lora", "tenant"),),
    (("lora", b"tenant"),),
)


@dataclass
class Running:
    """One sequence in both worlds."""

    fast: CachedSequence
    ref: RefSequence


class DifferentError(AssertionError):
    """The core and the reference disagree."""


class Life:
    """Both managers, and the random operations on them."""

    def __init__(self, world: World, seed: int, policy: EvictionPolicy | str = "lru") -> None:
        self.world = world
        self.random = random.Random(seed)
        self.seed = seed
        with cut_statically() if world.split else nullcontext():
            self.fast = Manager(
                world.spec,
                [Device(world.arena)],
                max_sequences=world.max_sequences,
                max_nodes=world.max_nodes,
                policy=policy,
            )
        self.ref = RefManager.beside(self.fast, world.max_sequences)
        self.ranked = self.fast.policy.name == "priority"
        self.sequences: list[Running] = []
        self.closed: list[Running] = []
        self.plans: list[CopyPlan] = []
        self.stale_plans: list[CopyPlan] = []
        self.prompts: list[list[int]] = [[]]
        self.kept: list[list[int]] = []
        self.batch: tuple[Batch, list[Running]] | None = None
        self.log: list[str] = []
        self.errors = 0
        self.steps = 0
        self.hits = [0, 0, 0]
        segment = world.spec.segment_tokens
        self.longest = next(n for n in range(8 * segment, 0, -1) if self.ref.fits(n)) * 2 // 3 + 2

    # ---------------------------------------------------------------- running both

    def run(self, steps: int) -> None:
        """Take ``steps`` random steps, comparing after each."""
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        """One random operation on both, and the comparison."""
        operations, weights = zip(*self._menu(), strict=True)
        operation = self.random.choices(operations, weights)[0]
        operation()
        self._compare()

    def _menu(self) -> list[tuple[Callable[[], None], int]]:
        menu: list[tuple[Callable[[], None], int]] = [
            (self._open, 8 if len(self.sequences) < self.world.max_sequences else 1),
            (self._clear, 1 if self.random.random() < 0.1 else 0),
            (self._drop, 1 if self.random.random() < 0.4 else 0),
            (self._evict, 1 if self.random.random() < 0.5 else 0),
            (self._stale_plan, 1),
        ]
        if self.plans:
            menu.append((self._plan, 12))
        if self.sequences:
            menu += [(self._go_on, 40), (self._checkpoint, 5), (self._fork, 2), (self._close, 7), (self._batch, 2)]
        if self.batch is not None:
            menu.append((self._step_batch, 6))
        if self.closed:
            menu.append((self._after_close, 1))
        return menu

    def _both(self, what: str, fast: Callable[[], Any], ref: Callable[[], Any]) -> tuple[Any, Any] | None:
        """Run one operation in both worlds; None when both raised the same error."""
        self.log.append(what)
        results: list[Any] = []
        errors: list[Any] = []
        for act in (fast, ref):
            try:
                results.append(act())
                errors.append(None)
            except CapacityError as e:
                results.append(None)
                errors.append((CapacityError, e.needed, e.cap, e.in_use, e.never_fits))
            except SequenceError:
                results.append(None)
                errors.append((SequenceError,))
        if errors[0] != errors[1]:
            self._fail([f"error:\n    core      {errors[0]}\n    reference {errors[1]}"])
        if errors[0] is not None:
            self.errors += 1
            return None
        return results[0], results[1]

    def _compare(self) -> None:
        try:
            self.fast.check_integrity()
        except Exception as e:
            self._fail([repr(e)])
        wrong = compare.differences(compare.fast_state(self.fast), compare.reference_state(self.ref))
        for number, s in enumerate(self.sequences):
            fast, ref = compare.fast_sequence(self.fast, s.fast), compare.reference_sequence(self.ref, s.ref)
            wrong += [f"sequence {number} {line}" for line in compare.differences(fast, ref)]
        if wrong:
            self._fail(wrong)

    def _fail(self, wrong: list[str]) -> None:
        where = f"{self.world.name}, {self.fast.policy.name}, seed {self.seed}, step {len(self.log)}"
        tail = "\n  ".join(self.log[-12:])
        raise DifferentError(f"{where}\n  {tail}\n" + "\n".join(wrong))

    def _took_plan(self, what: str, fast: CopyPlan, ref: Ticket | None) -> None:
        one, other = compare.fast_plan(fast), compare.reference_plan(ref)
        if one != other:
            self._fail([f"plan of {what}:\n    core      {one}\n    reference {other}"])
        if fast.ticket:
            self.plans.append(fast)

    # ---------------------------------------------------------------- operations

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.world.alphabet) for _ in range(count)]

    def _prompt(self) -> list[int]:
        """Often a continuation of something known: a whole earlier sequence, or one that leaves it somewhere."""
        segment = self.world.spec.segment_tokens
        known = self.random.choice(self.kept if self.kept and self.random.random() < 0.6 else self.prompts)
        cut = self.random.choice(
            [len(known)] * 4 + [self.random.randint(0, len(known)), len(known) // segment * segment]
        )
        more = self.random.choice([1, 1, 2, self.random.randrange(2 * segment + 2)])
        prompt = known[:cut] + self._tokens(more)
        return prompt[: self.longest] or self._tokens(1)

    def _open(self) -> None:
        prompt = self._prompt()
        salt = self.random.choices(SALTS, (20, 2, 1))[0]
        extra = self.random.choice(EXTRA_KEYS) if self.random.random() < 0.1 else ()
        floor = self.random.choices(list(Grade), (3, 9, 1))[0]
        priority = self.random.choice([0, 0, 0, 1, 5]) if self.ranked else 0
        how = {"salt": salt, "extra_keys": extra, "floor": floor, "priority": priority}
        made = self._both(
            f"open {prompt} {salt!r} {extra} {floor.name} priority {priority}",
            lambda: self.fast.open(np.array(prompt, dtype=np.int32), **how),
            lambda: self.ref.open(prompt, salt, extra, floor, priority),
        )
        if made is None:
            return
        running = Running(*made)
        self.sequences.append(running)
        tail = running.fast.reused % self.world.spec.segment_tokens
        self.hits[0 if not running.fast.reused else 2 if tail else 1] += 1
        restore = self.ref.tickets.get(running.ref.restore)
        self._took_plan("open", running.fast.restore, restore)
        self.prompts.append(prompt)
        if len(self.prompts) > 12:
            self.prompts.pop(self.random.randrange(len(self.prompts)))

    def _pick(self) -> tuple[int, Running]:
        at = self.random.randrange(len(self.sequences))
        return at, self.sequences[at]

    def _go_on(self) -> None:
        """The next thing an engine would do with one of the sequences."""
        at, s = self._pick()
        waiting = [p for p in self.plans if p.ticket == s.fast.restore.ticket]
        if waiting and self.random.random() < 0.95:
            self._finish(waiting[0], executed=self.random.random() < 0.95)
        elif s.ref.broken and self.random.random() < 0.8:
            self._both(f"close {at}", s.fast.close, s.ref.close)
            self.closed = [*self.closed[-3:], self.sequences.pop(at)]
        elif s.ref.stepped and self.batch is not None and self.random.random() < 0.8:
            self._step_batch()
        elif s.ref.pending:
            self._commit_or_roll_back(at, s)
        else:
            self._append(at, s)

    def _append(self, at: int, s: Running) -> None:
        segment = self.world.spec.segment_tokens
        to_boundary = segment - s.ref.length % segment
        count = self.random.choice([1, 1, 2, to_boundary, segment, segment, 2 * segment, 3 * segment + 1])
        if s.ref.length + count > self.longest and self.random.random() < 0.9:
            count = 1
        top = self.world.spec.max_positions
        if top and s.ref.length + count > top:
            return
        known = [p for p in self.prompts if p[: s.ref.length] == s.ref.tokens[: s.ref.length]]
        ids = self._tokens(count)
        if known and self.random.random() < 0.5:
            ahead = self.random.choice(known)[s.ref.length : s.ref.length + count]
            ids = ahead + ids[len(ahead) :]
        self._both(
            f"append {at} {ids}", lambda: s.fast.append(np.array(ids, dtype=np.int32)), lambda: s.ref.append(ids)
        )

    def _commit_or_roll_back(self, at: int, s: Running) -> None:
        if self.random.random() < (0.5 if s.ref.stepped else 0.08):
            self._both(f"rollback {at}", s.fast.rollback, s.ref.rollback)
            return
        grade = self.random.choices(list(Grade), (1, 4, 40))[0]
        plans = self._both(f"commit {at} {grade.name}", lambda: s.fast.commit(grade), lambda: s.ref.commit(grade))
        if plans is not None:
            self._took_plan("commit", *plans)
            self.prompts.append(list(s.ref.tokens))
            self.prompts = self.prompts[-12:]

    def _batch(self) -> None:
        """Some of the sequences decode together from now on; one that cannot go on is refused."""
        able = [s for s in self.sequences if not s.ref.pending or s.ref.stepped or self.random.random() < 0.05]
        if len(able) > 1 or self.random.random() < 0.1:
            able = [s for s in able if self._can_go_on(s) or self.random.random() < 0.05]
        chosen = self.random.sample(able, self.random.randint(min(1, len(able)), len(able)))
        made = self._both(
            f"batch {[self.sequences.index(s) for s in chosen]}",
            lambda: self.fast.batch([s.fast for s in chosen]),
            lambda: [s.ref.usable() for s in chosen],
        )
        self.batch = None if made is None else (made[0], chosen)

    def _can_go_on(self, s: Running) -> bool:
        return not s.ref.broken and s.ref.restore not in self.ref.tickets

    def _step_batch(self) -> None:
        """A few steps, often over the end of a segment; the last one is committed at once or later."""
        assert self.batch is not None
        batch, chosen = self.batch
        refs = [s.ref for s in chosen]
        for _ in range(self.random.choice([1, 1, 2, self.world.spec.segment_tokens])):
            top = self.world.spec.max_positions or 10**9
            longest = max((r.length + r.pending for r in refs), default=0)
            if longest >= top or (longest > self.longest and self.random.random() < 0.9) or self.random.random() < 0.3:
                plans = self._both("finish", lambda: self.fast.finish(batch), lambda: self.ref.finish_step(refs))
            else:
                tokens = self._next_tokens(refs)
                plans = self._both(
                    f"step {tokens}",
                    lambda t=tokens: self.fast.step(batch, np.array(t, dtype=np.int32)),
                    lambda t=tokens: self.ref.step(refs, t),
                )
            if plans is None:
                self.batch = self.batch if self.random.random() < 0.5 else None
                return
            if len(plans[0]) != len(plans[1]):
                self._fail([f"plans of a step: core {plans[0]}, reference {plans[1]}"])
            for fast, ref in zip(*plans, strict=True):
                self._took_plan("step", fast, ref)
            self.steps += 1
            self._compare()

    def _next_tokens(self, refs: Sequence[RefSequence]) -> list[int]:
        """Often what some prompt says next."""
        tokens = []
        for r in refs:
            at = r.length + r.pending
            known = [p[at] for p in self.prompts if len(p) > at and p[:at] == r.tokens[:at]]
            tokens.append(self.random.choice(known) if known and self.random.random() < 0.7 else self._tokens(1)[0])
        return tokens

    def _checkpoint(self) -> None:
        at, s = self._pick()
        self._keep(at, s)

    def _keep(self, at: int, s: Running) -> None:
        plans = self._both(f"checkpoint {at}", s.fast.checkpoint, lambda: checkpoint(s.ref))
        if plans is not None:
            self._took_plan("checkpoint", *plans)
            self.kept = [*self.kept[-2:], list(s.ref.tokens)]
            if plans[0].ticket and self.random.random() < 0.7:
                self._finish(plans[0], executed=True)

    def _fork(self) -> None:
        at, s = self._pick()
        made = self._both(f"fork {at}", s.fast.fork, lambda: fork(s.ref))
        if made is not None:
            (child, plan), ref = made
            self.sequences.append(Running(child, ref))
            self._took_plan("fork", plan, self.ref.tickets.get(ref.restore))

    def _close(self) -> None:
        """Often at the end of a request: its end is kept, and it goes."""
        at, s = self._pick()
        if self.random.random() < 0.8 and not s.ref.pending:
            self._keep(at, s)
        self._both(f"close {at}", s.fast.close, s.ref.close)
        self.closed = [*self.closed[-3:], self.sequences.pop(at)]

    def _after_close(self) -> None:
        s = self.random.choice(self.closed)
        self._both("close again", s.fast.close, s.ref.close)
        self._both("append after close", lambda: s.fast.append(np.zeros(1, dtype=np.int32)), lambda: s.ref.append([0]))

    def _plan(self) -> None:
        plan = self.plans[0] if self.random.random() < 0.6 else self.random.choice(self.plans)
        self._finish(plan, executed=self.random.random() < 0.92)

    def _finish(self, plan: CopyPlan, *, executed: bool) -> None:
        self.plans = [p for p in self.plans if p.ticket != plan.ticket]
        self.stale_plans = [*self.stale_plans[-3:], plan]
        fast = self.fast.complete if executed else self.fast.abandon
        self._both(
            f"{'complete' if executed else 'abandon'} {plan.ticket}",
            lambda: fast(plan),
            lambda: self.ref.finish(plan.ticket, executed=executed),
        )

    def _stale_plan(self) -> None:
        plan = self.random.choice([*self.stale_plans, CopyPlan(ticket=0), CopyPlan(ticket=10**6)])
        self._finish(plan, executed=self.random.random() < 0.5)

    def _evict(self) -> None:
        smallest = min(g.slot_bytes for g in self.world.spec.groups)
        amount = self.random.choice([0, 1, smallest, 5 * smallest, 20 * smallest])
        self._same(f"evict {amount}", lambda: self.fast.evict(amount), lambda: self.ref.evict(amount))

    def _clear(self) -> None:
        salt = self.random.choice([None, *SALTS])
        self._same(f"clear {salt!r}", lambda: self.fast.clear(salt), lambda: self.ref.clear(salt))

    def _drop(self) -> None:
        group = self.random.choice(self.world.spec.groups)
        what: Kind | str = self.random.choice([group.name, group.kind])
        segment = self.world.spec.segment_tokens
        positions: Sequence[int | None] = [None, 0, segment, group.block_tokens, 2 * segment, 3 * segment + 1]
        position = self.random.choice(positions[1:]) if self.random.random() < 0.8 else None
        bad = self.random.random() < 0.5
        self._same(
            f"drop {what!r} {position} quarantine={bad}",
            lambda: self.fast.drop(what, position, quarantine=bad),
            lambda: self.ref.drop(what, position, quarantine=bad),
        )

    def _same(self, what: str, fast: Callable[[], int], ref: Callable[[], int]) -> None:
        values = self._both(what, fast, ref)
        if values is not None and values[0] != values[1]:
            self._fail([f"{what}: core {values[0]}, reference {values[1]}"])
