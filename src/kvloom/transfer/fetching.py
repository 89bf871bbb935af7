"""From cold tiers to the device: what they have of a prompt, the best plan to bring it, and waiting for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvloom.plan import Chain, Limit
from kvloom.tiers.values import Places, Result
from kvloom.transfer.ground import Ground, Names
from kvloom.transfer.jobs import Urgency
from kvloom.transfer.landing import Landing, Late
from kvloom.transfer.link import ASK_PATIENCE
from kvloom.transfer.loading import Load
from kvloom.transfer.offers import Offer, make_offer, objects_of
from kvloom.transfer.options import Restoring
from kvloom.transfer.progress import Way
from kvloom.types import Grade

_TRIES = 4
"""Loads for one request: after one that did not arrive whole, what is left is tried."""


class Fetching:
    """Attributes:
    limits: of the last request: what a tier has, but not good enough.
    make_room: waits, not for long, for transfers that hold slots; whether any has let go of some.
    """

    def __init__(self, ground: Ground, landing: Landing, late: Late) -> None:
        self._ground, self._landing, self._late = ground, landing, late
        self._tails: set[tuple[int, int]] = set()
        self.limits: list[Limit] = []
        self.make_room: Callable[[], bool] = lambda: False

    # ---------------------------------------------------------------- finding

    def find(self, chain: Chain, patience_s: float = ASK_PATIENCE) -> list[Places | None]:
        """The places of a chain in every tier; None where a tier has nothing of it, or does not say so in time."""
        places: list[Places | None] = []
        self._tails = set()
        for link in self._ground.links:
            found = link.find(self._ground.manager.layout, chain, patience_s)
            places.append(found.places if len(found.places) else None)
            self._tails.update((row, tokens) for row, tokens in found.tails.tolist())
        return places

    def ends_within(
        self, chain: Chain, names: Names, floor: Grade, patience_s: float
    ) -> list[tuple[Chain, list[Places | None]]]:
        """Chains that stop at ends within the one that was just found, and their places; the longest first.

        A tier says only how long they are: those that end with other tokens are left out, and those that the device
        goes beyond.
        """
        if not self._tails:
            return []
        here = self._here(chain, names, floor)
        lengths = {(row + 1) * chain.segment + tokens for row, tokens in self._tails}
        reached, ends = len(chain.tokens), []
        wanted = sorted((length for length in lengths if here < length < reached), reverse=True)
        for length in wanted[:_TRIES]:
            end = self._ground.chain(chain.tokens[:length], names)
            found = self.find(end, patience_s)
            if any(places is not None and (places.rows == len(end.digests) - 1).any() for places in found):
                ends.append((end, found))
        return ends

    def note_limits(self, chain: Chain, found: Sequence[Places | None], names: Names, floor: Grade) -> None:
        """Remember what a tier has of a chain that is not good enough, where that is what keeps it from being used."""
        ground, (salt, keys) = self._ground, names
        for link, places in zip(ground.links, found, strict=True):
            if places is not None and (places.entries["grade"] < int(floor)).any():
                stored, tier = objects_of(places, ground.parts), link.tier.name
                explain = ground.manager.colder.explain_load
                limits = explain(chain.tokens, stored, tier=tier, salt=salt, extra_keys=keys, floor=floor)
                self.limits += [limit for limit in limits if limit not in self.limits]

    # ---------------------------------------------------------------- loading

    def restore(self, chain: Chain, names: Names, floor: Grade, restoring: Restoring, ends_at: float) -> None:
        """Bring what lets a chain resume further on, in several tries when something does not arrive."""
        for _ in range(_TRIES):  # damaged objects are not found again, but something shorter may be
            begun = self._ground.clock()
            load = self.begin(chain, names, floor, Way(Urgency.LOAD, ends_at - begun, restoring))
            if load is None or self._landing.arrive(load, ends_at, begun) or not self._end(load, ends_at):
                break

    def begin(self, chain: Chain, names: Names, floor: Grade, way: Way) -> Load | None:
        """Plan and begin the best load for a chain, or for an earlier end within it; None when nothing helps."""
        ground = self._ground
        waits = way.urgency is Urgency.LOAD
        patience = ground.options.load_deadline_s if waits and way.within is None else way.within or ASK_PATIENCE
        found = self.find(chain, patience)
        for end, shorter in self.ends_within(chain, names, floor, patience):
            load = self._plan_in_room(end, make_offer(shorter, floor, ground.parts), names, floor, way)
            if load is not None:
                return load
        return self._plan_in_room(chain, make_offer(found, floor, ground.parts), names, floor, way)

    def _plan_in_room(self, chain: Chain, offer: Offer, names: Names, floor: Grade, way: Way) -> Load | None:
        """Plan; where there may be no room because slots are still being stored, once more when they are not."""
        load = self._plan(chain, offer, names, floor, way)
        if load is not None or way.urgency is not Urgency.LOAD or not len(offer):
            return load
        reach = min(chain.segment * (int(offer.stored.row.max()) + 1), len(chain.tokens))
        if self._here(chain, names, floor) >= reach or not self.make_room():
            return None
        return self._plan(chain, offer, names, floor, way)

    def _here(self, chain: Chain, names: Names, floor: Grade) -> int:
        """How many tokens of a chain the device resumes behind."""
        salt, keys = names
        return self._ground.manager.colder.survey(chain.tokens, salt=salt, extra_keys=keys, floor=floor).reused

    def _plan(self, chain: Chain, offer: Offer, names: Names, floor: Grade, way: Way) -> Load | None:
        self.note_limits(chain, offer.places, names, floor)
        if not len(offer):
            return None
        ground, (salt, keys) = self._ground, names
        plan = ground.manager.colder.plan_load(chain.tokens, offer.stored, salt=salt, extra_keys=keys, floor=floor)
        if plan is None:
            return None
        return Load.begin(ground.manager, ground.links, chain, plan, offer, way, ground.options.prefetch_window)

    def _end(self, load: Load, ends_at: float) -> bool:
        """Wait for a load and publish it; whether another one may do better (False: it was late, or all arrived)."""
        try:
            arrived = self._landing.wait(load, ends_at)
        except BaseException:  # an interrupt: what still moves keeps its slots until it has ended
            load.cancel()
            self._late.leave(load)
            raise
        if not arrived:
            load.cancel(late=True)
            self._late.leave(load)
            return False
        results = load.finish(self._ground.manager)
        if not results.any():
            load.touch(self._ground.manager.layout)
            return False
        # What a device cannot read now it may read later; it is not asked again at once.
        return not np.isin(results, (Result.IO_ERROR, Result.STOPPED)).any()
