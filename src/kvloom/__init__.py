"""kvloom: a KV-cache manager for hybrid-attention LLMs.

Importing this package is cheap: names load on first use, and nothing here imports torch,
transformers or a server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvloom.config import CacheConfig, Device, parse_size
    from kvloom.errors import (
        CapacityError,
        ConfigError,
        InputError,
        IntegrityError,
        KVLoomError,
        LifecycleError,
        MissingExtraError,
        SequenceError,
        SpecError,
        StaleLeaseError,
        TableFullError,
        UnsupportedError,
        WrongThreadError,
    )
    from kvloom.eviction import EvictionPolicy
    from kvloom.manager import CachedSequence, KindStats, Manager, Stats
    from kvloom.manager.decoding import Batch
    from kvloom.manager.ranges import TokenRange
    from kvloom.plan import ArenaGeometry, CopyPlan, Explanation, Limit
    from kvloom.spec.from_config import spec_from_config
    from kvloom.spec.model_spec import GroupSpec, ModelSpec, TensorSpec
    from kvloom.spec.presets import load_preset
    from kvloom.types import Form, Grade, Kind, ObjectState, Reason

__version__ = "0.1.0"

_HOME = {
    "ArenaGeometry": "kvloom.plan",
    "Batch": "kvloom.manager.decoding",
    "CacheConfig": "kvloom.config",
    "CachedSequence": "kvloom.manager",
    "CapacityError": "kvloom.errors",
    "ConfigError": "kvloom.errors",
    "CopyPlan": "kvloom.plan",
    "Device": "kvloom.config",
    "EvictionPolicy": "kvloom.eviction",
    "Explanation": "kvloom.plan",
    "Form": "kvloom.types",
    "Grade": "kvloom.types",
    "GroupSpec": "kvloom.spec.model_spec",
    "InputError": "kvloom.errors",
    "IntegrityError": "kvloom.errors",
    "KVLoomError": "kvloom.errors",
    "Kind": "kvloom.types",
    "KindStats": "kvloom.manager",
    "LifecycleError": "kvloom.errors",
    "Limit": "kvloom.plan",
    "Manager": "kvloom.manager",
    "MissingExtraError": "kvloom.errors",
    "ModelSpec": "kvloom.spec.model_spec",
    "ObjectState": "kvloom.types",
    "Reason": "kvloom.types",
    "SequenceError": "kvloom.errors",
    "SpecError": "kvloom.errors",
    "StaleLeaseError": "kvloom.errors",
    "Stats": "kvloom.manager",
    "TableFullError": "kvloom.errors",
    "TensorSpec": "kvloom.spec.model_spec",
    "TokenRange": "kvloom.manager.ranges",
    "UnsupportedError": "kvloom.errors",
    "WrongThreadError": "kvloom.errors",
    "load_preset": "kvloom.spec.presets",
    "parse_size": "kvloom.config",
    "spec_from_config": "kvloom.spec.from_config",
}

__all__ = [
    "ArenaGeometry",
    "Batch",
    "CacheConfig",
    "CachedSequence",
    "CapacityError",
    "ConfigError",
    "CopyPlan",
    "Device",
    "EvictionPolicy",
    "Explanation",
    "Form",
    "Grade",
    "GroupSpec",
    "InputError",
    "IntegrityError",
    "KVLoomError",
    "Kind",
    "KindStats",
    "LifecycleError",
    "Limit",
    "Manager",
    "MissingExtraError",
    "ModelSpec",
    "ObjectState",
    "Reason",
    "SequenceError",
    "SpecError",
    "StaleLeaseError",
    "Stats",
    "TableFullError",
    "TensorSpec",
    "TokenRange",
    "UnsupportedError",
    "WrongThreadError",
    "__version__",
    "load_preset",
    "parse_size",
    "spec_from_config",
]


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'kvloom' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
