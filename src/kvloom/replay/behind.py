"""Host and disk behind the device of a replay: the real hierarchy and the real planner over virtual tiers.

A virtual clock adds up what loads take at the given speeds and what computing takes.  The planner is told both, as if
it had measured them, and chooses for every request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvloom.manager.manager import Manager
from kvloom.manager.recovery import Recovery
from kvloom.manager.sequence import CachedSequence
from kvloom.manager.surveys import Reach, Survey
from kvloom.manager.ways import Choice, Option, Way
from kvloom.replay.virtual import VirtualClock, VirtualTier
from kvloom.transfer.hierarchy import Hierarchy
from kvloom.transfer.inline import Inline
from kvloom.transfer.offers import make_offer
from kvloom.transfer.options import Admission, Restoring, TransferOptions
from kvloom.transfer.source import TierSource
from kvloom.types import Grade, Int32Array, IntArray

SALT = b""
FLOOR = Grade.FAITHFUL
_LEARNED = (1, 64, 4096)
_LOADED = (1 << 20, 64 << 20, 1 << 30)
"""Tokens and bytes of the pieces of work from which the planner learns the given speeds."""

MakeTiers = Callable[[VirtualClock], Sequence[VirtualTier]]


class NoMemory:
    """The bytes of an arena that has none."""

    def __init__(self, n_bytes: int) -> None:
        nothing = np.zeros(1, np.uint8)
        self._bytes = np.lib.stride_tricks.as_strided(nothing, (n_bytes,), (0,))

    def settle(self) -> None:
        """Nothing is queued."""

    def read_slot(self, offset: int, into: memoryview) -> None:
        """All of it is zero."""
        into[:] = bytes(len(into))

    def host_memory(self) -> npt.NDArray[np.uint8]:
        """As long as the arena; all of it is one byte."""
        return self._bytes

    def write_slots(self, offsets: IntArray, lengths: IntArray, data: npt.NDArray[np.uint8]) -> None:
        """Nothing is kept."""


@dataclass(slots=True)
class Passage:
    """A request on its way to its first token.

    Attributes:
        begun: when.
        device: tokens that the device alone would have given.
        choice: the way that was chosen; None for a prompt of one token.
        reaches: (tiers, position) that colder tiers could have brought.
    """

    begun: float
    device: int
    choice: Choice | None
    reaches: tuple[tuple[int, int], ...] = ()


class Behind:
    """Colder tiers behind one manager.

    Args:
        make: the tiers, nearest first.
        prefill_speed: tokens per second.
        admission: which ends the tiers behind the nearest one are told of.

    Attributes:
        seconds: float64, to the first token of every request so far; ``recompute`` without loads and replays.
        tokens_by: tokens that needed no compute by where they came from: the device, each tier, ``replay``.
        served_by: requests that got any from there.
        replay_bytes: that replays had to load first, by kind.
        uses: of every segment, by digest: requests that had it in their prompt or answer.
    """

    def __init__(self, manager: Manager, make: MakeTiers, prefill_speed: float, admission: Admission) -> None:
        self.clock = VirtualClock()
        self.tiers = tuple(make(self.clock))
        self.prefill_speed = prefill_speed
        self._manager = manager
        self.hierarchy = Hierarchy(
            manager,
            NoMemory(manager.geometry.arena_bytes),
            self.tiers,
            TransferOptions(admission=admission, restoring=Restoring.WHOLE),
            self.clock,
            Inline,
        )
        self._source = TierSource(self.hierarchy)
        names = [tier.name for tier in self.tiers]
        self.recovery = Recovery(manager.spec, names)
        for tokens in _LEARNED:
            self.recovery.prefilled(0, tokens, tokens / prefill_speed)
        for n_bytes in _LOADED:
            for number, tier in enumerate(self.tiers):
                self.recovery.loaded(number, n_bytes, tier.read_s(n_bytes))
        self.seconds: list[float] = []
        self.recompute: list[float] = []
        self.tokens_by = dict.fromkeys(("device", *names, Way.EXACT_REPLAY.value), 0)
        self.served_by = dict.fromkeys(self.tokens_by, 0)
        self.replay_bytes: Counter[str] = Counter()
        self.uses: dict[bytes, int] = {}

    # ---------------------------------------------------------------- before a request

    def restore(self, prompt: Int32Array) -> Passage:
        """Let a prompt resume as far on as is worth it; call it right before ``Manager.open``."""
        begun, ids = self.clock(), prompt[:-1]
        if not len(ids):
            return Passage(begun, 0, None)
        survey = self._survey(ids)
        choice = self.recovery.choose(survey)
        reaches = tuple((reach.tiers, reach.position) for reach in survey.restored)
        chosen = choice.chosen
        if choice.way is Way.RESTORE:
            self.hierarchy.restore(prompt[: chosen.position + 1], SALT, (), FLOOR)
        elif choice.way is not Way.RECOMPUTE:
            self._replay(chosen, ids[: chosen.position])
        return Passage(begun, survey.reused, choice, reaches)

    def _survey(self, ids: Int32Array) -> Survey:
        """From where a prompt could go on: at its own boundaries, or at an end within it that a tier knows."""
        *ends, whole = self._source.begin(ids, SALT, ())
        survey = self._manager.colder.survey(ids, self._source.find(whole), floor=FLOOR)
        restored, replayed = list(survey.restored), list(survey.replayed)
        for end in ends:
            if len(end.tokens) > survey.reused:
                found = self._manager.colder.survey(end.tokens, self._source.find(end), floor=FLOOR)
                restored += found.restored
                replayed += found.replayed
        return replace(survey, restored=_deeper(restored, survey.reused), replayed=_deeper(replayed, survey.reused))

    def _replay(self, option: Option, ids: Int32Array) -> None:
        """Bring what the replay builds on, and run it."""
        manager, chain = self._manager, self._manager.colder.chain(ids)
        assert option.reach is not None
        assert option.span is not None
        offer = make_offer(self.hierarchy.fetching.find(chain), FLOOR, self.hierarchy.ground.parts)
        made = manager.colder.plan_replay(ids, offer.stored, option.grade, floor=FLOOR)
        if made is None:
            return
        plan, _ = made
        for number, tier in enumerate(self.tiers):
            n_bytes = option.reach.tier_bytes[number]
            if n_bytes:
                tier.read_bytes += n_bytes
                self.clock.advance(tier.read_s(n_bytes))
                self.hierarchy.links[number].touch(manager.layout, chain.digests[-1].tobytes())
        self.replay_bytes.update(option.reach.kind_bytes)
        self.clock.advance(option.span.tokens / self.prefill_speed)
        manager.colder.finish_load(plan, np.ones(len(plan), np.bool_))
        self.recovery.stats.replays += 1
        self.recovery.stats.replayed_tokens += option.span.tokens

    # ---------------------------------------------------------------- during and after one

    def opened(self, passage: Passage, sequence: CachedSequence, prompt: int, reused: int) -> None:
        """A prompt was opened, and ``reused`` of its tokens need no compute: compute the others; what came whence?"""
        self.clock.advance((prompt - reused) / self.prefill_speed)
        seconds = self.clock() - passage.begun
        self.seconds.append(seconds)
        self.recompute.append((prompt - min(passage.device, reused)) / self.prefill_speed)
        if passage.choice is not None:
            self.recovery.observed(passage.choice, seconds, given_up=sequence.reused < passage.choice.position)
        device = min(passage.device, reused)
        self._came("device", device)
        replayed = passage.choice is not None and passage.choice.way in {Way.EXACT_REPLAY, Way.BOUNDED_REPLAY}
        if replayed:
            self._came(Way.EXACT_REPLAY.value, reused - device)
            return
        at = device
        for number, tier in enumerate(self.tiers, 1):
            reach = max((position for tiers, position in passage.reaches if tiers <= number), default=at)
            until = reused if number == len(self.tiers) else max(at, min(reused, reach))
            self._came(tier.name, until - at)
            at = until

    def refused(self, prompt: int) -> None:
        """The prompt can never fit on the device: all of it is computed."""
        self.clock.advance(prompt / self.prefill_speed)
        self.seconds.append(prompt / self.prefill_speed)
        self.recompute.append(prompt / self.prefill_speed)

    def _came(self, source: str, tokens: int) -> None:
        self.tokens_by[source] += tokens
        self.served_by[source] += tokens > 0

    def keep(self, sequence: CachedSequence) -> None:
        """The present end of a sequence was kept resumable: what is to be stored of it is, and holds nothing more."""
        self.hierarchy.keep(sequence, SALT, ())
        self.hierarchy.flush()

    def written_by_kind(self, number: int) -> dict[str, int]:
        """Bytes of objects that a tier was given, by kind."""
        total: Counter[str] = Counter()
        for group, n_bytes in sorted(self.tiers[number].payload.items()):
            total[self._manager.spec.groups[group].kind.name.lower()] += n_bytes
        return dict(total)

    def note_use(self, tokens: Int32Array) -> None:
        """A request computed or reused ``tokens``: what of them is used more than once is known at the end."""
        whole = len(tokens) // self._manager.spec.segment_tokens * self._manager.spec.segment_tokens
        if whole:
            for digest in self._manager.colder.chain(tokens[:whole]).digests:
                name = digest.tobytes()
                self.uses[name] = self.uses.get(name, 0) + 1


def _deeper(reaches: Sequence[Reach], reused: int) -> tuple[Reach, ...]:
    """Of every number of tiers the deepest boundary, where more tiers reach deeper than fewer."""
    best: dict[int, Reach] = {}
    for reach in reaches:
        if reach.tiers not in best or best[reach.tiers].position < reach.position:
            best[reach.tiers] = reach
    made, deepest = [], reused
    for tiers in sorted(best):
        if best[tiers].position > deepest:
            made.append(best[tiers])
            deepest = best[tiers].position
    return tuple(made)
