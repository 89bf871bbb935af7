"""What is known of the use of a node: how often, how lately, how important, and whether a request ended there.

An open may not touch every node of its path, so uses are counted where requests end, and what is new of them moves
to the parent when a leaf dies: the uses of a leaf are all requests that went through it.  Nodes that ``cost`` samples
are counted as requests pass, for the same number.  Plain LRU needs none of this and skips it.
"""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.fields import (
    CLOCK,
    DEPTH,
    FOLDED,
    IS_END,
    NTOKENS,
    OPENS,
    PRIORITY,
    QUEUE,
    RULES,
    SPENT,
    TICK,
    TRIAL,
    USES,
)
from kvloom.core.policies import BY_CLASSES, BY_FIFO, BY_STAMP, use_class
from kvloom.core.reuse import (
    SAMPLED_ALL,
    SAMPLED_STEP,
    begin_trial,
    count_run,
    sampled,
    take_back_trial,
    use_again,
)
from kvloom.types import AnyArray


@inlined
def clean_heat(a: Arrays, n: int) -> None:
    """The record of a new node."""
    a.node[n, USES] = 0
    if a.policy[RULES] == BY_STAMP:
        return
    a.heat[n, TICK] = a.policy[OPENS]
    a.heat[n, FOLDED] = 0
    a.heat[n, IS_END] = 0
    a.heat[n, QUEUE] = 0
    a.heat[n, TRIAL] = -1
    a.heat[n, PRIORITY] = 0
    a.heat[n, SPENT] = 0 if a.policy[RULES] == BY_CLASSES else 1  # the request that makes it
    if a.policy[RULES] == BY_FIFO:
        a.order[n] = a.scalars[CLOCK]


@inlined
def pass_node(a: Arrays, n: int) -> None:
    """A request passes through segment ``n``, or makes it."""
    if sampled(a, n):
        use_again(a, n)
    elif a.policy[RULES] != BY_STAMP:
        a.heat[n, TICK] = a.policy[OPENS]


@jit
def pass_path(a: Arrays, path: AnyArray, depth: int) -> None:
    """A request goes on from ``path[depth]``."""
    if a.policy[RULES] == BY_STAMP:
        return
    if a.policy[RULES] == BY_CLASSES:
        for k in range(1, min(depth, SAMPLED_ALL + 1)):
            use_again(a, path[k])
        for k in range(SAMPLED_ALL + SAMPLED_STEP, depth, SAMPLED_STEP):
            use_again(a, path[k])
    if depth > 0:
        pass_node(a, path[depth])


@jit
def use_checkpoint(a: Arrays, n: int) -> None:
    """Checkpoint ``n`` was made, or a request resumes there."""
    if a.policy[RULES] != BY_STAMP and 0 < a.trunk[n, NTOKENS] < a.tokens.shape[1]:
        a.heat[n, TICK] = a.policy[OPENS]
        a.heat[n, IS_END] = 1
        a.node[n, USES] += 1


@jit
def note_priority(a: Arrays, n: int, priority: int) -> None:
    """A request of this priority uses ``n``."""
    if a.policy[RULES] != BY_STAMP:
        a.heat[n, PRIORITY] = max(a.heat[n, PRIORITY], priority)


@inlined
def _renew(a: Arrays, n: int, tick: int) -> None:
    """``n`` was used at ``tick`` for the last time: its trial began then."""
    c = a.heat[n, TRIAL]
    if c >= 0:
        take_back_trial(a, n)
        begin_trial(a, n, c, tick)
    a.heat[n, TICK] = tick


@jit
def end_at(a: Arrays, n: int, priority: int) -> None:
    """A request ends at segment or root ``n``."""
    if a.policy[RULES] == BY_STAMP:
        return
    note_priority(a, n, priority)
    if a.trunk[n, NTOKENS] == 0:
        return
    a.heat[n, IS_END] = 1
    if not sampled(a, n):
        a.node[n, USES] += 1
    elif a.heat[n, TRIAL] >= 0:
        take_back_trial(a, n)
        begin_trial(a, n, 2 * use_class(a.node[n, USES]) + 1, a.policy[OPENS])
    a.heat[n, TICK] = a.policy[OPENS]
    if a.policy[RULES] == BY_CLASSES:
        count_run(a, a.node[n, DEPTH])


@inlined
def fold(a: Arrays, n: int, parent: int) -> None:
    """Leaf ``n`` died: what its parent does not know yet of its uses."""
    if a.policy[RULES] != BY_STAMP:
        _fold(a, n, parent)


@jit
def _fold(a: Arrays, n: int, parent: int) -> None:
    note_priority(a, parent, a.heat[n, PRIORITY])
    if a.heat[n, TICK] > a.heat[parent, TICK]:
        _renew(a, parent, a.heat[n, TICK])
    if a.trunk[n, NTOKENS] < a.tokens.shape[1]:
        return
    if not sampled(a, parent):
        a.node[parent, USES] += a.node[n, USES] - a.heat[n, FOLDED]
    a.heat[n, FOLDED] = a.node[n, USES]
    if a.node_stamp[n] > a.node_stamp[parent]:
        a.heat[parent, IS_END] = 0


@inlined
def revive(a: Arrays, n: int) -> None:
    """A request found ghost ``n``; S3-FIFO takes it into the main queue."""
    if a.policy[RULES] == BY_FIFO:
        a.heat[n, QUEUE] = 1
        a.heat[n, SPENT] = a.node[n, USES] + 1
        a.order[n] = a.scalars[CLOCK]
