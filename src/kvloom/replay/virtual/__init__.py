"""Colder tiers on paper: real books and real rules, no payloads, and a clock that says what they would have taken."""

from kvloom.replay.virtual.clock import VirtualClock
from kvloom.replay.virtual.medium import DISK, HOST, Medium
from kvloom.replay.virtual.tier import VirtualTier

__all__ = ["DISK", "HOST", "Medium", "VirtualClock", "VirtualTier"]
