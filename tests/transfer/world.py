"""A manager with a toy engine and real tiers behind it: every forward finds out whether what it reads is right.

``ToyMemory`` is the arena as transfers see it: the entries of the toy engine's slots, as bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from tests.core.toy_engine import Entry, ToyEngine

from kvloom.config import Device
from kvloom.errors import CapacityError
from kvloom.manager import CachedSequence, Manager
from kvloom.plan import CopyPlan
from kvloom.spec.model_spec import ModelSpec
from kvloom.tiers.contract import Tier
from kvloom.transfer.hierarchy import Hierarchy
from kvloom.transfer.options import TransferOptions
from kvloom.types import Grade, IntArray

_NOTHING = np.iinfo(np.int64).min
SALTS = (b"", b"tenant")
Tokens = tuple[int, ...]
T = TypeVar("T")


class ToyMemory:
    """Bytes of slots: two int64 for every entry, the digest and whether it is canonical; the rest repeats them."""

    def __init__(self, engine: ToyEngine) -> None:
        self._engine, self._geometry = engine, engine.manager.geometry
        self.delay: Callable[[], None] = lambda: None

    def settle(self) -> None:
        """Nothing is queued."""

    def host_memory(self) -> npt.NDArray[np.uint8] | None:
        """It is none."""
        return None

    def read_slot(self, offset: int, into: memoryview) -> None:
        """The entries of the slot at ``offset``."""
        self.delay()
        group, slot = self._at(offset)
        words = np.frombuffer(into, dtype=np.int64)
        entries = self._engine.arena.read(group, slot)
        row = [word for entry in entries for word in ((_NOTHING, 0) if entry is None else (entry[0], int(entry[1])))]
        words[:] = np.resize(np.array(row, dtype=np.int64), len(words))

    def write_slots(self, offsets: IntArray, lengths: IntArray, data: npt.NDArray[np.uint8]) -> None:
        """Set the entries of slots."""
        at = 0
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
            group, slot = self._at(offset)
            words = np.frombuffer(data[at : at + length].tobytes(), dtype=np.int64)
            count = self._engine.spec.groups[group].block_entries
            pairs = words[: 2 * count].reshape(-1, 2).tolist()
            assert (words == np.resize(words[: 2 * count], len(words))).all(), "bytes of a slot are torn"
            entries: list[Entry] = [None if digest == _NOTHING else (digest, made) for digest, made in pairs]
            self._engine.arena.slots[(group, slot)] = entries
            at += length

    def _at(self, offset: int) -> tuple[int, int]:
        for g in range(len(self._engine.spec.groups)):
            base = int(self._geometry.base[g])
            page, within = divmod(offset - base, int(self._geometry.page_bytes[g]))
            slot = page * int(self._geometry.slots_per_page[g]) + within // int(self._geometry.slot_bytes[g])
            exists = 0 <= slot < self._geometry.num_slots[g] and self._geometry.slot_offset(g, slot) == offset
            if exists and self._owned(g, slot):
                return g, slot
        raise AssertionError(f"no slot in use begins at {offset}")

    def _owned(self, group: int, slot: int) -> bool:
        """Whether the page of a slot belongs to its group now: slots of several groups may begin at one offset."""
        from kvloom.core.fields import PAGE_BASE, PAGE_GROUP, SLOTS_PER_PAGE

        a = self._engine.manager.arrays
        row = a.group[group]
        page = int(row[PAGE_BASE]) + slot // int(row[SLOTS_PER_PAGE])
        return int(a.page[page, PAGE_GROUP]) == group


class PatientEngine(ToyEngine):
    """Asks once more, when the tiers hold room that they can let go of."""

    cold: Hierarchy

    def forward(self, sequence: CachedSequence, tokens: Sequence[int], grade: Grade = Grade.CANONICAL) -> CopyPlan:
        """As ``ToyEngine``."""
        return self.with_room(lambda: super(PatientEngine, self).forward(sequence, tokens, grade))

    def with_room(self, ask: Callable[[], T]) -> T:
        """What ``ask`` returns."""
        try:
            return ask()
        except CapacityError as error:
            if error.never_fits or not self.cold.waiting:
                raise
            self.cold.make_room()
            return ask()


class World:
    """One process: a device of ``arena`` bytes with ``tiers`` behind it."""

    def __init__(
        self,
        spec: ModelSpec,
        arena: int,
        tiers: Sequence[Tier],
        options: TransferOptions | None = None,
        *,
        policy: str = "cost",
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.manager = Manager(spec, [Device(arena)], policy=policy, max_sequences=16)
        self.engine = PatientEngine(self.manager)
        self.memory = ToyMemory(self.engine)
        extra: dict[str, Any] = {} if clock is None else {"clock": clock}
        self.cold = self.engine.cold = Hierarchy(self.manager, self.memory, tiers, options, **extra)

    def open(self, prompt: Tokens, salt: bytes = b"", floor: Grade = Grade.FAITHFUL) -> CachedSequence:
        """As an engine opens: restore, then open, with a second try when the tiers hold the room."""
        ids = np.array(prompt, dtype=np.int32)
        self.cold.restore(ids, salt, (), floor)
        return self.engine.with_room(lambda: self.engine.open(prompt, salt=salt, floor=floor))

    def keep(self, sequence: CachedSequence, salt: bytes = b"") -> None:
        """Keep the present end resumable, in the tiers too."""
        self.engine.finish(sequence.checkpoint())
        self.cold.keep(sequence, salt, ())

    def serve(self, prompt: Tokens, answer: Tokens = (), salt: bytes = b"", floor: Grade = Grade.FAITHFUL) -> int:
        """A whole request; returns how many tokens were reused."""
        sequence = self.open(prompt, salt, floor)
        reused = sequence.reused
        try:
            self.engine.prefill(sequence, prompt[:-1])
            self.keep(sequence, salt)
            for token in [*prompt[-1:], *answer][: len(answer)]:
                self.engine.step(sequence, [token])
            if answer:
                self.keep(sequence, salt)
        finally:
            sequence.close()
        return reused

    def settled(self) -> None:
        """Everything that was being moved is, and nothing is held but what was fetched ahead."""
        assert self.cold.flush(60)
        self.manager.check_integrity()
        assert len(self.manager.transfers) == len(self.cold.ahead)


def draw(rng: random.Random, count: int) -> Tokens:
    """Random tokens."""
    return tuple(rng.randrange(20) for _ in range(count))
