"""Lowest priority first, of these the least recently used.

A request says its priority when it is opened (``Manager.open(..., priority=5)``); a prefix has the highest of those
that used it, for as long as the index knows it.  Not for requests that all claim to be important.
"""

from kvloom.core.policies import Order
from kvloom.eviction.policy import EvictionPolicy

PRIORITY = EvictionPolicy("priority", order=Order.PRIORITY)
