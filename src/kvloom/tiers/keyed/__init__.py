"""A whole tier over anything that keeps bytes under keys: write ``put``, ``get`` and ``delete``, and get the rest.

``docs/tiers.md`` has an example and says what is promised.
"""

from kvloom.tiers.keyed.stores import ByteStore, Closes, Lists
from kvloom.tiers.keyed.tier import KeyedTier

__all__ = ["ByteStore", "Closes", "KeyedTier", "Lists"]
