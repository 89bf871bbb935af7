"""Plans in flight, as plain records."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.core.reference.arena import Slot
from tests.core.reference.index import Node, Place

NO_PLAN = 0


@dataclass
class Copy:
    """One copy of a plan: ``src`` None fills with zeros; ``entries`` None keeps every row."""

    group: int
    src: Slot | None
    dst: Slot
    entries: int | None = None


@dataclass
class Ticket:
    """A plan in flight.  It holds both ends of its copies, what it will publish, and the node it publishes at."""

    number: int
    copies: list[Copy]
    ready: list[Slot] = field(default_factory=list)
    publish: list[tuple[Node, Place, Slot]] = field(default_factory=list)
    node: Node | None = None


def number(ticket: Ticket | None) -> int:
    """The number of a plan; 0 for an empty one."""
    return NO_PLAN if ticket is None else ticket.number
