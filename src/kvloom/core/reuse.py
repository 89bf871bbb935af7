"""What ``cost`` learns: how long it takes until a node is used again, by class.

A class is a bucket of uses (1, 2, 3 or 4, 5 and more) and whether the node was the end of its latest request.  A
*trial* begins when a node is used and ends when it is used again or forgotten; ages count opened requests.  From the
ages at which trials ended, and of those still open, ``plan`` computes for every class and age the largest rate of
reuses per request that keeping the node for some time has (the Gittins index).  What has the lowest goes.

Statistics are kept for sampled nodes: all to depth 256, one in 32 below.  Everything is integers, but for the plan,
which has a fixed order of operations.
"""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.fields import (
    DEPTH,
    IS_END,
    NTOKENS,
    OPENS,
    RING_BASE,
    RING_SHIFT,
    RULES,
    RUN_SQUARES,
    RUN_TOTAL,
    TICK,
    TRIAL,
    USES,
)
from kvloom.core.policies import BY_CLASSES, CLASSES, use_class

AGES = 72
"""Bins of ages, four per octave: up to 2**18 requests; longer ones fall into the last."""
RING = 256
"""Slots of open trials by when they began."""
REUSED, EXPIRED, OPEN, INDEX = 0, AGES, 2 * AGES, 2 * AGES + RING
"""Columns of ``trials``: ended by reuse and by being forgotten, by age; open by start; the index at the bin edges."""
TRIAL_COLUMNS = INDEX + AGES + 1
ONE = 1 << 40
"""An index of one reuse per request."""
PLAN_EVERY = 16
FORGET_EVERY = 8192
SAMPLED_ALL, SAMPLED_STEP = 256, 32
PRIOR = 10.0
"""Weight of what is known of all classes against what is known of one, and of the first guess, in requests."""
GUESS = 0.3
"""The first guess: the reuse rate is this divided by the age."""
AT, HAZARD, OPENED = 0, CLASSES, 2 * CLASSES
WEIGHT, AT_ALL, REUSED_ALL, PRIOR_RATE, FOUND, TIME, HULL = range(3 * CLASSES, 3 * CLASSES + 7)
"""Rows of ``scratch``."""
SCRATCH_ROWS, SCRATCH_COLUMNS = 3 * CLASSES + 7, AGES + 8


@inlined
def age_bin(age: int) -> int:
    """Bin of an age."""
    if age < 4:
        return age
    octave = 0
    while age >= 8:
        age >>= 1
        octave += 1
    return min(4 * octave + age, AGES - 1)


@inlined
def bin_edge(b: int) -> int:
    """The first age of bin ``b``."""
    return b if b < 4 else (4 + (b & 3)) << ((b >> 2) - 1)


@inlined
def sampled(a: Arrays, n: int) -> bool:
    """Whether statistics are kept of node ``n``."""
    if a.policy[RULES] != BY_CLASSES or a.trunk[n, NTOKENS] != a.tokens.shape[1]:
        return False
    depth = a.node[n, DEPTH]
    return depth <= SAMPLED_ALL or depth % SAMPLED_STEP == 0


@inlined
def _ring_slot(a: Arrays, tick: int) -> int:
    """Column of the open trials that began at ``tick``; those older than the ring share the first."""
    return OPEN + max(0, (tick >> a.policy[RING_SHIFT]) - a.policy[RING_BASE])


@inlined
def begin_trial(a: Arrays, n: int, c: int, tick: int) -> None:
    """A trial of class ``c`` begins for node ``n``, which has none."""
    a.heat[n, TRIAL] = c
    a.heat[n, TICK] = tick
    a.trials[c, _ring_slot(a, tick)] += 1


@inlined
def take_back_trial(a: Arrays, n: int) -> None:
    """The trial of ``n``, if it has one, did not take place."""
    c = a.heat[n, TRIAL]
    if c >= 0:
        a.trials[c, _ring_slot(a, a.heat[n, TICK])] -= 1
        a.heat[n, TRIAL] = -1


@jit
def use_again(a: Arrays, n: int) -> None:
    """A request passes through the sampled node ``n``: its trial ends, the next begins."""
    now, c = a.policy[OPENS], a.heat[n, TRIAL]
    if c >= 0:
        a.trials[c, REUSED + age_bin(now - a.heat[n, TICK])] += 1
        take_back_trial(a, n)
    a.node[n, USES] += 1
    a.heat[n, IS_END] = 0
    begin_trial(a, n, 2 * use_class(a.node[n, USES]), now)


@jit
def expire(a: Arrays, n: int) -> None:
    """The index forgets ``n``."""
    c = a.heat[n, TRIAL]
    if c < 0:
        return
    age = a.policy[OPENS] - a.heat[n, TICK]
    a.trials[c, EXPIRED + age_bin(age)] += 1
    take_back_trial(a, n)
    if age >> a.policy[RING_SHIFT] >= RING // 4:
        _coarsen(a)


@jit
def _coarsen(a: Arrays) -> None:
    """Slots of the ring twice as long: pairs merge."""
    base = a.policy[RING_BASE]
    half = base >> 1
    for c in range(CLASSES):
        for e in range(RING):  # slot e goes to one at or before it, which was read already
            count = a.trials[c, OPEN + e]
            a.trials[c, OPEN + e] = 0
            a.trials[c, OPEN + ((base + e) >> 1) - half] += count
    a.policy[RING_BASE] = half
    a.policy[RING_SHIFT] += 1


@jit
def _advance(a: Arrays) -> None:
    """The ring follows the clock: when it is full, its older half becomes its first slot."""
    if (a.policy[OPENS] >> a.policy[RING_SHIFT]) - a.policy[RING_BASE] < RING:
        return
    half = RING // 2
    for c in range(CLASSES):
        total = 0
        for e in range(half + 1):
            total += a.trials[c, OPEN + e]
        a.trials[c, OPEN] = total
        for e in range(1, RING):
            a.trials[c, OPEN + e] = a.trials[c, OPEN + e + half] if e + half < RING else 0
    a.policy[RING_BASE] += half


@jit
def count_request(a: Arrays) -> None:
    """A request is opened: the clock of ages ticks; now and then the plan is made anew, and half is forgotten."""
    if a.policy[RULES] != BY_CLASSES:
        return
    a.policy[OPENS] += 1
    _advance(a)
    if a.policy[OPENS] % FORGET_EVERY == 0:
        a.policy[RUN_SQUARES] >>= 1
        a.policy[RUN_TOTAL] >>= 1
        for c in range(CLASSES):
            for b in range(2 * AGES):
                a.trials[c, b] >>= 1
    if a.policy[OPENS] % PLAN_EVERY == 0:
        plan(a)


@jit
def count_run(a: Arrays, depth: int) -> None:
    """A request ended at ``depth``; its sampled nodes are one event, not many, and that is what these sums tell."""
    count = min(depth, SAMPLED_ALL) + max(0, depth // SAMPLED_STEP - SAMPLED_ALL // SAMPLED_STEP)
    a.policy[RUN_SQUARES] += count * count
    a.policy[RUN_TOTAL] += count


@jit
def _at_risk(a: Arrays) -> None:
    """For every class and bin, how many trials came to that age: ``scratch[AT + c]``; with their sums."""
    x = a.scratch
    now, shift = a.policy[OPENS], a.policy[RING_SHIFT]
    for b in range(AGES):
        x[WEIGHT, b] = 2.0 * (bin_edge(b + 1) - bin_edge(b)) / (bin_edge(b + 1) + bin_edge(b) + 2)
        x[AT_ALL, b] = 0.0
        x[REUSED_ALL, b] = 0.0
    for c in range(CLASSES):
        risk = 0.0
        for b in range(AGES):
            x[OPENED + c, b] = a.trials[c, EXPIRED + b]
        for e in range(RING):
            if a.trials[c, OPEN + e] > 0:
                age = now - ((a.policy[RING_BASE] + e) << shift) - ((1 << shift) >> 1)
                x[OPENED + c, age_bin(max(0, age))] += a.trials[c, OPEN + e]
        for b in range(AGES):
            risk += a.trials[c, REUSED + b] + x[OPENED + c, b]
        for b in range(AGES):
            x[AT + c, b] = risk - 0.5 * x[OPENED + c, b]
            risk -= a.trials[c, REUSED + b] + x[OPENED + c, b]
            x[AT_ALL, b] += x[AT + c, b]
            x[REUSED_ALL, b] += a.trials[c, REUSED + b]


@jit
def plan(a: Arrays) -> None:
    """Compute the index of every class at every bin edge from the trials: ``trials[c, INDEX:]``."""
    x = a.scratch
    run = a.policy[RUN_SQUARES] / a.policy[RUN_TOTAL] if a.policy[RUN_TOTAL] > 0 else 1.0
    weight = PRIOR * run
    _at_risk(a)
    reused, expected = 0.0, 0.0
    for b in range(AGES):
        reused += x[REUSED_ALL, b]
        expected += x[AT_ALL, b] * x[WEIGHT, b]
    rate = (reused + weight * GUESS) / (expected + weight)
    for b in range(AGES):
        x[PRIOR_RATE, b] = min(1.0, (x[REUSED_ALL, b] + weight * rate * x[WEIGHT, b]) / (x[AT_ALL, b] + weight))
    for c in range(CLASSES):
        left = 1.0
        x[FOUND, 0] = 0.0
        x[TIME, 0] = 0.0
        for b in range(AGES):
            hazard = min(1.0, (a.trials[c, REUSED + b] + weight * x[PRIOR_RATE, b]) / (x[AT + c, b] + weight))
            after = left * (1.0 - hazard)
            x[FOUND, b + 1] = 1.0 - after
            x[TIME, b + 1] = x[TIME, b] + 0.5 * (left + after) * (bin_edge(b + 1) - bin_edge(b))
            left = after
        _steepest(a, c)


@jit
def _steepest(a: Arrays, c: int) -> None:
    """From every edge the steepest way up the curve of reuses found over time spent: its upper hull, from the right."""
    x = a.scratch
    count = 0
    for b in range(AGES, -1, -1):
        found, time = x[FOUND, b], x[TIME, b]
        while count >= 2:
            i, j = int(x[HULL, count - 1]), int(x[HULL, count - 2])
            if (x[FOUND, j] - found) * (x[TIME, i] - time) < (x[FOUND, i] - found) * (x[TIME, j] - time):
                break
            count -= 1
        a.trials[c, INDEX + b] = 0
        if count > 0:
            i = int(x[HULL, count - 1])
            if x[TIME, i] > time:
                a.trials[c, INDEX + b] = int((x[FOUND, i] - found) / (x[TIME, i] - time) * ONE)
        x[HULL, count] = b
        count += 1


@inlined
def index_of(a: Arrays, c: int, age: int) -> int:
    """The index of class ``c`` at an age, linear between the edges."""
    b = age_bin(age)
    low = bin_edge(b)
    width = bin_edge(b + 1) - low
    g = a.trials[c, INDEX + b]
    if width > 1 and age < low + width:
        g += (a.trials[c, INDEX + b + 1] - g) * (age - low) // width
    return g
