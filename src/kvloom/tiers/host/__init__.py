"""The host tier: prefix units in (pinned) host memory, verified on every read, under a hard cap."""

from kvloom.tiers.host.store import Counts, HostStore, Verify

__all__ = ["Counts", "HostStore", "Verify"]
