"""The default: what is least likely to be used soon goes first, as learned from the requests so far.

Leaves are in eight classes: used once, twice, three or four times, more; and whether the latest request ended there.
For every class the core learns how reuse depends on age (``kvloom.core.reuse``), and takes the oldest or the youngest
leaf of the class with the lowest rate of reuse, or simply the oldest leaf when that is nearly as good.  So it is LRU
where LRU is right, lets go of what is used once, and keeps some of many sessions in turn where LRU would lose all.
"""

from kvloom.core.policies import Order
from kvloom.eviction.policy import EvictionPolicy

COST = EvictionPolicy("cost", order=Order.CLASSES)
