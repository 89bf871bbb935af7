"""What loads, stores and what moves on have in common: one manager, its device memory, and the tiers behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvloom.core.namespace import ExtraKey
from kvloom.manager import Manager
from kvloom.plan import Chain
from kvloom.transfer.link import Link
from kvloom.transfer.memory import SlotMemory
from kvloom.transfer.options import TransferOptions
from kvloom.transfer.parts import Parts
from kvloom.transfer.stats import TransferStats
from kvloom.types import Int32Array

Names = tuple[bytes, Sequence[ExtraKey]]
"""Salt and extra keys of a namespace."""


@dataclass(slots=True)
class Ground:
    """Attributes:
    manager: decides.
    memory: of the device.
    links: the tiers, nearest first.
    options: how bytes are to move.
    stats: what did.
    clock: monotonic seconds.
    hurried: asked while a request waits for a tier: once it says so nobody waits any longer.
    """

    manager: Manager
    memory: SlotMemory
    links: list[Link]
    options: TransferOptions
    stats: TransferStats
    clock: Callable[[], float]
    hurried: Callable[[], bool]

    @property
    def parts(self) -> Parts:
        """How slots are cut into records."""
        return self.links[0].parts

    def chain(self, tokens: Int32Array, names: Names) -> Chain:
        """The names of tokens."""
        salt, extra_keys = names
        return self.manager.colder.chain(tokens, salt=salt, extra_keys=extra_keys)


def name_of(chain: Chain) -> bytes:
    """The name of its end."""
    name: bytes = chain.digests[-1].tobytes()
    return name
