"""The manager: decides what is reused, where everything lives and what goes.  It moves no bytes.

One thread owns a manager.  Every call either succeeds or raises and leaves everything as it was.  Bytes
move by ``CopyPlan`` values that the engine executes and then reports with ``complete`` (or ``abandon``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvloom.config import Device
from kvloom.core import calls, sweep
from kvloom.core.allocation import allocate
from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import release
from kvloom.core.digests import PrefixKeys, prefix_digests
from kvloom.core.eviction import make_node_room
from kvloom.core.fields import (
    ANCHORS,
    CLOCK,
    COL_BASE,
    FIRST_CHECKPOINT,
    FIRST_CHILD,
    FREE_PAGES,
    GRAVE_HEAD,
    PARENT,
    RULE,
    RULE_SNAPSHOT,
    SLOT_BASE,
    STATE,
    UNKEPT,
    USED,
)
from kvloom.core.geometry import fits, plan_geometry, smallest_arena, split_note
from kvloom.core.handle import both_addresses
from kvloom.core.integrity import check_books
from kvloom.core.lifecycle import QUARANTINED
from kvloom.core.namespace import ExtraKey, encode_namespace
from kvloom.core.page_table import EPOCH, OFFSET, PUBLISHED, SHARED, Rows, allocate_rows
from kvloom.core.prefix_index import find_checkpoint, reap, reap_unread, take_node
from kvloom.core.progress import BAD_TOKEN, BUSY, TOO_LONG
from kvloom.errors import (
    CapacityError,
    ConfigError,
    InputError,
    SequenceError,
    WrongThreadError,
)
from kvloom.eviction import EvictionPolicy, find_policy
from kvloom.manager.buffers import TokenBuffers
from kvloom.manager.explain import Findings, explain
from kvloom.manager.inputs import TokenRules, checked_keys, checked_plan, grade_of, whole_number
from kvloom.manager.sequence import CachedSequence
from kvloom.manager.single import Single
from kvloom.manager.stats import Stats, collect_stats
from kvloom.manager.surveys import Survey, survey
from kvloom.manager.tickets import Tickets
from kvloom.manager.transfers import Prompt, Transfers
from kvloom.plan import ArenaGeometry, Chain, CopyPlan, Limit, StoredObjects, TransferPlan
from kvloom.spec.footprint import peak_bytes
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import (
    SLOT_CLEARED,
    SLOT_QUARANTINED,
    AnyArray,
    Grade,
    Int32Array,
    Kind,
    Reason,
)
from kvloom.verify.abi import layout_identity
from kvloom.verify.hit import VerifiedHit, verify

MOST_SEQUENCES = 1 << 16
MOST_NODES = 1 << 28
MOST_PRIORITY = (1 << 20) - 1
_STEP_GRADE = int(Grade.FAITHFUL)
_REMEMBERED = 4096


@dataclass(slots=True)
class Namespace:
    """One root of the index: a salt, its extra keys and the layout they were stored under."""

    root: int
    salt: bytes
    layout: bytes


class Batch(Single):
    """Sequences that decode together; made by ``Manager.batch`` for that manager.

    Attributes:
        sequences: in the order of the tokens that ``Manager.step`` takes.
    """

    __slots__ = ("_checked", "_ended", "_manager", "_rows", "sequences")

    def __init__(self, manager: Manager, sequences: tuple[CachedSequence, ...], rows: Int32Array, checked: int) -> None:
        self.sequences = sequences
        self._manager = manager
        self._rows = rows
        self._ended = np.empty_like(rows)
        self._checked = checked

    def __len__(self) -> int:
        return len(self.sequences)

    def rows_for(self, manager: Manager, changes: int) -> tuple[Int32Array, Int32Array]:
        """Its rows, and a scratch array as long, once every sequence can go on (asked anew after ``changes``).

        Raises InputError when another manager asks, SequenceError for a sequence that cannot go on.
        """
        if self._manager is not manager:
            raise InputError("the batch belongs to another manager; make one with this manager's own batch method")
        if self._checked != changes:
            for sequence in self.sequences:
                sequence.require_usable()
            self._checked = changes
        return self._rows, self._ended


class Manager(Single):
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
        sequence_type, batch_type: the classes of what it makes.
    """

    sequence_type: ClassVar[type[CachedSequence]] = CachedSequence
    batch_type: ClassVar[type[Batch]] = Batch

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
        self.policy = find_policy(policy)
        self._key = self.policy.compiled()
        if len(tiers) != 1 or not isinstance(tiers[0], Device):
            raise ConfigError(f"tiers must be exactly one Device, not {list(tiers)!r}")
        _check_count("max_sequences", max_sequences, MOST_SEQUENCES)
        if max_nodes is not None:
            _check_count("max_nodes", max_nodes, MOST_NODES)
        self.spec = spec
        self.cap = tiers[0].size
        self.geometry: ArenaGeometry = plan_geometry(spec, self.cap)
        self.layout = layout_identity(spec)
        nodes = max_nodes if max_nodes is not None else _default_nodes(spec, self.geometry)
        self.arrays: Arrays = allocate(
            spec, self.geometry, nodes, self.policy.order, 0 if self._key is None else self._key.address
        )
        self.rows: Rows = allocate_rows(spec, self.geometry, max_sequences)
        self.handle = both_addresses(self.arrays, self.rows)
        self.buffers = TokenBuffers()
        self.tickets = Tickets(self.arrays)
        self.transfers = Transfers(self.arrays)
        self._prefix_keys: dict[bytes, PrefixKeys] = {}
        self._namespaces: dict[bytes, Namespace] = {}
        self._plain: dict[bytes, bytes] = {}
        self._admitted = 0
        self._changes = 0
        self._free_rows = list(range(max_sequences - 1, -1, -1))
        self._running: dict[int, CachedSequence] = {}
        self._path: Int32Array = np.zeros(nodes + 1, dtype=np.int32)
        self.snapshot_groups: list[int] = np.flatnonzero(self.arrays.group[:, RULE] == RULE_SNAPSHOT).tolist()
        self.ids = TokenRules(spec.vocab_size or 2**31, spec.max_positions or 0, spec.name)
        self._thread_id = thread_id
        self._owner = thread_id() if thread_id else 0

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
        name = self._name(salt, extra_keys)
        namespace = self._namespaces.get(name)
        # the match itself checks the ids that the index does not know
        prompt = self.ids.checked(tokens) if namespace is None else self.ids.array(tokens)
        self._admit(len(prompt))
        if namespace is None:
            namespace = self._new_namespace(name, salt)
        wrong, depth, position, at, checkpoint = calls.match_prompt(
            self.handle, namespace.root, prompt, self.ids.top, floor.value, self._path
        )
        if wrong >= 0:
            raise self.ids.outside(prompt, wrong)
        hit = verify(self, self._path, (at, checkpoint, position), floor, namespace.layout)
        found = explain(self, self._path, depth, prompt, position, floor)
        sequence = self._start(hit, prompt, floor, found, priority)
        calls.note_misses(self.handle, len(prompt) - 1, position)
        return sequence

    def _name(self, salt: bytes, extra_keys: Sequence[ExtraKey]) -> bytes:
        """The encoded namespace; those without extra keys are remembered."""
        if extra_keys != () or type(salt) is not bytes:
            return encode_namespace(salt, checked_keys(extra_keys), self.layout)
        name = self._plain.get(salt)
        if name is None:
            name = encode_namespace(salt, (), self.layout)
            if len(self._plain) < _REMEMBERED:
                self._plain[salt] = name
        return name

    def _start(
        self, hit: VerifiedHit, prompt: Int32Array, floor: Grade, found: Findings, priority: int
    ) -> CachedSequence:
        row = self._free_row()
        try:
            sequence = self.sequence_type.lease(self, row, hit, prompt, floor, found, priority)
        except BaseException:
            self._free_rows.append(row)
            raise
        self._running[row] = sequence
        return sequence

    def adopt_fork(self, make: Callable[[int], CachedSequence]) -> CachedSequence:
        """Run ``make`` with a free row and register the sequence it returns (used by ``CachedSequence.fork``)."""
        row = self._free_row()
        try:
            sequence = make(row)
        except BaseException:
            self._free_rows.append(row)
            raise
        self._running[row] = sequence
        return sequence

    def _free_row(self) -> int:
        """A row of the block tables; CapacityError when all are taken."""
        if not self._free_rows:  # an interrupt may have lost one
            self._free_rows = [row for row in range(len(self.rows.state)) if row not in self._running]
        if not self._free_rows:
            raise CapacityError(
                f"{len(self._running)} sequences are running, the most this manager was made for; close one, "
                "or make it with a larger max_sequences",
                needed=0,
                cap=self.cap,
                in_use=self.in_use(),
                never_fits=False,
            )
        return self._free_rows.pop()

    def retire(self, row: int) -> None:
        """Give a closed sequence's row back (called by ``CachedSequence.close``)."""
        if self._running.pop(row, None) is not None:
            self._free_rows.append(row)
        self.changed()
        self._reap()

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
            for sequence in self._running.values():
                sequence.plan_abandoned(plan.ticket)
        self.tickets.abandon(plan.ticket)

    def _check_plan(self, plan: object) -> None:
        if self.tickets.is_foreign(checked_plan(plan)):
            raise InputError("the plan is another manager's, or a copy; hand back the plan that this manager gave")

    # ---------------------------------------------------------------- colder tiers

    def chain(self, tokens: AnyArray, *, salt: bytes = b"", extra_keys: Sequence[ExtraKey] = ()) -> Chain:
        """The names under which colder tiers know ``tokens``; see ``docs/identity.md``.

        Raises InputError like ``open``.
        """
        self.enter()
        ids = self.ids.checked(tokens)
        name = self._name(salt, extra_keys)
        keys = self._prefix_keys.get(name)
        if keys is None:
            keys = PrefixKeys.of(name)
            if len(self._prefix_keys) < _REMEMBERED:
                self._prefix_keys[name] = keys
        segment = self.spec.segment_tokens
        return Chain(keys.root, prefix_digests(keys, ids, segment), ids, segment)

    def plan_load(
        self,
        tokens: AnyArray,
        stored: StoredObjects,
        *,
        salt: bytes = b"",
        extra_keys: Sequence[ExtraKey] = (),
        floor: Grade = Grade.FAITHFUL,
    ) -> TransferPlan | None:
        """What to bring from a colder tier so that a prompt can resume further on than from the device alone.

        Args:
            tokens: the prompt up to where it may resume: all but its last token.
            stored: what the tier has of the chain of these tokens.
            salt, extra_keys, floor: as in ``open``.

        Returns None when nothing there helps, when the prompt can never fit, or when there is no room for what would
        be brought (``transfers.unkept`` counts these).
        Copy every object into its slot and report with ``finish_load``; then open the prompt.
        Raises InputError like ``open``, and for objects that the model does not have; CapacityError when the index is
        full.
        """
        self.enter()
        floor = grade_of(floor)
        ids = self.ids.checked(tokens)
        self.tick()
        if not fits(self.spec, self.geometry, len(ids) + 1):
            return None
        cold = self.transfers.cold(-(-len(ids) // self.spec.segment_tokens), stored)
        return self._planned(ids, cold, salt, extra_keys, floor)

    def survey(
        self,
        tokens: AnyArray,
        tiers: Sequence[StoredObjects] = (),
        *,
        salt: bytes = b"",
        extra_keys: Sequence[ExtraKey] = (),
        floor: Grade = Grade.FAITHFUL,
    ) -> Survey:
        """From where a prompt could go on, with what from which tier, or by a replay; changes nothing.

        Args:
            tokens: the prompt up to where it may resume: all but its last token.
            tiers: what each colder tier has of the chain of these tokens, the nearest tier first.
            salt, extra_keys, floor: as in ``open``.

        Raises InputError like ``open``, and for objects that the model does not have.
        """
        self.enter()
        floor = grade_of(floor)
        ids = self.ids.checked(tokens)
        rows = -(-len(ids) // self.spec.segment_tokens)
        colds = [self.transfers.cold(rows, stored) for stored in tiers]
        namespace = self._namespaces.get(self._name(salt, extra_keys))
        if namespace is None:
            prompt, reused = Prompt(ids, np.full(len(ids) // self.spec.segment_tokens + 1, -1, np.int32), 0, -1), 0
        else:
            prompt, reused = self._matched(namespace.root, ids, floor)
        return survey(self.arrays, self.spec, prompt, colds, reused, floor)

    def plan_replay(
        self,
        tokens: AnyArray,
        stored: StoredObjects,
        grade: Grade,
        *,
        salt: bytes = b"",
        extra_keys: Sequence[ExtraKey] = (),
        floor: Grade = Grade.FAITHFUL,
    ) -> tuple[TransferPlan, npt.NDArray[np.bool_]] | None:
        """Like ``plan_load``, for a boundary whose missing windows and tails will be computed.

        Args:
            tokens: exactly those up to the boundary, a multiple of the segment or the end of the prompt.
            stored: what colder tiers have of their chain.
            grade: of what is computed: at best FAITHFUL, and no better than the prefix that it is computed from.
            salt, extra_keys, floor: as in ``open``.

        Returns the plan and which of its objects must be computed, bool ``[len(plan)]``, or None as ``plan_load``,
        and when more than windows and tails is missing.
        """
        self.enter()
        floor, ids = grade_of(floor), self.ids.checked(tokens)
        self.tick()
        if not fits(self.spec, self.geometry, len(ids) + 1):
            return None
        cold = self.transfers.cold(-(-len(ids) // self.spec.segment_tokens), stored)
        made = self.transfers.replayable(cold, len(ids), min(grade_of(grade, "grade"), Grade.FAITHFUL), floor.value)
        plan = self._planned(ids, cold, salt, extra_keys, floor)
        if plan is None:
            return None
        if plan.position != len(ids):  # its prefix is not whole: what was counted as there is of no use
            self.transfers.finish_load(plan, np.zeros(len(plan), dtype=np.bool_))
            return None
        return plan, made[plan.row, self.arrays.group[plan.group, COL_BASE] + plan.column]

    def prefix_slots(self, plan: TransferPlan) -> tuple[Int32Array, ...]:
        """Where the compressed state lies that a replay reads: see ``Transfers.prefix_slots``."""
        self.enter()
        return self.transfers.prefix_slots(plan)

    def _planned(
        self, ids: Int32Array, cold: AnyArray, salt: bytes, extra_keys: Sequence[ExtraKey], floor: Grade
    ) -> TransferPlan | None:
        name = self._name(salt, extra_keys)
        namespace = self._namespaces.get(name) or self._new_namespace(name, salt)
        unkept = self.transfers.unkept
        plan = self._load(namespace.root, ids, cold, floor)
        if self.transfers.unkept > unkept and self.collect():
            self.transfers.unkept = unkept
            plan = self._load(namespace.root, ids, cold, floor)
        return plan

    def _load(self, root: int, ids: Int32Array, cold: AnyArray, floor: Grade) -> TransferPlan | None:
        prompt, reused = self._matched(root, ids, floor)
        return self.transfers.load(prompt, cold, reused, floor.value)

    def _matched(self, root: int, ids: Int32Array, floor: Grade) -> tuple[Prompt, int]:
        """The chain as the device knows it, and how much of it the device alone gives."""
        limit = np.append(ids, ids[:1])  # a match never reuses the last token
        _, known, position, _, _ = calls.match_prompt(self.handle, root, limit, self.ids.top, floor.value, self._path)
        return self._prompt(ids, known), int(position)

    def explain_load(
        self,
        tokens: AnyArray,
        stored: StoredObjects,
        *,
        tier: str,
        salt: bytes = b"",
        extra_keys: Sequence[ExtraKey] = (),
        floor: Grade = Grade.FAITHFUL,
    ) -> tuple[Limit, ...]:
        """What keeps a prompt from resuming further on with the help of a colder tier, only because of its grade.

        For the deepest boundary that a lower floor would reach: of each group the first object whose copies are all
        below ``floor``, with reason ``grade`` and, where the colder tier has the copy, the name ``tier``; nothing when
        a lower floor reaches no further.  ``Explanation.with_limits`` takes the answer.

        Arguments and errors are those of ``plan_load``; nothing changes.
        """
        self.enter()
        floor = grade_of(floor)
        ids = self.ids.checked(tokens)
        cold = self.transfers.cold(-(-len(ids) // self.spec.segment_tokens), stored)
        namespace = self._namespaces.get(self._name(salt, extra_keys))
        known = -1  # not even the root
        if namespace is not None:
            limit = np.append(ids, ids[:1])
            found = calls.match_prompt(self.handle, namespace.root, limit, self.ids.top, floor.value, self._path)
            known = found[1]
        below = self.transfers.below_floor(self._prompt(ids, known), cold, floor.value)
        groups = self.spec.groups
        return tuple(
            Limit(Reason.GRADE, position, tier if colder else "device", groups[g].kind, groups[g].name)
            for g, position, colder in below
        )

    def finish_load(self, plan: TransferPlan, good: AnyArray) -> None:
        """The load ended: ``good`` bool ``[len(plan)]`` says which objects arrived verified, and these are published.

        A plan that is not open is ignored and counted; InputError for one that is another manager's, and for a ``good``
        of another shape.
        """
        self.enter()
        self.tick()
        if self.transfers.finish_load(plan, np.ascontiguousarray(good, dtype=np.bool_)):
            self._distrust()

    def begin_arriving(self, plan: TransferPlan) -> None:
        """Publish the objects of an open load before their bytes are there, so that its prompt can be opened now.

        Until ``finish_load`` they are held, and whoever reads a slot has to wait for its bytes: the manager does not
        know which have come.  A plan that is not open, or published already, is ignored and counted.  Raises InputError
        like ``finish_load``.
        """
        self.enter()
        self.tick()
        self.transfers.begin_arriving(plan)

    def withdraw(self, plan: TransferPlan, good: AnyArray) -> None:
        """Of a load that ``begin_arriving`` published, quarantine what will not come (``good`` false), slot by slot.

        Running sequences that read one of these slots are broken.  The slots stay held, since a late write may still
        land there, until ``finish_load``, which does the same for what is not good then.  Ignored and raises like it.
        """
        self.enter()
        self.tick()
        if self.transfers.withdraw(plan, np.ascontiguousarray(good, dtype=np.bool_)):
            self._distrust()

    def may_take_over(self, sequence: CachedSequence) -> bool:
        """Whether a commit of ``sequence`` may take over objects that are published and not all there."""
        return self.transfers.on_the_way(self._member(sequence).node)

    def _distrust(self) -> None:
        """Break the sequences that read a quarantined slot."""
        failed = self.arrays.slot[:, STATE] == QUARANTINED
        for sequence in self._running.values():
            sequence.distrust(failed)
        self.collect()

    def plan_store(
        self, sequence: CachedSequence, stored: StoredObjects, floor: Grade = Grade.FAITHFUL
    ) -> TransferPlan | None:
        """What a colder tier lacks of a prefix unit of ``sequence``: of its deepest boundary resumable at ``floor``.

        ``stored``: what the tier has of the chain of ``sequence.tokens``.  Returns None when it lacks nothing.  The
        slots are held until ``finish_store``.  Raises InputError for a sequence of another manager and for objects
        that the model does not have, SequenceError for a sequence that is closed.
        """
        self.enter()
        tokens = self._member(sequence).tokens
        self.tick()
        cold = self.transfers.cold(-(-len(tokens) // self.spec.segment_tokens), stored)
        node, depth = sequence.node, int(self.rows.state[sequence.row, PUBLISHED])
        for k in range(depth, -1, -1):
            self._path[k] = node
            node = int(self.arrays.trunk[node, PARENT])
        return self.transfers.store(self._prompt(tokens, depth), cold, grade_of(floor).value)

    def plan_offload(
        self,
        tokens: AnyArray,
        stored: StoredObjects,
        *,
        salt: bytes = b"",
        extra_keys: Sequence[ExtraKey] = (),
        floor: Grade = Grade.FAITHFUL,
    ) -> TransferPlan | None:
        """Like ``plan_store``, of what is cached of ``tokens`` whether or not a sequence holds it (any more).

        Returns None when the tier lacks nothing, or nothing is cached.  Raises InputError like ``open``, and for
        objects that the model does not have.
        """
        self.enter()
        floor = grade_of(floor)
        ids = self.ids.checked(tokens)
        self.tick()
        namespace = self._namespaces.get(self._name(salt, extra_keys))
        cold = self.transfers.cold(-(-len(ids) // self.spec.segment_tokens), stored)
        if namespace is None:
            return None
        prompt, _ = self._matched(namespace.root, ids, floor)
        return self.transfers.store(prompt, cold, floor.value)

    def finish_store(self, plan: TransferPlan) -> None:
        """The store ended, well or not; like ``finish_load``."""
        self.enter()
        self.tick()
        self.transfers.finish_store(plan)

    def _prompt(self, tokens: Int32Array, known: int) -> Prompt:
        """The chain of ``tokens``, whose first ``known`` segments are the nodes of ``_path``."""
        segment = self.spec.segment_tokens
        segments, tail = divmod(len(tokens), segment)
        path = np.full(segments + 1, -1, dtype=np.int32)  # may be more than the index has nodes
        path[: known + 1] = self._path[: known + 1]
        checkpoint = -1
        if tail and known == segments:
            start = segments * segment
            checkpoint = int(find_checkpoint(self.arrays, int(path[segments]), tokens, start, tail))
        return Prompt(tokens, path, known, checkpoint)

    # ---------------------------------------------------------------- decode steps

    def batch(self, sequences: Sequence[CachedSequence]) -> Batch:
        """The sequences of a decode batch, prepared once for many ``step`` calls.

        Raises SequenceError if one of them cannot go on, or is there twice; InputError for one of another manager.
        """
        self.enter()
        for sequence in sequences:
            self._member(sequence).require_usable()
        rows = np.array([s.row for s in sequences], dtype=np.int32)
        if len(set(rows.tolist())) != len(rows):
            raise SequenceError("a sequence is in the batch twice; fork it to decode it twice")
        return self.batch_type(self, tuple(sequences), rows, self._changes)

    def step(self, batch: Batch, tokens: Int32Array) -> tuple[CopyPlan, ...]:
        """One decode step of a whole batch in one call.

        The token that the step before reserved was computed in every sequence (at best FAITHFUL); now one more is
        reserved for each: ``tokens`` int32 [batch].  ``finish`` commits the last one.

        Returns the snapshot copies to run before the next forward, usually none.  CapacityError, InputError and
        SequenceError reserve nothing; what was committed stays, without the snapshots that nobody could copy then.
        """
        rows, ended = self._rows_of(batch)
        if getattr(tokens, "dtype", None) != np.int32 or tokens.shape != rows.shape:
            found = f"{getattr(tokens, 'dtype', type(tokens).__name__)} {getattr(tokens, 'shape', '')}".strip()
            raise InputError(f"a step takes int32 tokens of shape {rows.shape}, not {found}")
        flags = tokens.flags
        if not (flags.c_contiguous and flags.aligned and flags.writeable):  # other types to compiled code
            tokens = np.require(tokens, requirements=("C", "A", "W"))
        limits = (self.ids.top, self.ids.longest)
        done, count, place, why = calls.step_rows(
            self.handle, rows, tokens, _STEP_GRADE, ended, *limits, not self.snapshot_groups
        )
        plans: tuple[CopyPlan, ...] = ()
        if place == calls.NOT_BEGUN:
            plans = self._publish_ended(rows, ended, done, count)
            place, why = calls.begin_rows(self.handle, rows, tokens, *limits)
        if place >= 0 and why >= 0 and self.collect():
            place, why = calls.begin_rows(self.handle, rows, tokens, *limits)
        if place >= 0:
            for plan in plans:
                self.tickets.abandon(plan.ticket)
            raise self._refused(batch.sequences[place], int(tokens[place]), int(why))
        return plans

    def _refused(self, sequence: CachedSequence, token: int, why: int) -> CapacityError | InputError | SequenceError:
        """Why a step could not go on with ``sequence``."""
        length = sequence.length
        if why == BAD_TOKEN:
            return InputError(f"token {token} after {length} is outside the vocabulary, 0 to {self.ids.top - 1}")
        if why == TOO_LONG:
            return InputError(
                f"{length + 1} tokens are more than the {self.spec.max_positions} positions of {self.spec.name}"
            )
        if why == BUSY:
            return SequenceError("the last append to a sequence of the batch was neither committed nor rolled back")
        return self.no_room(why, length + 1, f"decode one token after {length}")

    def finish(self, batch: Batch) -> tuple[CopyPlan, ...]:
        """Commit the token that the last ``step`` reserved in every sequence; returns snapshot copies like ``step``."""
        rows, ended = self._rows_of(batch)
        self.tick()
        place, count = calls.finish_rows(self.handle, rows, 0, _STEP_GRADE, ended, 0)
        return self._publish_ended(rows, ended, place, count)

    def _rows_of(self, batch: object) -> tuple[Int32Array, Int32Array]:
        self.enter()
        if not isinstance(batch, Batch):
            raise InputError(f"a Batch is expected, as the manager's batch method makes it, not {type(batch).__name__}")
        return batch.rows_for(self, self._changes)

    def _publish_ended(self, rows: Int32Array, ended: Int32Array, place: int, count: int) -> tuple[CopyPlan, ...]:
        """Go on with a step that came as far as ``place``; the snapshots of the rows that ended a segment."""
        while place < len(rows):  # the index is full
            row = int(rows[place])
            if self._running[row].publish_stepped():
                ended[count] = row
                count += 1
            place, count = calls.finish_rows(self.handle, rows, place + 1, _STEP_GRADE, ended, count)
        if not count or not self.snapshot_groups:
            return ()
        return tuple(self._running[row].keep_snapshot() for row in ended[:count].tolist())

    def _member(self, sequence: object) -> CachedSequence:
        if not isinstance(sequence, CachedSequence) or not sequence.belongs_to(self):
            raise InputError(f"a batch takes sequences that this manager opened, not {type(sequence).__name__}")
        return sequence

    def changed(self) -> None:
        """A sequence ended or broke: batches check theirs again."""
        self._changes += 1

    # ---------------------------------------------------------------- room

    def peak_bytes(self, tokens: int) -> int:
        """Bytes that a request of ``tokens`` tokens holds at its peak, alone and without a hit."""
        return peak_bytes(self.spec, whole_number(tokens, "tokens"), self.spec.segment_tokens)

    def tier_needed(self, tokens: int) -> int:
        """Bytes from which on a device tier holds a request of ``tokens`` tokens; the cap when it fits."""
        tokens = whole_number(tokens, "tokens")
        return self.cap if fits(self.spec, self.geometry, tokens) else smallest_arena(self.spec, tokens)

    def unkept(self) -> int:
        """Objects that were not kept for lack of room, since the manager was made."""
        return int(self.arrays.counters[:, UNKEPT].sum())

    def fill(self) -> float:
        """Share of the arena whose pages are in use, for cached state included."""
        if self.geometry.static_split:
            used = int((self.arrays.group[:, USED] * self.geometry.slot_bytes).sum())
            return used / self.geometry.arena_bytes
        pages = len(self.arrays.page)
        return 1.0 - int(self.arrays.scalars[FREE_PAGES]) / pages

    def in_use(self) -> int:
        """Bytes of the slots that cannot be evicted now."""
        running = [sequence.node for sequence in self._running.values()]
        ends = np.array([*running, *self.tickets.nodes(), *self.transfers.nodes()], dtype=np.int64)
        return int(sweep.bytes_held(self.arrays, ends, self.geometry.slot_bytes))

    def _admit(self, tokens: int) -> None:
        if tokens <= self._admitted:
            return
        if fits(self.spec, self.geometry, tokens):
            self._admitted = tokens
        else:
            needed = smallest_arena(self.spec, tokens)
            raise CapacityError(
                f"a prompt of {tokens} tokens can never fit into the device tier of {self.cap} bytes; its state takes "
                f"{self.peak_bytes(tokens)} bytes at its peak, which needs a tier of {needed} bytes: make it that "
                f"large, or the prompt shorter{split_note(self.spec, self.geometry)}",
                needed=needed,
                cap=self.cap,
                in_use=self.in_use(),
                never_fits=True,
            )

    def no_room(self, group: int, tokens: int, doing: str) -> CapacityError:
        """The error for a group that could not get a slot because everything is in use."""
        possible = fits(self.spec, self.geometry, tokens)
        needed = self.peak_bytes(tokens) if possible else smallest_arena(self.spec, tokens)
        in_use = self.in_use()
        return CapacityError(
            f"no room to {doing}: group {self.spec.groups[group].name!r} has no free slot and {in_use} of {self.cap} "
            f"bytes are held by {len(self._running)} running sequences; {tokens} tokens need {needed} bytes; close a "
            f"sequence or make the device tier larger{split_note(self.spec, self.geometry)}",
            needed=needed,
            cap=self.cap,
            in_use=in_use,
            never_fits=not possible,
        )

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
            for ns in self._namespaces.values()
            if salt is None or ns.salt == salt
        )
        self.collect()
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
            self._distrust()
        self.collect()
        return count

    def _reap(self) -> None:
        """Give back what the index gave up while sequences that have ended since could still read it."""
        if self.arrays.scalars[GRAVE_HEAD] < 0:
            return
        oldest = min((int(self.rows.state[row, EPOCH]) for row in self._running), default=self.now() + 1)
        reap(self.arrays, oldest)

    def collect(self) -> bool:
        """Like ``_reap``, by looking at every block table: slow and exact, for when there is no room.

        Returns whether anything went.
        """
        a, r = self.arrays, self.rows
        if a.scalars[GRAVE_HEAD] < 0:
            return False
        read = np.zeros(len(a.slot), dtype=np.bool_)
        for row in self._running:
            for g in range(len(a.group)):
                first = r.shape[g, OFFSET]
                read[a.group[g, SLOT_BASE] + r.table[row, first : first + r.span[row, g, SHARED]]] = True
        return int(reap_unread(a, read)) > 0

    # ---------------------------------------------------------------- looking

    def stats(self) -> Stats:
        """Counters per kind and the fill of the tier."""
        self.enter()
        return collect_stats(self.spec, self.arrays, self.geometry, self.cap, self.tickets)

    def check_integrity(self) -> None:
        """Recompute the books from scratch; raises IntegrityError with everything that disagrees."""
        self.enter()
        roots = [ns.root for ns in self._namespaces.values()]
        running = {row: seq.node for row, seq in self._running.items()}
        in_flight = (
            [*self.tickets.holds(), *self.transfers.holds()],
            [*self.tickets.nodes(), *self.transfers.nodes()],
        )
        check_books(self.arrays, self.rows, self.geometry, roots, running, in_flight)

    def running(self) -> tuple[CachedSequence, ...]:
        """The sequences that are open now."""
        return tuple(self._running.values())

    # ---------------------------------------------------------------- small change

    def enter(self) -> None:
        """Refuse calls from a thread that does not own the manager."""
        if self._thread_id is not None and self._thread_id() != self._owner:
            raise WrongThreadError(
                "this manager belongs to the thread that made it; make one manager per thread, or post to that thread"
            )

    def tick(self) -> None:
        """Advance the logical clock that orders evictions."""
        self.arrays.scalars[CLOCK] += 1

    def now(self) -> int:
        """The logical clock."""
        return int(self.arrays.scalars[CLOCK])

    def _new_namespace(self, name: bytes, salt: bytes) -> Namespace:
        root = int(take_node(self.arrays))
        if root < 0 and self.make_node_room():
            root = int(take_node(self.arrays))
        if root < 0:
            raise CapacityError(
                f"the prefix index is full ({len(self.arrays.node)} nodes, all in use); "
                "make the manager with more max_nodes",
                needed=0,
                cap=self.cap,
                in_use=self.in_use(),
                never_fits=False,
            )
        namespace = Namespace(root, salt, self.layout)
        self._namespaces[name] = namespace
        return namespace

    def make_node_room(self) -> bool:
        """Free a place in a full index: forget empty namespaces, else evict.  False when every node is in use."""
        a = self.arrays
        roots = np.array([ns.root for ns in self._namespaces.values()], dtype=np.int64)
        loose = (a.node[roots, ANCHORS] == 0) & (a.node[roots, FIRST_CHECKPOINT] < 0)
        empty = loose & (a.trunk[roots, FIRST_CHILD] < 0)
        for name in [n for n, gone in zip(self._namespaces, empty.tolist(), strict=True) if gone]:
            sweep.free_empty_root(a, self._namespaces.pop(name).root)
        return bool(make_node_room(a))

    def release_slots(self, held: Sequence[tuple[int, int]]) -> None:
        """Release (group, global slot) pairs."""
        for group, slot in held:
            release(self.arrays, group, slot)

    def require_open(self, row: int) -> None:
        """Raise SequenceError when ``row`` is not running."""
        if row not in self._running:
            raise SequenceError("the sequence is closed")


def _check_count(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{name} is {value!r}; use a whole number from 1 to {most}")


def _default_nodes(spec: ModelSpec, geometry: ArenaGeometry) -> int:
    """Twice the segments and checkpoints that the arena can hold, with a floor for tiny arenas.

    Segments count without windows: those of most boundaries go long before the segment does.
    """
    blocks = [g for g in spec.groups if not g.is_snapshot]
    path = [g for g in blocks if not g.window] or blocks
    segment = sum(g.slot_bytes * (spec.segment_tokens // g.block_tokens) for g in path)
    smallest = segment or min(g.slot_bytes for g in spec.groups)
    return min(1 << 24, 2 * (geometry.arena_bytes // smallest) + 1024)
