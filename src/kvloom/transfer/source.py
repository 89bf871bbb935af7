"""The cold tiers as the recovery planner asks them: what each has of a chain, and bringing it while it is worth it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvloom.core.namespace import ExtraKey
from kvloom.manager.ways import Arrived, Standing
from kvloom.plan import Chain, StoredObjects, TransferPlan
from kvloom.tiers.values import Places, Result
from kvloom.transfer.jobs import Urgency
from kvloom.transfer.loading import Load
from kvloom.transfer.offers import make_offer, objects_of
from kvloom.transfer.options import Restoring
from kvloom.transfer.progress import Way
from kvloom.types import Grade, Int32Array

if TYPE_CHECKING:
    from kvloom.transfer.hierarchy import Hierarchy

STEPS = 8
"""Pieces of a load, so that it shows how fast the tiers are now."""
_ASK_S = 0.002
"""How often a load that runs is asked about."""

GiveUp = Callable[[float, Standing], bool]
"""Asked now and then with the seconds since a load began, and how far it has come."""
Ready = Callable[[Load, float], bool]
"""Waits up to so many seconds for what is wanted of a load; whether it is there."""


class TierSource:
    """Belongs to the manager's thread.

    When an interrupt cuts one of its methods short what moves is left to itself.

    Attributes:
        names: of the tiers, nearest first.
        slow: (tier, bytes, seconds) of the load that was given up last: what had come of it, or had not in that time.
        taken: the plan that the last load or fetch took over and has not given back: it ends without the caller.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._all, self._ground = hierarchy, hierarchy.ground
        self._chain: Chain | None = None
        self._found: list[Places | None] = []
        self._begun: list[tuple[Chain, list[Places | None]]] = []
        self._patience_s = self._ground.options.load_deadline_s
        self.names = tuple(link.tier.name for link in hierarchy.links)
        self.slow: tuple[tuple[int, int, float], ...] = ()
        self.taken: TransferPlan | None = None
        self._moving: Load | None = None

    def begin(
        self,
        tokens: Int32Array,
        salt: bytes,
        extra_keys: Sequence[ExtraKey],
        floor: Grade = Grade.FAITHFUL,
        patience_s: float | None = None,
    ) -> list[Chain]:
        """Let what was fetched ahead for a prompt arrive; returns the chains to look for, the longest end first.

        ``tokens``: all that may be resumed.  The last chain is that of all of them; those before it stop at ends within
        that a tier knows.  ``patience_s``: seconds until a tier that does not say what it has is left out, now and in
        ``find``; by default as long as a load may take.
        """
        ground, names = self._ground, (salt, extra_keys)
        most = ground.options.load_deadline_s
        self._patience_s = most if patience_s is None else min(patience_s, most)
        self._all.begin_request()
        chain = ground.chain(tokens, names)
        self._all.await_ends(chain, names, floor, self._patience_s)
        self._all.ahead.take(chain, floor)
        found = self._all.fetching.find(chain, self._patience_s)
        self._begun = [*self._all.fetching.ends_within(chain, names, floor, self._patience_s), (chain, found)]
        return [chain for chain, _ in self._begun]

    def find(self, chain: Chain) -> Sequence[StoredObjects]:
        """What every tier has of a chain that this model can use."""
        self._chain = chain
        begun = [found for each, found in self._begun if each is chain]
        self._begun = [each for each in self._begun if each[0] is not chain]  # once: a load may show that some is gone
        self._found = begun[0] if begun else self._all.fetching.find(chain, self._patience_s)
        return [objects_of(places, self._ground.parts) for places in self._found]

    def note_limits(self, salt: bytes, extra_keys: Sequence[ExtraKey], floor: Grade) -> None:
        """Remember what tiers have of the chain found last that is not good enough, to explain a miss with."""
        assert self._chain is not None
        self._all.fetching.note_limits(self._chain, self._found, (salt, extra_keys), floor)

    def make_room(self) -> bool:
        """Wait, not for long, for transfers that hold slots; whether any has let go of some."""
        return self._all.fetching.make_room()

    def load(self, plan: TransferPlan, floor: Grade, give_up: GiveUp, within: float | None = None) -> Arrived | None:
        """Bring all of a plan, and publish it; None when it was given up.

        ``within``: seconds for all of it, where that is less than a load may take at most.
        """
        limit = self._ground.options.load_deadline_s
        limit = limit if within is None else min(within, limit)
        try:
            load = self._begin(plan, floor, self._ground.options.restoring, np.ones(len(plan), dtype=np.bool_))
            begun = self._ground.clock()
            if load.stages.count > 1:
                if self._wait(load, begun, give_up, Load.wait_first):
                    return None
                if self._all.landing.arrive(load, begun + limit, begun):
                    self._moving = None
                    return Arrived(np.ones(len(plan), dtype=np.bool_), _measured(load))
            if self._wait(load, begun, give_up):
                return None
            measured = _measured(load)
            results = load.finish(self._ground.manager)
            self._moving = None
        except BaseException:
            self._leave()
            raise
        if not results.any():
            load.touch(self._ground.manager.layout)
        return Arrived(results == Result.OK, measured)

    def fetch(self, plan: TransferPlan, wanted: npt.NDArray[np.bool_], floor: Grade, give_up: GiveUp) -> Arrived | None:
        """Bring the objects ``wanted`` (bool ``[len(plan)]``) of a plan, which stays open; None: it is not any more."""
        try:
            load = self._begin(plan, floor, Restoring.WHOLE, wanted)
            if self._wait(load, self._ground.clock(), give_up):
                return None
        except BaseException:
            self._leave()
            raise
        self._moving = self.taken = None
        return Arrived((load.results() == Result.OK) & wanted, _measured(load))

    def _begin(self, plan: TransferPlan, floor: Grade, restoring: Restoring, wanted: npt.NDArray[np.bool_]) -> Load:
        assert self._chain is not None
        ground, self.slow = self._ground, ()
        offer = make_offer(self._found, floor, ground.parts)
        way = Way(Urgency.LOAD, ground.options.load_deadline_s, restoring, STEPS)
        window = ground.options.prefetch_window
        self._moving = Load.begin(ground.manager, ground.links, self._chain, plan, offer, way, window, wanted)
        self.taken = plan
        return self._moving

    def _wait(self, load: Load, begun: float, give_up: GiveUp, ready: Ready = Load.wait_for) -> bool:
        """Wait for a load while it is worth it; whether it was given up, and then is none of the caller's business."""
        ground = self._ground
        while not ready(load, _ASK_S):
            took = ground.clock() - begun
            late = took > ground.options.load_deadline_s or give_up(took, load.standing(begun))
            if late or ground.hurried():
                self.slow = _late(load, took) if late else ()
                load.cancel(late=not ground.hurried())
                self._leave()
                return True
        return False

    def _leave(self) -> None:
        """What still moves keeps its slots until it has ended."""
        load, self._moving = self._moving, None
        if load is not None:
            load.cancel()
            if self._all.arriving is not None and self._all.arriving.load is load:
                self._all.give_up()
            else:
                self._all.late.leave(load)


def _measured(load: Load) -> tuple[tuple[int, int, float], ...]:
    """(tier, bytes, seconds) of what was read at the speed of its tier."""
    measured = []
    for each in load.bringing:
        pieces = [piece for piece in each.progress.pieces if not piece.rested]
        if pieces:
            seconds = sum(piece.ended - piece.begun for piece in pieces)
            measured.append((each.number, sum(piece.n_bytes for piece in pieces), seconds))
    return tuple(measured)


def _late(load: Load, took: float) -> tuple[tuple[int, int, float], ...]:
    """(tier, bytes, seconds) of a load that is given up: the pieces that came, or the first one, that had not yet."""
    nothing = [(each.number, int(each.ends[0]), took) for each in load.bringing if not each.progress.pieces]
    return (*_measured(load), *nothing)
