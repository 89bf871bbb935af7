"""Prefetches: loads for prompts that wait, which hold their room until the prompt is opened or will not be."""

from __future__ import annotations

from collections import OrderedDict

from kvloom.plan import Chain
from kvloom.tiers.values import Result
from kvloom.transfer.fetching import Fetching
from kvloom.transfer.ground import Ground, Names, name_of
from kvloom.transfer.jobs import Urgency
from kvloom.transfer.landing import Landing, Late
from kvloom.transfer.loading import Load
from kvloom.transfer.progress import Way
from kvloom.types import Grade


class Ahead:
    """What was fetched ahead and not asked for, by the name of its prompt."""

    def __init__(self, ground: Ground, fetching: Fetching, landing: Landing, late: Late) -> None:
        self._ground, self._fetching, self._landing, self._late = ground, fetching, landing, late
        self._loads: OrderedDict[bytes, tuple[Load, Grade]] = OrderedDict()

    @property
    def loads(self) -> list[Load]:
        """The oldest first."""
        return [load for load, _ in self._loads.values()]

    def begin(self, chain: Chain, names: Names, floor: Grade) -> bool:
        """Begin to bring what a chain resumes from; whether something is under way."""
        name = name_of(chain)
        if name in self._loads:
            if self._loads[name][1] >= floor:
                return True
            self.forget(chain)
        if len(self._loads) >= self._ground.options.most_prefetches:
            return False
        load = self._fetching.begin(chain, names, floor, Way(Urgency.PREFETCH))
        if load is None:
            return False
        if any(each.job is None for each in load.bringing):  # a lane is full, or hangs
            load.cancel()
            self._late.loads.append(load)
            self._late.collect()
            return False
        self._loads[name] = load, floor
        self._ground.stats.prefetched += 1
        return True

    def take(self, chain: Chain, floor: Grade) -> bool:
        """Let what was fetched ahead for a chain arrive; whether to look for something better now."""
        ground, name = self._ground, name_of(chain)
        load, best = self._loads.get(name, (None, floor))
        if load is None:
            return True
        if best < floor:  # it may be of no use, and something better may be there
            self.forget(chain)
            return True
        patience = ground.options.load_deadline_s
        load.hasten(patience)
        arrived = self._landing.wait(load, ground.clock() + patience)  # an interrupt leaves it ahead
        del self._loads[name]
        ground.stats.prefetch_used += 1
        if not arrived:
            load.cancel(late=True)
            self._late.leave(load)
            return False
        results = load.finish(ground.manager)
        if not results.any():
            load.touch(ground.manager.layout)
        # More may have come to the tiers since; what a device cannot read now it is not asked for again at once.
        return not (results == Result.IO_ERROR).any()

    def objects(self, chain: Chain) -> dict[str, tuple[int, int]]:
        """``Load.objects`` of what is fetched ahead for a chain; empty when nothing is."""
        ahead = self._loads.get(name_of(chain))
        return {} if ahead is None else ahead[0].objects()

    def forget(self, chain: Chain) -> None:
        """The prompt of a prefetch is not going to be opened.  Harmless for one that is not known."""
        self._forget(name_of(chain))

    def forget_all(self) -> None:
        """No prompt of a prefetch is going to be opened."""
        for name in list(self._loads):
            self._forget(name)

    def _forget(self, name: bytes) -> None:
        ahead = self._loads.pop(name, None)
        if ahead is not None:
            ahead[0].cancel()
            self._late.loads.append(ahead[0])
            self._late.collect()

    def __len__(self) -> int:
        return len(self._loads)
