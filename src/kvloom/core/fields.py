"""Names of the columns of the core's arrays: one row of an array is one record.

Index spaces, used everywhere in the core:

* ``g``  KV cache group, in the order of ``ModelSpec.groups``.
* ``p``  page of the arena (one page belongs to one group at a time).
* ``s``  global slot = ``SLOT_BASE`` of its group + slot local to the group.  Columns and block tables hold local slots.
* ``n``  node of the prefix index: the root of a namespace, one segment, or one checkpoint.
* ``c``  column of a node: ``COL_BASE`` of the group + block of the group within the segment (snapshots: one column).
* ``q``  row of a running sequence.

Links are -1 for none.
"""

from __future__ import annotations

from kvloom.kinds import MatchRule

RULE_PREFIX = int(MatchRule.PREFIX)
RULE_WINDOW = int(MatchRule.RUN)
RULE_SNAPSHOT = int(MatchRule.POINT)

# group: int32 [G, 32].  The first eight are ``kvloom.kinds.RuleRow``.
(
    RULE,
    RATIO,  # tokens per entry
    BLOCK_TOKENS,  # 0 = snapshot
    WINDOW,
    CHUNKED,  # 1 for chunked local attention
    UNLESS_MULTIPLE,  # snapshots needed only off multiples of this; 0 = everywhere
    FIRST_NEEDED,
    INTERVAL,  # snapshots of segment ends are kept at multiples of this
    SLOT_BASE,
    COL_BASE,
    COLUMNS,  # columns of the group in a node
    SLOTS_PER_PAGE,
    PAGE_BASE,  # page of local slot 0
    PART_HEAD,  # first page with a free slot
    STEAL_HEAD,  # pages that can be emptied at once, in the order in which they became so
    STEAL_TAIL,
    AUX_HEAD,  # list SURPLUS of evictable windows or snapshots of segments, least recently released first
    AUX_TAIL,
    USED,  # slots not free
    RATIO_SHIFT,  # base-2 logarithms of RATIO and BLOCK_TOKENS, -1 when they are no powers of two
    BLOCK_SHIFT,
    PAGE_SHIFT,  # the same of SLOTS_PER_PAGE
    PAGES,  # pages that belong to the group
    NEED,  # scratch: slots that an operation is about to take
    HELD,  # scratch: used slots that cannot be evicted, now or after others
    BUSY,  # scratch: pages with such a slot
    PINNED,  # slots with a holder
    LEASED,  # blocks of the index that rows hold through their deepest nodes, each as often as it is held
    KEPT_HEAD,  # list KEPT
    KEPT_TAIL,
    REST_HEAD,  # list REST
    REST_TAIL,
) = range(32)

# Lists of auxiliary objects: what ``worth`` says of a slot.  Only ``cost`` has more than the first.
SURPLUS = 0  # serves no boundary that is kept
KEPT = 1  # serves the end of a request, or a fork
REST = 2  # serves a rest, and stays as long as its path
OF_LEAF = 3  # what a leaf needs becomes KEPT, whatever it was

# page: int32 [P, 8]
(
    PAGE_GROUP,  # -1 = free
    PAGE_USED,
    PAGE_PINNED,  # used slots that cannot be evicted on their own right now
    PAGE_PREV,  # list of the pages of a group with free slots
    PAGE_NEXT,
    STEAL_PREV,
    STEAL_NEXT,
    PAGE_HELD,  # scratch: used slots that cannot be evicted, now or after others
) = range(8)

# slot: int32 [S, 7]; its generation, which grows at every allocation and every free, is in ``generation``
(
    STATE,  # ObjectState
    GRADE,  # Grade
    PINS,  # private holders: rows of sequences and transfers.  A lease on a prefix holds its deepest node instead
    OWNER,  # node whose column names this slot, -1 = private
    OWNER_COL,
    PREV,  # auxiliary LRU list
    NEXT,  # auxiliary LRU list, or the list of slots given up while in use
) = range(7)

# trunk: int32 [N, 4], what a match reads of every node on its way
(
    PARENT,  # -1 for a root or an unused node
    FIRST_CHILD,  # the others are found through the hash table
    NTOKENS,  # the segment length, fewer for a checkpoint, 0 = root, -1 = unused
    SPINE,  # worst grade of its prefix-group objects, -1 when one is missing
) = range(4)

# node: int32 [N, 12]
(
    ROOT,  # the namespace this node belongs to
    DEPTH,  # segments from the root to the end of this node (checkpoint: of its parent)
    RESIDENT,  # columns that name a slot
    ANCHORS,  # live children and checkpoints, sequences that end here, transfers; 0 = a leaf that may be evicted
    FIRST_CHECKPOINT,
    SIBLING_PREV,
    SIBLING_NEXT,
    GHOST_PREV,  # list of nodes without objects and anchors, in the order they lost them; -2 = not in it
    GHOST_NEXT,
    HEAP_AT,  # place in its queue of evictable leaves, -1 = in none
    KEY,  # hash of the tokens
    USES,  # requests that went through here, as far as known: see ``kvloom.core.heat``
) = range(12)

# heat: int32 [N, 8]; plain LRU does not use it
(
    TICK,  # OPENS at the last use that is known
    FOLDED,  # uses that the parent knows of
    IS_END,  # 1 when the latest request through here ended here
    QUEUE,  # queue of leaves, while in one
    YOUNG_AT,  # place in the second heap of that queue
    TRIAL,  # class of the open trial, -1 = none
    PRIORITY,  # the highest of the requests that used it
    SPENT,  # uses that do not count any more (S3-FIFO); leaves that are checkpoints within reach below (``cost``)
) = range(8)

# policy: int64 [96]
(
    RULES,  # kvloom.core.policies.Order
    KEY_ADDRESS,  # of the compiled key function
    OPENS,  # requests opened
    RING_SHIFT,  # open trials: log2 of the requests per slot of the ring
    RING_BASE,  # and the number of its first slot
    RUN_SQUARES,  # sums over requests of their sampled nodes, squared, and of their sampled nodes
    RUN_TOTAL,
) = range(7)
QUEUE_SIZE = 8  # leaves in each queue
END_NODE, END_TICK, END_INDEX = 24, 40, 56  # both ends of every class when last looked at, and their index
SCORED_AT = 72  # OPENS then
POLICY_NUMBERS = 96

# scalars: int64 [27]
(
    CLOCK,
    FREE_PAGES,
    FREE_NODES,
    NODES_USED,
    GHOST_HEAD,
    GHOST_TAIL,
    HEAP_SIZE,  # leaves in all queues
    GRAVE_HEAD,
    GRAVE_TAIL,
    EMPTIABLE,  # pages in the steal lists
    PASSES,  # times that what can be evicted was counted
    FRUGAL,  # 1 while pages are so scarce that slots come from pages that their group keeps anyway
    CARRIED,  # nodes that transfers hold
    RECYCLED,  # ghosts that are freed at once
    STATIC,  # 1 when every group has a fixed share of the arena, as one page
    BIT_LEVELS,  # levels of the bitmap of free slots
    REST_INTERVAL,  # see ``kvloom.core.rules.next_rest``; 0 = there are no rests
    BROKEN,  # 1 once a prefix block was forgotten without what is below it
    BIT_BASE,  # first word of level 0; the next six are those of the levels above
) = range(19)
SCALARS = 27

# counters: int64 [G, 6], objects
ALLOCS, EVICTIONS, HITS, MISSES, COMMITS, UNKEPT = range(6)
