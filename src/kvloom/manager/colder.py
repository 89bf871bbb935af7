"""What goes to colder tiers and comes from them: the one door between a manager's index and what is stored elsewhere.

Nothing here moves bytes or knows a tier: what a tier has arrives as ``StoredObjects``, what is to move leaves as a
``TransferPlan``, and what came of it is reported back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvloom.core import calls
from kvloom.core.child_table import find_checkpoint
from kvloom.core.digests import prefix_digests
from kvloom.core.fields import COL_BASE
from kvloom.core.namespace import ExtraKey
from kvloom.manager.books import Books
from kvloom.manager.inputs import grade_of
from kvloom.manager.sequence import CachedSequence, require_own
from kvloom.manager.surveys import Survey, survey
from kvloom.manager.transfers import Prompt
from kvloom.plan import Chain, Limit, StoredObjects, TransferPlan
from kvloom.types import AnyArray, Grade, Int32Array, Reason


class ColderTiers:
    """The calls about colder tiers of one manager, its ``colder``.

    As with the manager's own calls, each succeeds or raises and leaves everything as it was; all of them raise
    WrongThreadError in another thread.
    """

    def __init__(self, books: Books) -> None:
        self._books = books

    def chain(self, tokens: AnyArray, *, salt: bytes = b"", extra_keys: Sequence[ExtraKey] = ()) -> Chain:
        """The names under which colder tiers know ``tokens``; see ``docs/identity.md``.

        Raises InputError like ``Manager.open``.
        """
        self._books.enter()
        ids = self._books.ids.checked(tokens)
        namespaces, segment = self._books.namespaces, self._books.spec.segment_tokens
        keys = namespaces.prefix_keys(namespaces.name(salt, extra_keys))
        return Chain(keys.root, prefix_digests(keys, ids, segment), ids, segment)

    # ---------------------------------------------------------------- loads

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
            salt, extra_keys, floor: as in ``Manager.open``.

        Raises InputError like ``Manager.open``, and for objects that the model does not have.
        """
        ids, floor = self._asked(tokens, floor)
        colds = [self._cold(ids, stored) for stored in tiers]
        prompt, reused = self._known(ids, salt, extra_keys, floor)
        return survey(self._books.arrays, self._books.spec, prompt, colds, reused, floor)

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
            salt, extra_keys, floor: as in ``Manager.open``.

        Returns None when nothing there helps, when the prompt can never fit, or when there is no room for what would
        be brought (``Manager.transfers.unkept`` counts these).
        Copy every object into its slot and report with ``finish_load``; then open the prompt.
        Raises InputError like ``Manager.open``, and for objects that the model does not have; CapacityError when the
        index is full.
        """
        ids, floor = self._asked(tokens, floor)
        self._books.tick()
        if not self._books.capacity.fits(len(ids) + 1):
            return None
        return self._planned(ids, self._cold(ids, stored), salt, extra_keys, floor)

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
            salt, extra_keys, floor: as in ``Manager.open``.

        Returns the plan and which of its objects must be computed, bool ``[len(plan)]``, or None as ``plan_load``,
        and when more than windows and tails is missing.
        """
        ids, floor = self._asked(tokens, floor)
        transfers = self._books.transfers
        self._books.tick()
        if not self._books.capacity.fits(len(ids) + 1):
            return None
        cold = self._cold(ids, stored)
        made = transfers.replayable(cold, len(ids), min(grade_of(grade, "grade"), Grade.FAITHFUL), floor.value)
        plan = self._planned(ids, cold, salt, extra_keys, floor)
        if plan is None:
            return None
        if plan.position != len(ids):  # its prefix is not whole: what was counted as there is of no use
            transfers.finish_load(plan, np.zeros(len(plan), dtype=np.bool_))
            return None
        return plan, made[plan.row, self._books.arrays.group[plan.group, COL_BASE] + plan.column]

    def prefix_slots(self, plan: TransferPlan) -> tuple[Int32Array, ...]:
        """Where the compressed state lies that a replay reads: see ``Transfers.prefix_slots``."""
        self._books.enter()
        return self._books.transfers.prefix_slots(plan)

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
        ids, floor = self._asked(tokens, floor)
        cold = self._cold(ids, stored)
        prompt, _ = self._known(ids, salt, extra_keys, floor)
        groups = self._books.spec.groups
        return tuple(
            Limit(Reason.GRADE, position, tier if colder else "device", groups[g].kind, groups[g].name)
            for g, position, colder in self._books.transfers.below_floor(prompt, cold, floor.value)
        )

    def begin_arriving(self, plan: TransferPlan) -> None:
        """Publish the objects of an open load before their bytes are there, so that its prompt can be opened now.

        Until ``finish_load`` they are held, and whoever reads a slot has to wait for its bytes: the manager does not
        know which have come.  A plan that is not open, or published already, is ignored and counted.  Raises InputError
        like ``finish_load``.
        """
        self._books.enter()
        self._books.tick()
        self._books.transfers.begin_arriving(plan)

    def withdraw(self, plan: TransferPlan, good: AnyArray) -> None:
        """Of a load that ``begin_arriving`` published, quarantine what will not come (``good`` false), slot by slot.

        Running sequences that read one of these slots are broken.  The slots stay held, since a late write may still
        land there, until ``finish_load``, which does the same for what is not good then.  Ignored and raises like it.
        """
        self._books.enter()
        self._books.tick()
        if self._books.transfers.withdraw(plan, np.ascontiguousarray(good, dtype=np.bool_)):
            self._books.roster.distrust()

    def finish_load(self, plan: TransferPlan, good: AnyArray) -> None:
        """The load ended: ``good`` bool ``[len(plan)]`` says which objects arrived verified, and these are published.

        A plan that is not open is ignored and counted; InputError for one that is another manager's, and for a ``good``
        of another shape.
        """
        self._books.enter()
        self._books.tick()
        if self._books.transfers.finish_load(plan, np.ascontiguousarray(good, dtype=np.bool_)):
            self._books.roster.distrust()

    def may_take_over(self, sequence: CachedSequence) -> bool:
        """Whether a commit of ``sequence`` may take over objects that are published and not all there."""
        return self._books.transfers.on_the_way(require_own(self._books, sequence).node)

    # ---------------------------------------------------------------- stores

    def plan_offload(
        self,
        tokens: AnyArray,
        stored: StoredObjects,
        *,
        salt: bytes = b"",
        extra_keys: Sequence[ExtraKey] = (),
        floor: Grade = Grade.FAITHFUL,
    ) -> TransferPlan | None:
        """What a colder tier lacks of the unit of the deepest boundary of ``tokens`` that is resumable at ``floor``.

        What is cached of them counts, whether or not a sequence holds it (any more).  ``stored``: what the tier has of
        their chain.  Returns None when it lacks nothing, or nothing is cached.  The slots are held until
        ``finish_store``.  Raises InputError like ``Manager.open``, and for objects that the model does not have.
        """
        offered = self._offered(tokens, stored, salt, extra_keys, floor)
        return None if offered is None else self._books.transfers.store(*offered, grade_of(floor).value)

    def plan_units(
        self,
        tokens: AnyArray,
        stored: StoredObjects,
        *,
        salt: bytes = b"",
        extra_keys: Sequence[ExtraKey] = (),
    ) -> tuple[TransferPlan, ...]:
        """``plan_offload`` for every grade in one question, the best first; each plan lacks what those before it store.

        One for the last canonical boundary, one for the exact end, as far as the tier lacks something of them.  All of
        them are to be ended by ``finish_store``.
        """
        offered = self._offered(tokens, stored, salt, extra_keys, Grade.APPROXIMATE)
        return () if offered is None else self._books.transfers.units(*offered)

    def finish_store(self, plan: TransferPlan) -> None:
        """The store ended, well or not; like ``finish_load``."""
        self._books.enter()
        self._books.tick()
        self._books.transfers.finish_store(plan)

    # ---------------------------------------------------------------- parts

    def _asked(self, tokens: AnyArray, floor: Grade) -> tuple[Int32Array, Grade]:
        self._books.enter()
        floor = grade_of(floor)
        return self._books.ids.checked(tokens), floor

    def _cold(self, ids: Int32Array, stored: StoredObjects) -> AnyArray:
        return self._books.transfers.cold(-(-len(ids) // self._books.spec.segment_tokens), stored)

    def _offered(
        self, tokens: AnyArray, stored: StoredObjects, salt: bytes, extra_keys: Sequence[ExtraKey], floor: Grade
    ) -> tuple[Prompt, AnyArray] | None:
        """What the device has of tokens, and a tier; None for a namespace that the device does not know."""
        ids, floor = self._asked(tokens, floor)
        self._books.tick()
        namespace = self._books.namespaces.find(salt, extra_keys)
        cold = self._cold(ids, stored)
        return None if namespace is None else (self._matched(namespace.root, ids, floor)[0], cold)

    def _planned(
        self, ids: Int32Array, cold: AnyArray, salt: bytes, extra_keys: Sequence[ExtraKey], floor: Grade
    ) -> TransferPlan | None:
        books, transfers = self._books, self._books.transfers
        root = books.namespace(books.namespaces.name(salt, extra_keys), salt).root
        unkept = transfers.unkept
        prompt, reused = self._matched(root, ids, floor)
        plan = transfers.load(prompt, cold, reused, floor.value)
        if transfers.unkept > unkept and books.roster.collect():
            transfers.unkept = unkept
            prompt, reused = self._matched(root, ids, floor)
            plan = transfers.load(prompt, cold, reused, floor.value)
        return plan

    def _known(self, ids: Int32Array, salt: bytes, extra_keys: Sequence[ExtraKey], floor: Grade) -> tuple[Prompt, int]:
        """Like ``_matched``, also for a namespace that the index does not have."""
        namespace = self._books.namespaces.find(salt, extra_keys)
        if namespace is None:
            return Prompt(ids, np.full(len(ids) // self._books.spec.segment_tokens + 1, -1, np.int32), 0, -1), 0
        return self._matched(namespace.root, ids, floor)

    def _matched(self, root: int, ids: Int32Array, floor: Grade) -> tuple[Prompt, int]:
        """The chain as the device knows it, and how much of it the device alone gives."""
        books, segment = self._books, self._books.spec.segment_tokens
        limit = np.append(ids, ids[:1])  # a match never reuses the last token
        _, known, position, _, _ = calls.match_prompt(books.handle, root, limit, books.ids.top, floor.value, books.path)
        segments, tail = divmod(len(ids), segment)
        path = np.full(segments + 1, -1, dtype=np.int32)  # may be more than the index has nodes
        path[: known + 1] = books.path[: known + 1]
        checkpoint = -1
        if tail and known == segments:
            start = segments * segment
            checkpoint = int(find_checkpoint(books.arrays, int(path[segments]), ids, start, tail))
        return Prompt(ids, path, known, checkpoint), int(position)
