"""Eviction policies: which cached prefix goes when room is needed.  One policy per file; see ``docs/policies.md``."""

from kvloom.eviction.policy import EvictionPolicy
from kvloom.eviction.registry import POLICIES, find_policy

__all__ = ["POLICIES", "EvictionPolicy", "find_policy"]
