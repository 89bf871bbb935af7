"""The life cycle of a copy: one transition table, as data, checked on every change.

FREE -> ALLOCATED -> READY -> COMMITTED -> COLD is the spine; a transfer holds a copy in STORING or
LOADING; EVICTED is passed through on the way back to FREE; QUARANTINED is never readable again and
only leads to FREE once nobody holds the slot.
"""

from __future__ import annotations

import numpy as np

from kvloom.core._jit import inlined
from kvloom.core.fields import STATE
from kvloom.errors import LifecycleError
from kvloom.types import AnyArray, ObjectState

FREE = int(ObjectState.FREE)
ALLOCATED = int(ObjectState.ALLOCATED)
READY = int(ObjectState.READY)
COMMITTED = int(ObjectState.COMMITTED)
COLD = int(ObjectState.COLD)
STORING = int(ObjectState.STORING)
LOADING = int(ObjectState.LOADING)
EVICTED = int(ObjectState.EVICTED)
QUARANTINED = int(ObjectState.QUARANTINED)

TRANSITIONS: dict[ObjectState, tuple[ObjectState, ...]] = {
    ObjectState.FREE: (ObjectState.ALLOCATED,),
    ObjectState.ALLOCATED: (ObjectState.READY, ObjectState.FREE, ObjectState.LOADING),
    ObjectState.READY: (ObjectState.COMMITTED, ObjectState.FREE),
    ObjectState.COMMITTED: (ObjectState.COLD, ObjectState.STORING, ObjectState.EVICTED, ObjectState.READY),
    ObjectState.COLD: (ObjectState.COMMITTED, ObjectState.STORING, ObjectState.EVICTED),
    ObjectState.STORING: (ObjectState.COMMITTED, ObjectState.COLD, ObjectState.EVICTED),
    ObjectState.LOADING: (ObjectState.READY, ObjectState.FREE),
    ObjectState.EVICTED: (ObjectState.FREE,),
    ObjectState.QUARANTINED: (ObjectState.FREE,),
}
"""Legal next states.  Besides these, every state but FREE may go to QUARANTINED.

COMMITTED -> READY is a block that the index gives up for a better grade while a sequence still reads it.
"""


def _table() -> AnyArray:
    table = np.zeros((len(ObjectState), len(ObjectState)), dtype=np.bool_)
    for state, following in TRANSITIONS.items():
        for target in following:
            table[state, target] = True
        if state is not ObjectState.FREE:
            table[state, ObjectState.QUARANTINED] = True
    return table


ALLOWED = _table()


@inlined
def move(slots: AnyArray, slot: int, target: int) -> None:
    """Move one copy to ``target`` (the core's slot array); LifecycleError when illegal, nothing changed."""
    if not ALLOWED[slots[slot, STATE], target]:
        raise LifecycleError("illegal life-cycle transition")
    slots[slot, STATE] = target
