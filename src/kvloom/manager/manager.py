"""The manager: decides what is reused, where everything lives and what goes.  It moves no bytes.

One thread owns a manager.  Every call either succeeds or raises and leaves everything as it was.  Bytes
move by ``CopyPlan`` values that the engine executes and then reports with ``complete`` (or ``abandon``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, cast

import numpy as np

from kvloom.config import Device
from kvloom.core import calls, sweep
from kvloom.core.fields import UNKEPT
from kvloom.core.integrity import check_books
from kvloom.core.namespace import ExtraKey
from kvloom.errors import ConfigError, InputError
from kvloom.eviction import EvictionPolicy, find_policy
from kvloom.manager import decoding
from kvloom.manager.books import Books
from kvloom.manager.colder import ColderTiers
from kvloom.manager.decoding import Batch
from kvloom.manager.explain import explain
from kvloom.manager.inputs import checked_plan, grade_of, whole_number
from kvloom.manager.leasing import take_hit
from kvloom.manager.sequence import CachedSequence
from kvloom.manager.stats import Stats, collect_stats
from kvloom.plan import CopyPlan
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import SLOT_CLEARED, SLOT_QUARANTINED, AnyArray, Grade, Int32Array, Kind
from kvloom.verify.hit import verify

MOST_SEQUENCES = 1 << 16
MOST_NODES = 1 << 28
MOST_PRIORITY = (1 << 20) - 1


class Manager(Books):
    """KV-cache manager for one model on one device tier.

    Args:
        spec: the model's KV cache groups.
        tiers: the tiers as configuration values; today exactly one ``Device``.
        policy: eviction policy: a name (``"cost"``, ``"lru"``, ``"lfu"``, ``"priority"``, ``"s3-fifo"``, or one that an
            installed package offers), or an ``EvictionPolicy``.
        max_sequences: how many sequences may run at once (rows of the block tables).
        thread_id: returns an identity of the calling thread; when given, calls from another thread than
            the one that made the manager raise WrongThreadError.
        max_nodes: places in the prefix index; by default twice what the arena can hold.

    Raises:
        CapacityError: the tier cannot hold even the smallest request.
        ConfigError: unknown policy or one that cannot be compiled, or not exactly one device tier.

    Not thread-safe: see ``thread_id``.

    Attributes:
        colder: the calls about what colder tiers have and lack.
        sequence_type, batch_type, colder_type: the classes of what it makes.
    """

    sequence_type: ClassVar[type[CachedSequence]] = CachedSequence
    batch_type: ClassVar[type[Batch]] = Batch
    colder_type: ClassVar[type[ColderTiers]] = ColderTiers

    def __init__(
        self,
        spec: ModelSpec,
        tiers: Sequence[Device],
        *,
        policy: EvictionPolicy | str = "cost",
        max_sequences: int = 64,
        thread_id: Callable[[], int] | None = None,
        max_nodes: int | None = None,
    ) -> None:
        policy = find_policy(policy)
        if len(tiers) != 1 or not isinstance(tiers[0], Device):
            raise ConfigError(f"tiers must be exactly one Device, not {list(tiers)!r}")
        _check_count("max_sequences", max_sequences, MOST_SEQUENCES)
        if max_nodes is not None:
            _check_count("max_nodes", max_nodes, MOST_NODES)
        super().__init__(
            spec, tiers[0].size, policy, max_sequences=max_sequences, max_nodes=max_nodes, thread_id=thread_id
        )
        self.colder = self.colder_type(self)

    # ---------------------------------------------------------------- requests

    def open(
        self,
        tokens: AnyArray,
        *,
        salt: bytes = b"",
        extra_keys: Sequence[ExtraKey] = (),
        floor: Grade = Grade.FAITHFUL,
        priority: int = 0,
    ) -> CachedSequence:
        """Match a prompt, verify the hit and lease it.

        Args:
            tokens: token ids, 1-D integer array of at least one; the last one is always recomputed.
            salt: tenant; different salts never share anything.
            extra_keys: what else must agree (LoRA name, image digests), in order.
            floor: worst grade of state that this request accepts: a ``Grade`` or its name.
            priority: for the policy ``priority``, 0 to 2**20 - 1: what was used with a higher one stays longer.

        Raises:
            InputError: ids that are not 1-D integers, negative, beyond the vocabulary or too many; a salt, key,
                floor or priority of another type.
            CapacityError: the prompt cannot fit, or not beside what is running now.
        """
        self.enter()
        floor = grade_of(floor)
        if priority != 0 and whole_number(priority, "priority") > MOST_PRIORITY:
            raise InputError(f"priority {priority} is too high; use 0 to {MOST_PRIORITY}")
        self.tick()
        name = self.namespaces.name(salt, extra_keys)
        namespace = self.namespaces.by_name.get(name)
        # the match itself checks the ids that the index does not know
        prompt = self.ids.checked(tokens) if namespace is None else self.ids.array(tokens)
        self.capacity.admit(len(prompt))
        if namespace is None:
            namespace = self.namespace(name, salt)
        wrong, depth, position, at, checkpoint = calls.match_prompt(
            self.handle, namespace.root, prompt, self.ids.top, floor.value, self.path
        )
        if wrong >= 0:
            raise self.ids.outside(prompt, wrong)
        hit = verify(self, self.path, (at, checkpoint, position), floor, namespace.layout)
        found = explain(self, self.path, depth, prompt, position, floor)

        def lease(row: int) -> CachedSequence:
            explanation, restore = take_hit(self, row, hit, prompt, found, priority)
            return self.sequence_type(self, row, floor, explanation, hit.position, restore)

        sequence = self.start(lease)
        calls.note_misses(self.handle, len(prompt) - 1, position)
        return sequence

    def complete(self, plan: CopyPlan) -> None:
        """The copies of ``plan`` were executed, before the next forward of its sequence: publish what it carries.

        The report itself may come later, as transfers end: until then nothing of the plan can be hit and both ends
        of every copy are held (``Stats.plans_open`` counts such plans), so copies that are never made cost a miss and
        room, never an answer.  Copies made after the next forward read a live state that has moved on: ``abandon`` it.
        A ticket that is unknown, or whose sequence is gone, is ignored and counted.
        """
        self.enter()
        self._check_plan(plan)
        self.tick()
        self.tickets.complete(plan.ticket)

    def abandon(self, plan: CopyPlan) -> None:
        """The copies of ``plan`` were not executed: free what it reserved.  Unknown tickets are ignored and counted.

        A sequence whose ``restore`` is abandoned has no state to go on from and can only be closed.
        """
        self.enter()
        self._check_plan(plan)
        self.tick()
        if self.tickets.is_open(plan.ticket):
            for sequence in self.roster:
                sequence.plan_abandoned(plan.ticket)
        self.tickets.abandon(plan.ticket)

    def _check_plan(self, plan: object) -> None:
        if self.tickets.is_foreign(checked_plan(plan)):
            raise InputError("the plan is another manager's, or a copy; hand back the plan that this manager gave")

    # ---------------------------------------------------------------- decode steps

    def batch(self, sequences: Sequence[CachedSequence]) -> Batch:
        """The sequences of a decode batch, prepared once for many ``step`` calls.

        Raises SequenceError if one of them cannot go on, or is there twice; InputError for one of another manager.
        """
        self.enter()
        return self.batch_type(self, sequences)

    def step(self, batch: Batch, tokens: Int32Array) -> tuple[CopyPlan, ...]:
        """One decode step of a whole batch in one call.

        The token that the step before reserved was computed in every sequence (at best FAITHFUL); now one more is
        reserved for each: ``tokens`` int32 [batch].  ``finish`` commits the last one.

        Returns the snapshot copies to run before the next forward, usually none.  CapacityError, InputError and
        SequenceError reserve nothing; what was committed stays, without the snapshots that nobody could copy then.
        """
        return decoding.step(self, batch, tokens)

    def finish(self, batch: Batch) -> tuple[CopyPlan, ...]:
        """Commit the token that the last ``step`` reserved in every sequence; returns snapshot copies like ``step``."""
        return decoding.finish(self, batch)

    # ---------------------------------------------------------------- room

    def evict(self, n_bytes: int) -> int:
        """Evict, in the order of the policy, until ``n_bytes`` are freed or nothing can go; returns the bytes freed."""
        self.enter()
        n_bytes = min(whole_number(n_bytes, "n_bytes"), self.geometry.arena_bytes)
        return int(sweep.evict_bytes(self.arrays, self.geometry.slot_bytes, n_bytes))

    def clear(self, salt: bytes | None = None) -> int:
        """Forget every cached object (of one salt); running sequences keep what they hold.  Returns how many."""
        self.enter()
        if salt is not None and not isinstance(salt, bytes):
            raise InputError(f"salt must be bytes or None, not {type(salt).__name__}; encode it first")
        self.tick()
        count = sum(
            int(sweep.forget(self.arrays, ns.root, -1, -1, SLOT_CLEARED))
            for ns in self.namespaces
            if salt is None or ns.salt == salt
        )
        self.roster.collect()
        return count

    def drop(self, what: Kind | str, position: int | None = None, *, quarantine: bool = False) -> int:
        """Forget the objects of one kind or group, everywhere or where they begin at token ``position``.

        Snapshots begin where they were taken.  ``quarantine`` marks them as failed instead of cleared, and breaks the
        running sequences that read them.
        Everything else stays, so this is also how a verification run leaves a kind out.  Returns how many.
        Raises InputError for a group that the model does not have, and for a position that is no whole number >= 0.
        """
        self.enter()
        names = [group.name for group in self.spec.groups]
        if not isinstance(what, Kind) and what not in names:
            raise InputError(f"model {self.spec.name!r} has no group {what!r}; it has {', '.join(names)}")
        at = -1 if position is None else min(whole_number(position, "position"), np.iinfo(np.int64).max)
        self.tick()
        code = SLOT_QUARANTINED if quarantine else SLOT_CLEARED
        count = sum(
            int(sweep.forget(self.arrays, -1, g, at, code))
            for g, group in enumerate(self.spec.groups)
            if what in (group.name, group.kind)
        )
        if quarantine:
            self.roster.distrust()
        self.roster.collect()
        return count

    # ---------------------------------------------------------------- looking

    def peak_bytes(self, tokens: int) -> int:
        """Bytes that a request of ``tokens`` tokens holds at its peak, alone and without a hit."""
        return self.capacity.peak_bytes(whole_number(tokens, "tokens"))

    def tier_needed(self, tokens: int) -> int:
        """Bytes from which on a device tier holds a request of ``tokens`` tokens; the cap when it fits."""
        return self.capacity.tier_needed(whole_number(tokens, "tokens"))

    def fill(self) -> float:
        """Share of the arena whose pages are in use, for cached state included."""
        return self.capacity.fill()

    def in_use(self) -> int:
        """Bytes of the slots that cannot be evicted now."""
        return self.capacity.in_use()

    def unkept(self) -> int:
        """Objects that were not kept for lack of room, since the manager was made."""
        return int(self.arrays.counters[:, UNKEPT].sum())

    def stats(self) -> Stats:
        """Counters per kind and the fill of the tier."""
        self.enter()
        return collect_stats(self.spec, self.arrays, self.geometry, self.cap, self.tickets)

    def running(self) -> tuple[CachedSequence, ...]:
        """The sequences that are open now."""
        return cast("tuple[CachedSequence, ...]", tuple(self.roster))

    def check_integrity(self) -> None:
        """Recompute the books from scratch; raises IntegrityError with everything that disagrees."""
        self.enter()
        in_flight = (
            [*self.tickets.holds(), *self.transfers.holds()],
            [*self.tickets.nodes(), *self.transfers.nodes()],
        )
        check_books(self.arrays, self.rows, self.geometry, self.namespaces.roots(), self.roster.nodes(), in_flight)


def _check_count(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{name} is {value!r}; use a whole number from 1 to {most}")
