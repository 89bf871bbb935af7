"""Least often used first, of these the least recently used.

For prompts that are popular for good.  Not for conversations: what was popular once stays, and what is new goes.
"""

from kvloom.core.policies import Order
from kvloom.eviction.policy import EvictionPolicy

LFU = EvictionPolicy("lfu", order=Order.USES)
