"""What every room of a manager works on: the core's arrays, who runs, what is in flight, and the door to all of it.

Rooms take ``Books`` and never the ``Manager``, which extends it: so calls go down from the manager through its rooms
and end here, and a room can be read without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from kvloom.core.allocation import allocate
from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import release
from kvloom.core.fields import CLOCK, RULE, RULE_SNAPSHOT
from kvloom.core.geometry import plan_geometry
from kvloom.core.handle import both_addresses
from kvloom.core.page_table import Rows, allocate_rows
from kvloom.errors import WrongThreadError
from kvloom.eviction import EvictionPolicy
from kvloom.manager.buffers import TokenBuffers
from kvloom.manager.capacity import Capacity
from kvloom.manager.inputs import TokenRules
from kvloom.manager.namespaces import Namespace, Namespaces
from kvloom.manager.roster import Roster, Runs
from kvloom.manager.single import Single
from kvloom.manager.tickets import Tickets
from kvloom.manager.transfers import Transfers
from kvloom.plan import ArenaGeometry
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import Int32Array
from kvloom.verify.abi import layout_identity

S = TypeVar("S", bound=Runs)


class Books(Single):
    """The state of one manager, and what all its rooms do with it.

    Attributes:
        spec, cap, geometry, layout: the model, the bytes of the tier, how they are cut, and the layout identity.
        policy: how it evicts.
        arrays, rows, handle: the core, and both as compiled code is entered with them.
        ids: what token ids may be.
        namespaces, roster, tickets, transfers: the trees; who runs; copy plans and transfers in flight.
        capacity: what fits.
        buffers: for the ids of appends that are not committed yet.
        path: scratch of a match: int32, the nodes of the segments found.
        snapshot_groups: indices of the groups that are kept as snapshots.
    """

    def __init__(
        self,
        spec: ModelSpec,
        cap: int,
        policy: EvictionPolicy,
        *,
        max_sequences: int,
        max_nodes: int | None,
        thread_id: Callable[[], int] | None,
    ) -> None:
        self.policy = policy
        self._key = policy.compiled()  # compiled code knows it by its address
        self.spec = spec
        self.cap = cap
        self.geometry: ArenaGeometry = plan_geometry(spec, cap)
        self.layout = layout_identity(spec)
        nodes = max_nodes if max_nodes is not None else _default_nodes(spec, self.geometry)
        address = 0 if self._key is None else self._key.address
        self.arrays: Arrays = allocate(spec, self.geometry, nodes, policy.order, address)
        self.rows: Rows = allocate_rows(spec, self.geometry, max_sequences)
        self.handle = both_addresses(self.arrays, self.rows)
        self.ids = TokenRules(spec.vocab_size or 2**31, spec.max_positions or 0, spec.name)
        self.namespaces = Namespaces(self.arrays, self.layout)
        self.roster = Roster(self.arrays, self.rows)
        self.tickets = Tickets(self.arrays)
        self.transfers = Transfers(self.arrays)
        holders = (self.roster, self.tickets, self.transfers)
        self.capacity = Capacity(spec, self.geometry, cap, self.arrays, holders)
        self.buffers = TokenBuffers()
        self.path: Int32Array = np.zeros(nodes + 1, dtype=np.int32)
        self.snapshot_groups: list[int] = np.flatnonzero(self.arrays.group[:, RULE] == RULE_SNAPSHOT).tolist()
        self._thread_id = thread_id
        self._owner = thread_id() if thread_id else 0

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

    def namespace(self, name: bytes, salt: bytes) -> Namespace:
        """The namespace ``name``, made when the index does not have it; CapacityError when the index is full."""
        namespace = self.namespaces.by_name.get(name) or self.namespaces.make(name, salt)
        if namespace is None:
            raise self.capacity.no_node()
        return namespace

    def start(self, make: Callable[[int], S]) -> S:
        """Note the sequence that ``make`` makes of a free row of the block tables; CapacityError when all are taken."""
        sequence = self.roster.start(make)
        if sequence is None:
            raise self.capacity.no_row()
        return sequence

    def release_slots(self, held: Sequence[tuple[int, int]]) -> None:
        """Release (group, global slot) pairs."""
        for group, slot in held:
            release(self.arrays, group, slot)


def _default_nodes(spec: ModelSpec, geometry: ArenaGeometry) -> int:
    """Twice the segments and checkpoints that the arena can hold, with a floor for tiny arenas.

    Segments count without windows: those of most boundaries go long before the segment does.
    """
    blocks = [g for g in spec.groups if not g.is_snapshot]
    path = [g for g in blocks if not g.window] or blocks
    segment = sum(g.slot_bytes * (spec.segment_tokens // g.block_tokens) for g in path)
    smallest = segment or min(g.slot_bytes for g in spec.groups)
    return min(1 << 24, 2 * (geometry.arena_bytes // smallest) + 1024)
