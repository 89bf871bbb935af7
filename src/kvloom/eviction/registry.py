"""Policies by name: the built-in ones, and those that installed packages offer."""

from __future__ import annotations

from importlib.metadata import entry_points

from kvloom.errors import ConfigError
from kvloom.eviction.cost import COST
from kvloom.eviction.lfu import LFU
from kvloom.eviction.lru import LRU
from kvloom.eviction.policy import EvictionPolicy
from kvloom.eviction.priority import PRIORITY
from kvloom.eviction.s3_fifo import S3_FIFO

ENTRY_POINTS = "kvloom.eviction_policies"
BUILT_IN = {policy.name: policy for policy in (COST, LRU, LFU, PRIORITY, S3_FIFO)}
POLICIES = tuple(BUILT_IN)
"""Names of the built-in policies."""


def find_policy(policy: EvictionPolicy | str) -> EvictionPolicy:
    """A policy by name; a policy is returned as it is.

    Other packages offer theirs through the entry point group ``kvloom.eviction_policies``; built-in names come first.
    Raises ConfigError for an unknown name, and for an entry point that is no policy.
    """
    if isinstance(policy, EvictionPolicy):
        return policy
    if policy in BUILT_IN:
        return BUILT_IN[policy]
    offered = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if policy not in offered:
        raise ConfigError(f"policy {policy!r} is unknown; use one of: {', '.join((*POLICIES, *sorted(offered)))}")
    try:
        found = offered[policy].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"policy {policy!r} of {offered[policy].value} cannot be loaded: {error}") from error
    if not isinstance(found, EvictionPolicy):
        raise ConfigError(f"policy {policy!r} of {offered[policy].value} is no kvloom.EvictionPolicy but {found!r}")
    return found
