"""Least recently used first.

Simple, and the fastest.  Not for more sessions in turn than fit: it drops each one just before it comes again.
"""

from kvloom.core.policies import Order
from kvloom.eviction.policy import EvictionPolicy

LRU = EvictionPolicy("lru", order=Order.STAMP)
