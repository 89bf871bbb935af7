"""Joins what the manager decides with the bytes of arenas and cold tiers: loads, stores, prefetch, demotion."""
